// Implementation of persistent.h: each cell and dtype has kernels (persistent_gpu.h, compiled by
// nvcc); persistent_launch.cpp is shared.
#pragma once

#include "cell/cells.h"
#include "cuda/kernel/persistent.h"

#include <cstddef>
#include <cstdint>

namespace lltm::cuda {

constexpr int kBlockThreads = kWarps * kWarpLanes;

namespace {

// Cells that have persistent kernels. CMakeLists.txt reads this list and compiles the kernels.
using PersistentCells = CellList<Lltm, Lstm, Gru>;

// Returns true if the cell has persistent kernels.
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

// Selected by cell id, because the cell definition is a different type in every file.
template <int kId, typename Args>
struct PersistentKernels {
  static std::int64_t resident(std::int64_t hidden, int tiles);
  static bool launch(const Args& args, std::int64_t groups, int tiles, Stream stream);
};

// Thread blocks that the device runs concurrently, with this much shared memory.
std::int64_t resident_blocks_of(const void* kernel, std::size_t shared_bytes);

// Launches a grid (slices of hidden units, groups of rows) whose blocks all run concurrently.
// Returns false if it is rejected. `args` is the kernel parameter.
bool launch_cooperatively(
    const void* kernel,
    const void* args,
    std::int64_t slices,
    std::int64_t groups,
    std::size_t shared_bytes,
    Stream stream);

}  // namespace lltm::cuda
