// Compiles kernels for LLTM_CUDA_EMBED into the folder LLTM_CACHE_DIR. Needs NVRTC, but no GPU.
//
//     lltm_embed_kernels capability [H...]
#include "cell/cells.h"
#include "cell/registry.h"
#include "cuda/kernel/embedded_kernels.h"
#include "cuda/kernel/kernel_cache.h"
#include "cuda/kernel/nvrtc.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

int main(int argc, char** argv) {
  using namespace lltm::cuda;
  const int capability = std::stoi(argv[1]);
  std::vector<std::int64_t> sizes;
  for (int k = 2; k < argc; ++k) sizes.push_back(std::stoll(argv[k]));
  std::vector<std::string> sources;
  for (const lltm::CellInfo* const cell : lltm::kCells) {
    for (const KernelForm& form : embedded_kernels(*lltm::find_cell(cell->name), sizes)) {
      sources.push_back(print_kernel(form));
    }
  }
  std::atomic<std::size_t> next = 0;
  const auto compile_some = [&] {
    for (std::size_t k = next++; k < sources.size(); k = next++) {
      cached(kernel_key(sources[k], capability), [&] { return compile(sources[k], capability); });
    }
  };
  std::vector<std::jthread> threads;
  while (threads.size() < std::thread::hardware_concurrency()) threads.emplace_back(compile_some);
}
