#!/bin/sh
# Installs packages that pip cannot: a C++ compiler, Python's headers and venv module, and, to save
# time, GoogleTest (otherwise downloaded) and ccache. Uses Debian's or Ubuntu's, if the user may;
# otherwise prints missing required packages and fails.
#
#   system-packages.sh [PYTHON [clang]]     also Clang and its sanitizers
#   system-packages.sh [PYTHON [doxygen]]   also Doxygen
#   system-packages.sh [PYTHON [valgrind]]  also valgrind
#   system-packages.sh [PYTHON [lintian]]   also lintian, optional
#   system-packages.sh [PYTHON [aarch64]]   also a cross compiler for ARM, an emulator and the
#                                           sources of GoogleTest
#   system-packages.sh [PYTHON [macos]]     also LLVM's linker for macOS, and those sources
set -eu
python=${1:-python3}
with=${2:-}

command -v "$python" > /dev/null || {
  echo "lltm: Python not found: install python3 (3.10 or later), or set PYTHON" >&2
  exit 1
}

# Print missing packages.
program() { command -v "$1" > /dev/null || echo "${2:-$1}"; }
compiler() { command -v c++ > /dev/null || program g++; }
venv() { "$python" -c 'import ensurepip, venv' 2> /dev/null || echo python3-venv; }
headers() {
  "$python" -c 'import os, sysconfig as s, sys
sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' || echo python3-dev
}
googletest() {
  for folder in /usr/include /usr/local/include; do
    [ -e "$folder/gtest/gtest.h" ] && return
  done
  echo libgtest-dev
}
file() { [ -e "$1" ] || echo "$2"; }
more() {
  case $with in
    clang) # may lack sanitizer libraries
      echo 'int main() {}' | clang++ -x c++ - -fsanitize=address -o /dev/null 2> /dev/null ||
        echo clang libclang-rt-dev ;;
    doxygen | valgrind) program "$with" ;;
    aarch64)
      program aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
      program qemu-aarch64 qemu-user
      file /usr/src/googletest libgtest-dev ;;
    macos)
      file /usr/lib/llvm-19/bin/ld64.lld lld-19
      file /usr/lib/llvm-19/bin/llvm-otool llvm-19
      file /usr/src/googletest libgtest-dev ;;
  esac
}

needed() { echo $(compiler) $(venv) $(headers) $(more); }
wanted() { echo $(needed) $(googletest) $(program ccache) $([ "$with" != lintian ] || program lintian); }

root=
[ "$(id -u)" = 0 ] || root="sudo -n"
packages=$(wanted)
if [ -n "$packages" ] && command -v apt-get > /dev/null && $root true 2> /dev/null; then
  echo "Installing Debian packages: $packages"
  install() {
    $root env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends $packages > /dev/null
  }
  # Package lists can be missing or old. Offline, uses the installed packages.
  install 2> /dev/null || { $root apt-get update -qq && install; } || true
fi

missing=$(needed)
[ -z "$missing" ] || {
  echo "lltm: install these Debian packages, or their equivalents: $missing" >&2
  exit 1
}
