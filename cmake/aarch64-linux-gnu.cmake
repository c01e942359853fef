# Linux on ARM, with Debian's g++-aarch64-linux-gnu. Programs run under qemu-user, which emulates
# all CPU extensions that it supports.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64;-cpu;max;-L;/usr/aarch64-linux-gnu)
# The second folder has libtorch (.ci/aarch64).
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu "${CMAKE_CURRENT_LIST_DIR}/../build/aarch64/site")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE BOTH)
