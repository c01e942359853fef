// Calls liblltm only. With --as-needed, only liblltm then links libtorch.
#include <lltm/version.h>

#include <cstdio>

int main() {
  std::puts(lltm::version());
  return 0;
}
