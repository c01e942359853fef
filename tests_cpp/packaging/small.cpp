// Calls a function of liblltm and none of libtorch. With --as-needed, only liblltm then links
// libtorch.
#include <lltm/version.h>

#include <cstdio>

int main() {
  std::puts(lltm::version());
  return 0;
}
