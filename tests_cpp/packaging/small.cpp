// Calls one function of liblltm and nothing of libtorch, so that a linker with --as-needed
// leaves libtorch to liblltm.
#include <lltm/version.h>

#include <cstdio>

int main() {
  std::puts(lltm::version());
  return 0;
}
