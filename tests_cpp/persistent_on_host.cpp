#include "persistent_on_host.h"

#include "cell/cells.h"
#include "cuda/kernel/persistent_kernels.h"
#include "cuda_on_host.h"
#include "custom_definitions.h"

#include <c10/util/Exception.h>

#include <type_traits>

namespace lltm::cuda {
namespace {

// Units of K in registers and in shared memory.
template <int kUnits, int kShared = 0>
struct Units {};

// The GPU's kernels have exactly the units; these suffice, and compile faster.
template <typename Body, int... kUnits, int... kShared>
void visit_units(const KernelForm& kernel, const Body& body, Units<kUnits, kShared>...) {
  const int needed = kernel.units + kernel.shared_units;
  const bool in_shared = kernel.shared_units > 0 || (lltm_test::prefers_shared && needed > 1);
  bool found = false;
  ((found || needed > kUnits + kShared || in_shared != (kShared > 0)
        ? void()
        : (found = true,
           body(std::integral_constant<int, kUnits>(), std::integral_constant<int, kShared>()))),
   ...);
  TORCH_CHECK(found, "no kernel for ", needed, " units");
}

template <typename Args, bool kCustom, typename Body>
void visit_kernel(const KernelForm& kernel, const Body& body) {
  const auto with_tiles = [&](auto tiles) {
    if (kernel.tiles != tiles) return;
    const auto with_units = [&](auto units, auto shared) {
      std::false_type no;
      if constexpr (std::is_same_v<typename Args::Element, float> && !kCustom) {
        if (kernel.tf32 != 0) return body(units, shared, tiles, std::true_type(), no);
      }
      if constexpr (kCustom) {
        if (kernel.heads != 0) return body(units, shared, tiles, no, std::true_type());
      }
      TORCH_CHECK(kernel.heads == 0, "only tests of custom cells have heads");
      body(units, shared, tiles, no, no);
    };
    if constexpr (kCustom) {
      visit_units(kernel, with_units, Units<4>(), Units<1, 4>());
    } else {
      visit_units(
          kernel,
          with_units,
          Units<1>(),
          Units<2>(),
          Units<6>(),
          Units<12>(),
          Units<1, 4>(),
          Units<4, 20>());
    }
  };
  with_tiles(std::integral_constant<int, 1>());
  with_tiles(std::integral_constant<int, 2>());
  with_tiles(std::integral_constant<int, 4>());
}

template <typename Args>
bool launch(const KernelForm& form, const Grid& grid, const DirectionArgs<Args>& args) {
  TORCH_CHECK(
      grid.z * grid.y * grid.x <= lltm_test::multiprocessors, "a launch that would never end");
  TORCH_CHECK(grid.shared_bytes <= lltm_test::shared_bytes, "more shared memory than the GPU has");
  const bool is_faulty = lltm_test::faulty_tiles == 0 || lltm_test::faulty_tiles == form.tiles;
  const auto fault = is_faulty ? lltm_test::persistent_fault : lltm_test::Fault::none;
  TORCH_CHECK(fault != lltm_test::Fault::fails, "an illegal instruction");
  KernelForm computed = form;
  if (fault == lltm_test::Fault::tf32) computed.tf32 = 1;
  if (lltm_test::launches_left == 0) return false;
  --lltm_test::launches_left;
  ++lltm_test::persistent_launches;
  const auto run = [&]<typename Cell>(Cell, auto custom) {
    if constexpr (Cell::kCell.h.count() > 0) {
      visit_kernel<Args, custom>(
          computed, [&](auto units, auto shared, auto tiles, auto tf32, auto heads) {
            const PersistentKernel ran = {form.cell, tiles, tf32, units, shared};
            lltm_test::run_grid(
                {static_cast<int>(grid.x),
                 static_cast<int>(grid.y),
                 static_cast<std::size_t>(shared_bytes<Args>(ran)) / sizeof(Sums),
                 static_cast<int>(grid.z)},
                [&](lltm_test::HostBlock::Lane& lane) {
                  const Args& mine = args.of[lane.direction()];
                  lane.use(mine.words);
                  run_steps<Cell, units, shared, tiles, tf32, heads>(mine, lane);
                },
                lltm_test::schedule_seed++);
          });
    }
  };
  if (lltm::is_built_in(*form.cell)) {
    lltm_test::visit_definition<true>(*form.cell, [&](auto cell) { run(cell, std::false_type()); });
  } else {
    lltm_test::visit_definition<false>(*form.cell, [&](auto cell) { run(cell, std::true_type()); });
  }
  for (int n = 0; n < grid.z; ++n) {
    const LaunchWords& words = args.of[n].words;
    TORCH_CHECK(*words.begun == words.blocks, "blocks are expected that never begin");
  }
  if (fault == lltm_test::Fault::wrong) {  // as after a timeout
    *args.of[0].words.failure = 1;
    const Args& first = args.of[0];
    if constexpr (Args::kIsForward) first.h[first.hidden - 1] = 2.0F;
    if constexpr (!Args::kIsForward) first.dh[first.hidden - 1] += 2.0F;
  }
  return true;
}

}  // namespace
}  // namespace lltm::cuda

bool lltm_test::launch_persistent_on_host(
    const lltm::cuda::KernelForm& form, const lltm::cuda::Grid& grid, void** parameters) {
  using namespace lltm::cuda;
  return visit_type(form.tensor, [&]<typename T>(T*) {
    if constexpr (sizeof(T) <= sizeof(float)) {
      const auto run = [&]<typename Args>(Args*) {
        return launch(form, grid, *static_cast<const DirectionArgs<Args>*>(parameters[0]));
      };
      return form.backward ? run(static_cast<PersistentBackwardArgs<T>*>(nullptr))
                           : run(static_cast<PersistentForwardArgs<T>*>(nullptr));
    }
    return false;
  });
}
