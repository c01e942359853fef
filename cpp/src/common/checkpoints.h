#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace lltm {

// checkpoint_steps is any positive number. The bound exceeds every sequence's length and prevents
// overflow.
template <typename Size>  // int64_t or SymInt
Size checkpoint_count(const Size& steps, int64_t checkpoint_steps) {
  const int64_t apart = std::min(checkpoint_steps, int64_t{1} << 62);
  return (steps + (apart - 1)) / apart;
}

// False if `every` is 0.
inline bool has_checkpoint(size_t k, int64_t every) {
  return every > 0 && k % static_cast<size_t>(every) == 0;
}

}  // namespace lltm
