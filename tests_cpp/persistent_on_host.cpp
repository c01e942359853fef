#include "persistent_on_host.h"

#include "cuda/kernel/persistent_kernels.h"
#include "cuda_on_host.h"
#include "custom_definitions.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>
#include <map>
#include <type_traits>
#include <utility>

namespace lltm::cuda {
namespace {

std::map<void*, std::uint32_t> failures;  // of each stream

}  // namespace

PersistentLimits persistent_limits() {
  return {nullptr, lltm_test::multiprocessors, lltm_test::shared_bytes};
}

std::uint32_t* failure_word(Stream stream) {
  return &failures[stream.handle];
}

bool take_failure(Stream stream) {
  return std::exchange(*failure_word(stream), 0) != 0;
}

void mark_absent(void* data, std::int64_t bytes, Stream) {
  std::memset(data, 0xFF, static_cast<std::size_t>(bytes));
  lltm_test::filled.emplace_back(lltm_test::persistent_launches, bytes);
}

// Units of K in registers and in shared memory.
template <int kUnits, int kShared = 0>
struct Units {};

// The GPU's kernels have exactly the units; these suffice, and compile faster.
template <typename Body, int... kUnits, int... kShared>
void visit_units(const PersistentKernel& kernel, const Body& body, Units<kUnits, kShared>...) {
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
void visit_kernel(const PersistentKernel& kernel, const Body& body) {
  const auto with_tiles = [&](auto tiles) {
    if (kernel.tiles != tiles) return;
    const auto with_units = [&](auto units, auto shared) {
      std::false_type no;
      if constexpr (std::is_same_v<typename Args::Element, float> && !kCustom) {
        if (kernel.tf32) return body(units, shared, tiles, std::true_type(), no);
      }
      if constexpr (kCustom) {
        if (kernel.heads) return body(units, shared, tiles, no, std::true_type());
      }
      TORCH_CHECK(!kernel.heads, "only tests of custom cells have heads");
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
bool launch_persistent(
    const PersistentKernel& kernel, const DirectionArgs<Args>& args, std::int64_t groups, Stream) {
  const std::int64_t slices = slices_of(args.of[0].hidden);
  TORCH_CHECK(
      args.count * slices * groups <= lltm_test::multiprocessors, "a launch that would never end");
  TORCH_CHECK(
      shared_bytes<Args>(kernel) <= lltm_test::shared_bytes, "more shared memory than the GPU has");
  const bool is_faulty = lltm_test::faulty_tiles == 0 || lltm_test::faulty_tiles == kernel.tiles;
  const auto fault = is_faulty ? lltm_test::persistent_fault : lltm_test::Fault::none;
  TORCH_CHECK(fault != lltm_test::Fault::fails, "an illegal instruction");
  PersistentKernel computed = kernel;
  computed.tf32 = kernel.tf32 || fault == lltm_test::Fault::tf32;
  if (lltm_test::launches_left == 0) return false;
  --lltm_test::launches_left;
  ++lltm_test::persistent_launches;
  const auto run = [&]<typename Cell>(Cell, auto custom) {
    if constexpr (Cell::kCell.h.count() > 0) {
      visit_kernel<Args, custom>(
          computed, [&](auto units, auto shared, auto tiles, auto tf32, auto heads) {
            const PersistentKernel ran = {kernel.cell, tiles, tf32, units, shared};
            lltm_test::run_grid(
                {static_cast<int>(slices),
                 static_cast<int>(groups),
                 static_cast<std::size_t>(shared_bytes<Args>(ran)) / sizeof(Sums),
                 args.count},
                [&](lltm_test::HostBlock::Lane& lane) {
                  const Args& mine = args.of[lane.direction()];
                  lane.use(mine.words);
                  run_steps<Cell, units, shared, tiles, tf32, heads>(mine, lane);
                },
                lltm_test::schedule_seed++);
          });
    }
  };
  if (kernel.cell->programs == nullptr) {
    visit_cell(*kernel.cell, [&]<typename Definition>(Definition) {
      run(DefinitionRegisters<Definition>(), std::false_type());
    });
  } else {
    lltm_test::visit_custom_definition(
        *kernel.cell, [&](auto cell) { run(cell, std::true_type()); });
  }
  for (int n = 0; n < args.count; ++n) {
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

template <typename Args>
bool spills_registers(const PersistentKernel& kernel) {
  return kernel.tiles > lltm_test::tiles_without_spills;
}

#define LLTM_PERSISTENT_OF(Args)                                 \
  template bool spills_registers<Args>(const PersistentKernel&); \
  template bool launch_persistent(                               \
      const PersistentKernel&, const DirectionArgs<Args>&, std::int64_t, Stream);
LLTM_PERSISTENT_OF(PersistentForwardArgs<float>)
LLTM_PERSISTENT_OF(PersistentForwardArgs<c10::Half>)
LLTM_PERSISTENT_OF(PersistentForwardArgs<c10::BFloat16>)
LLTM_PERSISTENT_OF(PersistentBackwardArgs<float>)
LLTM_PERSISTENT_OF(PersistentBackwardArgs<c10::Half>)
LLTM_PERSISTENT_OF(PersistentBackwardArgs<c10::BFloat16>)
#undef LLTM_PERSISTENT_OF

}  // namespace lltm::cuda
