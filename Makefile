# Every target sets up what it needs: a virtual environment in .venv with the package and, for all but demo and
# deploy-demo, the developers' tools. Where uv is there, it installs, much faster than pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
APP := $(VENV)/.app
READY := $(VENV)/.ready
# TORCH=cpu: PyTorch's own builds for CPUs, a tenth of the size; needs uv and PyTorch's index.
TORCH ?=
ifneq ($(TORCH),$(filter auto cpu cu% rocm% xpu,$(TORCH)))
$(error TORCH=$(TORCH): allowed are cpu, auto, xpu, and versions of CUDA and ROCm that uv knows, such as cu126 or rocm6.4)
endif
SIZE := $(if $(TORCH),$(if $(filter cpu,$(TORCH)),about 1.5 GB,several GB),about 6 GB with CUDA's libraries)
ARGS ?=
FINDING ?= $(patsubst findings/%.sh,%,$(wildcard findings/*.sh))
BENCH ?= step accounting attack shadow comparison
# One process a core and one more, since tests of deployments mostly wait (with two more CI takes a minute longer); one
# thread a process, since small tensors are slower on more.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(1 + (os.cpu_count() or 1))')
# Tests start many processes: without Python's cache of compiled modules each would compile PyTorch anew.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# Free for the demo of a deployment: its port and those after it.
PORT ?= 8600
DEMO := runs/deploy-demo

ifneq ($(shell command -v uv),)
CREATE := uv venv --quiet --seed --python $(PYTHON) $(VENV)
INSTALL := uv pip install --quiet --python $(BIN)/python $(if $(TORCH),--torch-backend $(TORCH))
else
CREATE := $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet --upgrade pip
INSTALL := $(if $(TORCH),$(error TORCH=$(TORCH) needs uv))$(BIN)/python -m pip install --quiet
endif

.PHONY: help screenshot demo deploy-demo tapped test test-all oldest flower-test slow soak audit same docker-test ray-test lint format docs docs-version bench findings clean

help:
	@echo "make demo [ARGS=...]   run configs/quickstart.toml and write its report; TORCH=cpu: a small installation, by uv"
	@echo "make deploy-demo       two minutes: real processes and a listener, without TLS and with it; PORT=8600"
	@echo "make test [ARGS=...]   the tests that take minutes together: every mechanism, attack, engine, the report"
	@echo "make test-all          all tests, as CI runs them; make slow measures which ones make test leaves out"
	@echo "make oldest            all tests with the oldest versions that pyproject.toml allows: minutes, and their download"
	@echo "make flower-test       own Flower apps of 30 kinds, in their frameworks: minutes, and their download"
	@echo "make soak              memory over many clients and many rounds: minutes, not part of make test"
	@echo "make audit             every kind of privacy figure against independent ones: minutes; ARGS=--verbose prints all"
	@echo "make same BEFORE=DIR   compare what this tree and the one in DIR write for the same commands: minutes"
	@echo "make docker-test       build the image and test the deployment in containers: needs Docker; make ray-test: Ray's nodes"
	@echo "make lint              ruff, mypy, import-linter"
	@echo "make docs              the documentation as a site: site/index.html"
	@echo "make docs-version      the same for this version, next to earlier ones, in the branch gh-pages"
	@echo "make bench             speed, as ratios in one run: each benchmark writes bench/NAME.json; BENCH=step for one"
	@echo "make screenshot        README's and docs' pictures; needs Chromium"
	@echo "make findings          surprises about other software, a table: minutes, and PyTorch's download; FINDING=name for one"

$(APP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "fedpriv needs Python 3.11 to 3.13; try make PYTHON=python3.12")'
	test -x $(BIN)/python || ($(CREATE))
	@echo "installing into $(VENV): $(SIZE); seconds with uv, minutes with pip"
	$(INSTALL) --editable .
	@touch $@

$(READY): $(APP)
	$(INSTALL) --editable ".[dev]"
	@touch $@

demo: $(APP)
	$(BIN)/fedpriv run configs/quickstart.toml $(ARGS)

# The pictures of README and docs but for those of studies that take hours; pages are drawn by Chromium.
SHOT := runs/screenshot
DRAW := chromium --headless --no-sandbox --hide-scrollbars
BATCHES := training.batch_size=8 model.activation=relu model.hidden=[512] mechanism.name=none federation.rounds=1 \
	adversary.attacks=["closed_form"] adversary.victims=2
screenshot: $(APP)
	rm -rf $(SHOT)
	$(BIN)/fedpriv run configs/quickstart.toml --quiet --out $(SHOT)/quickstart
	$(BIN)/fedpriv run configs/imprint.toml --quiet --out $(SHOT)/imprint
	$(BIN)/fedpriv run configs/quickstart.toml $(BATCHES:%=--set '%') --quiet --out $(SHOT)/batches
	$(BIN)/python -c 'import fedpriv; print(fedpriv.Run("$(SHOT)/quickstart")._repr_html_())' >$(SHOT)/notebook.html
	$(DRAW) --window-size=1000,1250 --screenshot=docs/images/report.png file://$(CURDIR)/$(SHOT)/quickstart/report.html
	$(DRAW) --window-size=1150,650 --screenshot=docs/images/notebook.png file://$(CURDIR)/$(SHOT)/notebook.html
	$(BIN)/python -m studies pictures docs/images --runs $(SHOT)
	$(BIN)/fedpriv account compare --plot docs/images/comparison.svg

# Twice the same, on real processes: without TLS the listener has the pictures, with TLS it has nothing. Nobody but the
# listener attacks, so that what is recovered is what it heard.
deploy-demo: $(APP)
	rm -rf $(DEMO)
	$(MAKE) --no-print-directory tapped KIND=plain INSECURE=--insecure
	$(MAKE) --no-print-directory tapped KIND=tls
	@echo "Reports: $(DEMO)/plain-heard/report.html (the pictures), $(DEMO)/tls-heard/report.html (nothing)"

tapped: DIR = --dir $(DEMO)/$(KIND)-deployment
tapped: $(APP)
	$(BIN)/fedpriv deploy up $(DIR) --nodes 2 --port $(PORT) --listener $(INSECURE)
	@trap '$(BIN)/fedpriv deploy down $(DIR)' EXIT; set -ex; \
	$(BIN)/fedpriv deploy run $(DIR) configs/wiretap.toml --set adversary.attacks=[] --quiet --out $(DEMO)/$(KIND); \
	$(BIN)/fedpriv attack $(DEMO)/$(KIND) --heard $(DEMO)/$(KIND)-deployment/heard --attack closed_form --quiet --out $(DEMO)/$(KIND)-heard

test: $(READY)
	$(PYTEST) -m "not slow or essential" $(ARGS)

test-all: $(READY)
	$(PYTEST) $(ARGS)

# In an environment of its own, and no part of CI; the containers' pins are of the newest versions.
oldest:
	uv venv --quiet --clear --python $(PYTHON) .venv-oldest
	uv pip install --quiet --python .venv-oldest/bin/python --resolution lowest-direct --editable ".[dev]"
	$(subst $(BIN),.venv-oldest/bin,$(PYTEST)) --deselect tests/deploy/test_deploy_compose.py::test_every_dependency_is_pinned $(ARGS)

# Frameworks of Flower apps that the project does not depend on, in an environment of their own: no part of CI.
FRAMEWORKS := accelerate catboost fastai flax jax keras lightning monai optax pandas xgboost
flower-test: $(READY)
	test -x .venv-flower/bin/python || uv venv --quiet --python $(PYTHON) .venv-flower
	uv pip install --quiet --python .venv-flower/bin/python $(if $(TORCH),--torch-backend $(TORCH)) --editable ".[dev]" $(FRAMEWORKS)
	OMP_NUM_THREADS=1 FEDPRIV_FRAMEWORKS=1 .venv-flower/bin/python -m pytest tests/flower/test_flower_shapes.py $(ARGS)

# Measures all tests, and writes anew which of them make test leaves out.
slow: $(READY)
	$(PYTEST) --list-slow $(ARGS)

soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s --numprocesses 0 tests/soak.py $(ARGS)

# Exit code 1, and the row: a figure is below an independent one, or far above it. ARGS="ceiling laplace": some rows.
audit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.accounting.audit $(ARGS)

# Exit code 1, and the first lines that differ: this tree's runs are not those of another one, such as before a change.
same: $(READY)
	$(BIN)/python -m tests.same_runs $(BEFORE) $(ARGS)

# With a Docker engine: builds the image, and tests the deployment in containers. ARGS="--eight 10": eight nodes so often.
docker-test: $(READY)
	$(BIN)/python -m tests.deploy.in_containers $(ARGS)

# Ray clusters of two and four nodes on this machine: minutes.
ray-test: $(READY)
	FEDPRIV_RAY_NODES=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 0 --timeout 1800 tests/engines/test_ray_nodes.py \
		"tests/studies/test_gpu_benchmark.py::test_each_part_measures_on_a_cpu[ray]" $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.docs: $(READY)
	$(INSTALL) --editable ".[docs]"
	@touch $@

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

docs-version: $(VENV)/.docs
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mike deploy --update-aliases $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) latest

bench: $(READY)
	@mkdir -p bench
	@set -e; for name in $(BENCH); do echo "benchmarks $$name"; $(BIN)/python -m benchmarks $$name --json bench/$$name.json $(ARGS); done

# All are run; the exit code is 1 if one no longer behaves as its script says.
findings:
	@failed=0; log=$$(mktemp); row='%-10s %7s  %-26s %s\n'; printf "$$row" result seconds script packages; \
	for script in $(FINDING:%=findings/%.sh); do \
		began=$$(date +%s); said="as stated"; bash $$script >"$$log" 2>&1 || { failed=1; said=CHANGED; }; \
		printf "$$row" "$$said" $$(($$(date +%s) - began)) $$(basename $$script .sh) "$$(sed -n 's/^packages //p' $$script)"; \
		[ "$$said" = "as stated" ] || cat "$$log"; \
	done; rm "$$log"; exit $$failed

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
