// If preloaded, makes libtorch report release 2.99.1.
#include <cstdint>

extern "C" std::uint64_t aoti_torch_abi_version() {
  return 2ULL << 56 | 99ULL << 48 | 1ULL << 40;
}
