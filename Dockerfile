# The image of all parties: SuperLink, SuperNodes, their executors, and the command line. It holds no keys and no data.
#
#   docker build --tag fedpriv .                        PyTorch's builds for CPUs: below 2 GB
#   docker build --tag fedpriv --build-arg TORCH= --build-arg PACKAGES="gcc libc6-dev" .      with CUDA and Triton
#
# Settings of pip and uv, such as a mirror's address, are handed in as secrets (--secret id=pip,src=pip.conf and
# --secret id=uv,src=uv.toml), wheels as a folder (--build-context wheels=DIR); none of it stays in the image.

FROM scratch AS wheels

FROM python:3.11.11-slim-bookworm AS build

# Of fedpriv's extras; ray makes the image one for Ray's nodes, too.
ARG EXTRAS=datasets,service
# Which of PyTorch's builds, as uv's --torch-backend names them; empty: the one that pip takes, which is for CUDA.
ARG TORCH=cpu

ENV UV_NO_CACHE=1 UV_LINK_MODE=copy VIRTUAL_ENV=/opt/fedpriv
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir --disable-pip-version-check uv==0.13.9 \
    && python -m venv --without-pip /opt/fedpriv
ENV PATH=/opt/fedpriv/bin:/opt/uv/bin:$PATH
WORKDIR /source
COPY containers/constraints.txt containers/constraints.txt
RUN --mount=type=secret,id=uv,target=/etc/uv/uv.toml --mount=type=bind,from=wheels,target=/wheels \
    uv pip install --constraint containers/constraints.txt ${TORCH:+--torch-backend "$TORCH"} torch torchvision
COPY pyproject.toml README.md LICENSE ./
COPY attacks attacks
COPY clients clients
COPY configs configs
COPY fedpriv fedpriv
COPY server server
RUN --mount=type=secret,id=uv,target=/etc/uv/uv.toml --mount=type=bind,from=wheels,target=/wheels \
    uv pip install --constraint containers/constraints.txt ${TORCH:+--torch-backend "$TORCH"} --compile-bytecode ".[$EXTRAS]"


FROM python:3.11.11-slim-bookworm AS run

# Debian's packages that the apps need: Triton, which compiles kernels for a GPU, needs a C compiler.
ARG PACKAGES=
RUN [ -z "$PACKAGES" ] || { apt-get update --quiet=2 && apt-get install --quiet=2 --no-install-recommends $PACKAGES \
    && rm -rf /var/lib/apt/lists/*; }
COPY --from=build /opt/fedpriv /opt/fedpriv
# Where volumes are mounted: a fresh volume takes these permissions over, so that whoever FEDPRIV_UID names can write.
RUN useradd --uid 1000 --create-home fedpriv \
    && install --directory --mode 1777 /deployment /deployment/seeds /data /keys /memory /state /volumes/superlink \
       /volumes/gateway /volumes/admission /volumes/supernode-0 /volumes/supernode-1 /volumes/supernode-2 \
       /volumes/supernode-3 /volumes/supernode-4 /volumes/supernode-5 /volumes/supernode-6 /volumes/supernode-7

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
