// Memory of engines. No PyTorch header.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <memory>

namespace lltm {

// Requests huge pages for new memory of at least kLarge bytes. Such memory usually returns to the
// operating system when freed, so the first access to each page zeroes it again. With 4 KiB pages
// this can take longer than the computation.
constexpr std::size_t kHugePage = 2 << 20, kLarge = 2 * kHugePage;
inline void request_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (bytes < kLarge) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t last = (begin + bytes) / kHugePage * kHugePage;
  // Only a hint: the result does not matter.
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Aligned to cache lines by hand: malloc caches small blocks, but aligned allocation does not reuse
// them.
template <typename T>
class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(int64_t count) : bytes_(new std::byte[count * sizeof(T) + kLine]) {
    request_huge_pages(bytes_.get(), count * sizeof(T));
  }
  T* data() const {
    const auto begin = reinterpret_cast<std::uintptr_t>(bytes_.get());
    return reinterpret_cast<T*>((begin + kLine - 1) / kLine * kLine);
  }

 private:
  static constexpr std::size_t kLine = 64;
  std::unique_ptr<std::byte[]> bytes_;
};

}  // namespace lltm
