# The image of all parties: SuperLink, SuperNodes, their executors, and the command line. It holds no keys and no data.
#
#   docker build --tag fedpriv .
#   docker build --tag fedpriv --build-arg TORCH_INDEX=URL .

FROM python:3.11.11-slim-bookworm AS build

# Where PyTorch is taken from; empty: where pip takes all else, which has the build for CUDA. The index of builds for CPUs,
# a tenth of the size, is named on PyTorch's own page of installation.
ARG TORCH_INDEX=

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/fedpriv && /opt/fedpriv/bin/pip install pip==25.0.1
ENV PATH=/opt/fedpriv/bin:$PATH
WORKDIR /source
COPY containers/constraints.txt containers/constraints.txt
RUN pip install --constraint containers/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch torchvision
COPY pyproject.toml README.md LICENSE ./
COPY attacks attacks
COPY clients clients
COPY fedpriv fedpriv
COPY server server
RUN pip install --constraint containers/constraints.txt .


FROM python:3.11.11-slim-bookworm AS run

COPY --from=build /opt/fedpriv /opt/fedpriv
# Where volumes are mounted: a fresh volume takes these permissions over, so that whoever FEDPRIV_UID names can write.
RUN useradd --uid 1000 --create-home fedpriv \
    && install --directory --mode 1777 /deployment /data /keys /memory /state /volumes/superlink /volumes/admission \
       /volumes/supernode-0 /volumes/supernode-1 /volumes/supernode-2 /volumes/supernode-3 \
       /volumes/supernode-4 /volumes/supernode-5 /volumes/supernode-6 /volumes/supernode-7

ENV PATH=/opt/fedpriv/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    FLWR_HOME=/tmp/flower \
    FEDPRIV_DATA=/data \
    FEDPRIV_RUNS=/deployment/runs \
    FEDPRIV_SEEDS=/deployment/seeds \
    FEDPRIV_MEMORY=/memory
USER 1000:1000
WORKDIR /tmp
CMD ["fedpriv", "--help"]
