# LLTM_CUDA and requirements for the CUDA kernels.
#
# Default: ON with a CUDA build of torch and an nvcc of the same major version. Otherwise PyTorch's
# operations compute CUDA tensors. nvcc is searched in CMAKE_CUDA_COMPILER, CUDACXX, the bin folder
# of CUDAToolkit_ROOT, CUDA_PATH, CUDA_HOME, /usr/local/cuda, and then on the PATH.
#
# If LLTM_CUDA is ON, also enables the language CUDA, defines lltm::torch_cuda and sets
# LLTM_CUDA_INCLUDE_DIRS, LLTM_CUDA_TOOLKIT_VERSION, LLTM_CUDA_MAJOR, LLTM_CUDA_KERNELS
# (architecture names) and LLTM_CUDA_FOLDERS (CUDA's library folders, relative to the folder of
# packages).
include_guard(GLOBAL)

set(nvcc "${CMAKE_CUDA_COMPILER}")
if(NOT nvcc)
  set(nvcc "$ENV{CUDACXX}")
endif()
if(NOT nvcc AND LLTM_TORCH_HAS_CUDA)
  # Toolkit folders first: nvcc on the PATH can be a wrapper outside a toolkit.
  find_program(LLTM_NVCC nvcc
    HINTS "${CUDAToolkit_ROOT}" ENV CUDA_PATH ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES bin)
  set(nvcc "${LLTM_NVCC}")
endif()
set(available OFF)
if(NOT LLTM_TORCH_HAS_CUDA)
  set(missing "this torch is a build without CUDA")
elseif(NOT nvcc)
  set(missing "no nvcc was found: install CUDA toolkit ${LLTM_TORCH_CUDA_VERSION}, or set CUDACXX to its nvcc")
else()
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE output RESULT_VARIABLE failed ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+)\\.([0-9]+)" matched "${output}")
  set(LLTM_CUDA_TOOLKIT_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")
  if(failed OR NOT matched)
    set(missing "${nvcc} cannot be run")
  elseif(LLTM_TORCH_CUDA_VERSION MATCHES "^${CMAKE_MATCH_1}\\.")
    set(available ON)
  else()
    set(missing "${nvcc} has CUDA ${LLTM_CUDA_TOOLKIT_VERSION}, but torch was built with CUDA ${LLTM_TORCH_CUDA_VERSION}")
  endif()
endif()

option(LLTM_CUDA "Build the CUDA kernels" ${available})
if(LLTM_CUDA AND NOT available)
  message(FATAL_ERROR "lltm: LLTM_CUDA is on, but ${missing}")
endif()
if(NOT LLTM_CUDA)
  set(LLTM_CUDA_FOLDERS "")
  if(LLTM_TORCH_HAS_CUDA AND NOT available)
    message(STATUS "lltm: CUDA kernels disabled; PyTorch's operations compute CUDA tensors. Reason: ${missing}")
  elseif(LLTM_TORCH_HAS_CUDA)
    message(STATUS "lltm: CUDA kernels disabled (LLTM_CUDA=OFF)")
  endif()
  return()
endif()

# Compiled kernels, and PTX, which the driver compiles for newer GPUs.
if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 90-virtual)
endif()
if(LLTM_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${LLTM_CCACHE})
endif()
set(CMAKE_CUDA_COMPILER "${nvcc}")
enable_language(CUDA)
# Links torch's shared CUDA runtime, by its path.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
lltm_find_torch_cuda(problem)
if(problem)
  message(FATAL_ERROR "lltm: ${problem}")
endif()

# Toolkit headers first. Library headers, which a toolkit can lack, are next to torch.
string(REGEX MATCH "^[0-9]+" LLTM_CUDA_MAJOR "${LLTM_TORCH_CUDA_VERSION}")
get_filename_component(site "${LLTM_TORCH_ROOT}" DIRECTORY)
set(include_dirs ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
foreach(folder cu${LLTM_CUDA_MAJOR} cublas cusparse cusolver)
  if(EXISTS "${site}/nvidia/${folder}/include")
    list(APPEND include_dirs "${site}/nvidia/${folder}/include")
  endif()
endforeach()
set(LLTM_CUDA_INCLUDE_DIRS ${include_dirs})

list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^([0-9]+a?)-real$" "sm_\\1"
  OUTPUT_VARIABLE architectures)
list(TRANSFORM architectures REPLACE "^([0-9]+a?)-virtual$" "compute_\\1")
list(TRANSFORM architectures REPLACE "^([0-9]+a?)$" "sm_\\1, compute_\\1")
list(JOIN architectures ", " LLTM_CUDA_KERNELS)
message(STATUS "lltm: CUDA kernels for ${LLTM_CUDA_KERNELS}, compiled by ${nvcc}")

# In a Python environment, packages next to torch and lltm.
set(LLTM_CUDA_FOLDERS "")
foreach(library IN LISTS LLTM_TORCH_CUDA_LIBRARIES)
  cmake_path(GET library PARENT_PATH folder)
  cmake_path(IS_PREFIX site "${folder}" NORMALIZE beside)
  cmake_path(RELATIVE_PATH folder BASE_DIRECTORY "${site}")
  if(beside AND NOT folder STREQUAL "torch/lib" AND NOT folder IN_LIST LLTM_CUDA_FOLDERS)
    list(APPEND LLTM_CUDA_FOLDERS "${folder}")
  endif()
endforeach()
