# For people who work on lltm. `make demo` and `make test` need a machine with
# python3, g++ and make, and set up the rest; what they make stays in .venv/
# and build/.
#
# The commands are the usual ones (pip, cmake, ctest, pytest); README.md shows
# them for an environment of your own.
#
#   make demo           train, compare, save, and run from C++
#   make test           ctest and pytest
#   make bench          kernels and layers side by side, with ratios
#   make test-sanitize  the native tests under ASan and UBSan
#   make lint           clang-format, ruff, mypy
#   make format         rewrite the sources as `make lint` wants them
#   make clean          remove .venv/ and build/

PYTHON ?= python3
# The torch to build against, as pip takes it: `make test TORCH=torch==2.12.1`.
TORCH ?= torch==2.13.0
# What `pip install --no-build-isolation` expects; the versions: pyproject.toml.
BUILD_TOOLS := scikit-build-core pybind11 nlohmann_json cmake ninja

# The interpreter itself, also where a virtual environment (.venv, say) is active.
BASE_PYTHON := $(shell $(PYTHON) -c 'import sys; print(sys._base_executable)' 2> /dev/null)

# The tools of .venv, and its torch for CMake, before those of the machine.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
unexport PYTHONPATH PYTHONHOME
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)

# One thing after another: pip, cmake and ctest use the cores.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: demo test test-native test-python test-sanitize bench lint format clean setup

setup: .venv/.installed

demo: setup
	python examples/char_lm/demo.py

test: test-native test-python

test-native: setup
	cmake --preset default \
	  -DLLTM_WHEEL_CMAKE_PREFIX="$$(python -c 'import lltm; print(lltm.cmake_prefix_path)')"
	cmake --build --preset default
	ctest --preset default

test-python: setup
	pytest

test-sanitize: setup
	cmake --preset sanitize
	cmake --build --preset sanitize
	ctest --preset sanitize

# Needs Google Benchmark (Debian's libbenchmark-dev, or CMake fetches it) and a
# machine with nothing else to do.
bench: setup
	cmake --preset bench
	cmake --build --preset bench
	mkdir -p build/results
	build/bench/benchmarks/lltm_bench --benchmark_out=build/results/kernels.json
	python -m lltm.benchmark --tutorial
	python -m lltm.benchmark --compile --json build/results/layers.json \
	  --plot build/results/layers.png

CPP_FILES = $(shell find . \( -name .venv -o -name build \) -prune -o -type f \
  \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print)

lint: setup
	clang-format --dry-run -Werror $(CPP_FILES)
	ruff check
	ruff format --check
	mypy

format: setup
	clang-format -i $(CPP_FILES)
	ruff check --fix
	ruff format

clean:
	rm -rf .venv build

# ---- setting up -------------------------------------------------------------

# lltm as a user would have it: from a wheel, not from the source folder.
.venv/.installed: .venv/.tools CMakeLists.txt pyproject.toml \
    $(shell find cpp cmake python -type f ! -path '*/__pycache__/*')
	@echo "Building and installing lltm (minutes at first, seconds after a change)"
	pip install --quiet --no-build-isolation '.[test,demo,examples,dev]'
	@touch $@

# Holds what it was made with; anything else asked for makes it anew.
WANTED := $(BASE_PYTHON) $(TORCH) $(BUILD_TOOLS)
ifneq ($(WANTED),$(shell cat .venv/.tools 2> /dev/null))
.PHONY: .venv/.tools
endif
.venv/.tools:
	@.ci/system-packages.sh $(PYTHON)
	@echo "Setting up .venv with $(TORCH) (downloads PyTorch)"
	$(BASE_PYTHON) -m venv --clear .venv
	pip install --quiet $(TORCH) $(BUILD_TOOLS)
	@# Build folders remember where torch was.
	@[ ! -d build ] || find build -name CMakeCache.txt -delete
	@echo '$(WANTED)' > $@
