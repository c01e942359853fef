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
compiler() { command -v c++ > /dev/null || command -v g++ > /dev/null || echo g++; }
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
ccache_() { command -v ccache > /dev/null || echo ccache; }
lintian_() {
  [ "$with" = lintian ] || return 0
  command -v lintian > /dev/null || echo lintian
}

clang() {
  [ "$with" = clang ] || return 0
  # Clang without sanitizer libraries.
  echo 'int main() {}' | clang++ -x c++ - -fsanitize=address -o /dev/null 2> /dev/null ||
    echo clang libclang-rt-dev
}
doxygen_() {
  [ "$with" = doxygen ] || return 0
  command -v doxygen > /dev/null || echo doxygen
}
valgrind_() {
  [ "$with" = valgrind ] || return 0
  command -v valgrind > /dev/null || echo valgrind
}

aarch64_() {
  [ "$with" = aarch64 ] || return 0
  command -v aarch64-linux-gnu-g++ > /dev/null || echo g++-aarch64-linux-gnu
  command -v qemu-aarch64 > /dev/null || echo qemu-user
  [ -e /usr/src/googletest ] || echo libgtest-dev
}

macos_() {
  [ "$with" = macos ] || return 0
  [ -e /usr/lib/llvm-19/bin/ld64.lld ] || echo lld-19
  [ -e /usr/lib/llvm-19/bin/llvm-otool ] || echo llvm-19
  [ -e /usr/src/googletest ] || echo libgtest-dev
}

needed() { echo $(compiler) $(venv) $(headers) $(clang) $(doxygen_) $(valgrind_) $(aarch64_) $(macos_); }
wanted() { echo $(needed) $(googletest) $(ccache_) $(lintian_); }

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
