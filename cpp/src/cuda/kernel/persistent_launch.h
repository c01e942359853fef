// What persistent.h declares, in two parts: the kernels of each cell and dtype (persistent_gpu.h,
// compiled by nvcc), and what is the same for all of them (persistent_launch.cpp).
#pragma once

#include "cell/cells.h"
#include "cuda/kernel/persistent.h"

#include <cstddef>
#include <cstdint>

namespace lltm::cuda {

constexpr int kBlockThreads = kWarps * kWarpLanes;

namespace {

// The cells that have persistent kernels, which CMakeLists.txt reads here and has compiled.
using PersistentCells = CellList<Lltm, Lstm, Gru>;

// Calls body with a value of the type of the cell's page, if it is one of them. Returns whether.
template <typename Body>
bool visit_persistent_cell(const CellInfo& cell, const Body& body) {
  bool found = false;
  PersistentCells::for_each([&]<typename Page>(Page page) {
    if (Page::kCell.id != cell.id) return;
    body(page);
    found = true;
  });
  return found;
}

}  // namespace

// By the id of the cell, because its page is another type in every file.
template <int kId, typename Args>
struct PersistentKernels {
  static std::int64_t resident(std::int64_t hidden, int tiles);
  static bool launch(const Args& args, std::int64_t groups, int tiles, Stream stream);
};

// How many thread blocks of a kernel with so many bytes of shared memory the device runs at once.
std::int64_t resident_blocks_of(const void* kernel, std::size_t shared_bytes);

// A grid of slices of hidden units and groups of rows, all of whose blocks run at once; false where
// that is refused. `args` is the parameter.
bool launch_cooperatively(
    const void* kernel,
    const void* args,
    std::int64_t slices,
    std::int64_t groups,
    std::size_t shared_bytes,
    Stream stream);

}  // namespace lltm::cuda
