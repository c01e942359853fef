// lltm::sequence_prepacked: bytes that are not as prepack made them are refused, and those with a
// checksum made right again do no harm. Nor do those that were changed after a call with the same
// tensor, behind its back: only of their header is it certain that they are refused.
//
// An input is a list of changes to prepacked weights, as few bytes as possible, of
// which every sequence means something.
#include "fuzz.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/randn.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace lltm_fuzz {
namespace {

using at::Tensor;

// ---- the layout, as packed_weights.h has it ---------------------------------

constexpr size_t kWord = sizeof(uint64_t);
constexpr size_t kHeaderWords = 8;
constexpr size_t kHeader = kHeaderWords * kWord;
constexpr size_t kSplitAt = 6;
constexpr size_t kChecksum = 7;

uint64_t word(const std::string& bytes, size_t at) {
  uint64_t value = 0;
  if (at < bytes.size()) {
    std::memcpy(&value, bytes.data() + at, std::min(kWord, bytes.size() - at));
  }
  return value;
}

void set_word(std::string& bytes, size_t at, uint64_t value) {
  if (at < bytes.size()) {
    std::memcpy(bytes.data() + at, &value, std::min(kWord, bytes.size() - at));
  }
}

// FNV-1a of words in four lanes: first what follows the header, then the header.
uint64_t checksum(const std::string& bytes) {
  constexpr uint64_t kBasis = 0xcbf29ce484222325;
  constexpr uint64_t kPrime = 0x100000001b3;
  std::array<uint64_t, 4> lanes = {kBasis, kBasis, kBasis, kBasis};
  const auto add = [&](uint64_t& lane, size_t at) { lane = (lane ^ word(bytes, at)) * kPrime; };
  for (size_t at = kHeader, k = 0; at < bytes.size(); at += kWord, ++k) add(lanes[k % 4], at);
  for (size_t k = 0; k < kChecksum; ++k) add(lanes[0], k * kWord);
  uint64_t sum = kBasis;
  for (const uint64_t lane : lanes) sum = (sum ^ lane) * kPrime;
  return sum;
}

bool is_sealed(const std::string& bytes) {
  return bytes.size() >= kHeader && word(bytes, kChecksum * kWord) == checksum(bytes);
}

// ---- the calls --------------------------------------------------------------

// For each engine, and for none: no steps means that weights are unpacked.
struct Sizes {
  at::ScalarType packed, dtype;
  int64_t steps, batch, input, hidden;
  bool int8 = false;
  const char* cell = "lltm";
};
const std::vector<Sizes> kSizes = {
    {at::kFloat, at::kFloat, 2, 1, 3, 5},
    {at::kFloat, at::kFloat, 2, 3, 5, 33},
    {at::kFloat, at::kFloat, 1, 20, 3, 32},
    {at::kFloat, at::kFloat, 0, 2, 3, 17},
    {at::kBFloat16, at::kBFloat16, 2, 2, 3, 16},
    {at::kBFloat16, at::kBFloat16, 1, 20, 40, 33},
    {at::kBFloat16, at::kBFloat16, 0, 2, 3, 5},
    {at::kHalf, at::kHalf, 2, 2, 3, 5},
    {at::kHalf, at::kHalf, 1, 20, 5, 33},
    {at::kFloat, at::kDouble, 2, 2, 3, 5},
    {at::kFloat, at::kFloat, 2, 3, 5, 33, /*int8=*/true},
    {at::kHalf, at::kHalf, 1, 20, 6, 17, /*int8=*/true},
    {at::kFloat, at::kFloat, 0, 2, 3, 17, /*int8=*/true},
    {at::kFloat, at::kFloat, 2, 2, 3, 33, /*int8=*/false, "lstm"},
    {at::kFloat, at::kFloat, 1, 20, 5, 17, /*int8=*/false, "gru"},
    {at::kFloat, at::kFloat, 0, 2, 3, 5, /*int8=*/false, "gru"},
};

using Outputs = std::tuple<Tensor, Tensor, Tensor>;

using Optional = std::optional<Tensor>;

// The operators, which take a cell.
auto find_prepack() {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("lltm::prepack", "")
      .typed<Tensor(
          std::string_view, const Tensor&, const Optional&, std::optional<at::ScalarType>)>();
}
auto find_sequence_prepacked() {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("lltm::sequence_prepacked", "")
      .typed<Outputs(
          std::string_view,
          const Tensor&,
          const Tensor&,
          const Optional&,
          const Tensor&,
          const Optional&,
          const Optional&,
          const Optional&,
          bool,
          const Optional&)>();
}

struct Problem {
  std::string cell;
  Tensor input, h_0;
  Optional c_0;
  Tensor bias;
  std::string packed;
  std::optional<Outputs> outputs;  // nothing where weights of this dtype are refused

  Outputs run(const Tensor& weights) const {
    static const auto op = find_sequence_prepacked();
    return op.call(
        cell,
        input,
        h_0,
        c_0,
        weights,
        bias,
        std::nullopt,
        std::nullopt,
        /*reverse=*/false,
        /*reset=*/std::nullopt);
  }
};

Tensor tensor_of(const std::string& bytes) {
  const Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  bytes.copy(static_cast<char*>(tensor.mutable_data_ptr()), bytes.size());
  return tensor;
}

Problem problem_of(const Sizes& sizes) {
  const at::TensorOptions options(sizes.dtype);
  const std::string cell = sizes.cell;
  const int64_t rows = (cell == "lstm" ? 4 : 3) * sizes.hidden;
  const Tensor state = at::randn({sizes.batch, sizes.hidden}, options);
  Problem problem = {
      cell,
      at::randn({sizes.steps, sizes.batch, sizes.input}, options),
      state,
      cell == "gru" ? Optional() : state.neg(),
      at::randn({rows}, options),
      "",
      std::nullopt};
  const Tensor weight_ih = at::randn({rows, sizes.input}, sizes.packed);
  const Tensor weight_hh = at::randn({rows, sizes.hidden}, sizes.packed);
  const bool joined = cell == "lltm";
  const Tensor packed = find_prepack().call(
      cell,
      joined ? at::cat({weight_hh, weight_ih}, 1) : weight_ih,
      joined ? Optional() : weight_hh,
      sizes.int8 ? std::optional(at::kQInt8) : std::nullopt);
  // As on machines whose weights stay as they are, which this is not about.
  if (packed.scalar_type() != at::kByte) {
    std::cerr << "skipped: on this CPU prepack leaves weights as they are\n";
    std::_Exit(kSkipped);
  }
  problem.packed.assign(static_cast<const char*>(packed.const_data_ptr()), packed.nbytes());
  require(is_sealed(problem.packed), "the checksum is another than that of packed_weights.cpp");
  if (sizes.dtype == sizes.packed) problem.outputs = problem.run(tensor_of(problem.packed));
  return problem;
}

const std::vector<Problem>& problems() {
  static const std::vector<Problem>& all = *[] {
    auto* made = new std::vector<Problem>;
    for (const Sizes& sizes : kSizes) made->push_back(problem_of(sizes));
    return made;
  }();
  return all;
}

// ---- the changes ------------------------------------------------------------

// Reads an input; zeros follow its end.
class Script {
 public:
  explicit Script(std::string_view bytes) : bytes_(bytes) {}
  bool ended() const { return position_ >= bytes_.size(); }

  template <typename T>
  T take() {
    T value = 0;
    const size_t n = ended() ? 0 : std::min(sizeof(T), bytes_.size() - position_);
    if (n > 0) std::memcpy(&value, bytes_.data() + position_, n);
    position_ += sizeof(T);
    return value;
  }
  size_t below(size_t limit) { return limit == 0 ? 0 : take<uint16_t>() % limit; }

 private:
  std::string_view bytes_;
  size_t position_ = 0;
};

// What a word of a header may be, near what it was or not.
uint64_t forged(uint64_t value, Script& script) {
  constexpr std::array<uint64_t, 19> kValues = {
      0,
      1,
      5,
      6,
      8,
      15,
      16,
      32,
      48,
      64,
      128,
      3000,
      uint64_t{1} << 32,
      uint64_t{1} << 62,
      uint64_t{1} << 63,
      UINT64_MAX,
      0x6d746c6c,  // lltm, lstm and gru, the names of cells
      0x6d74736c,
      0x757267};
  const auto choice = script.take<uint8_t>();
  switch (choice % 4) {
    case 0:
      return kValues[choice / 4 % kValues.size()];
    case 1:
      return value + choice / 4 - 32;
    case 2:
      return value * (choice / 4 + 1);
    default:
      return script.take<uint64_t>();
  }
}

void change(std::string& bytes, Script& script) {
  const auto choice = script.take<uint8_t>();
  // Of the form for few rows or, where there is one, of that for many.
  const uint64_t split = word(bytes, kSplitAt * kWord);
  const size_t header = choice % 2 == 0 || split >= bytes.size() ? 0 : split;
  switch (choice / 2 % 8) {
    case 0:
    case 1: {
      const size_t at = header + script.take<uint8_t>() % kHeaderWords * kWord;
      set_word(bytes, at, forged(word(bytes, at), script));
      break;
    }
    case 2: {
      const size_t at = script.below(bytes.size());
      const auto bits = static_cast<char>(script.take<uint8_t>());
      if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ bits);
      break;
    }
    case 3:
      bytes.resize(script.below(bytes.size() + 1));
      break;
    case 4: {
      const size_t less = script.take<uint8_t>();
      bytes.resize(bytes.size() - std::min(less, bytes.size()));
      break;
    }
    case 5:
      bytes.append(script.take<uint8_t>(), static_cast<char>(script.take<uint8_t>()));
      break;
    case 6: {  // what another layer has from here on
      const std::string& other = problems()[script.take<uint8_t>() % problems().size()].packed;
      const size_t at = script.below(bytes.size() + 1);
      bytes.resize(at);
      bytes += other.substr(std::min(at, other.size()));
      break;
    }
    default: {  // a part of it in the place of another
      const std::string part = bytes.substr(script.below(bytes.size()), script.take<uint8_t>());
      bytes.replace(script.below(bytes.size()), part.size(), part);
      break;
    }
  }
}

// Memory that ends where no page follows: whoever reads on, dies, compiled with a
// sanitizer or not.
char* guarded_end() {
  constexpr size_t kBytes = 1 << 20;
  static char* const memory = static_cast<char*>(
      mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  static const bool guarded =
      memory != MAP_FAILED && mprotect(memory + kBytes, kBytes, PROT_NONE) == 0;
  require(guarded, "no memory with a guard page");
  return memory + kBytes;
}

// The bytes as a tensor in one of several ways.
Tensor laid_out(const std::string& bytes, unsigned layout) {
  const auto size = static_cast<int64_t>(bytes.size());
  switch (layout % 4) {
    case 0: {  // before a guard page, most often at a multiple of 64
      char* const begin = guarded_end() - size;
      bytes.copy(begin, bytes.size());
      return at::from_blob(begin, {size}, at::kByte);
    }
    case 1:
      return tensor_of(bytes);
    case 2:  // not aligned
      return tensor_of("x" + bytes).slice(0, 1);
    default: {  // in a tensor that has held other bytes
      constexpr int64_t kSize = 1 << 17;
      static const Tensor& used = *new Tensor(at::empty({kSize}, at::kByte));
      return used.slice(0, 0, size).copy_(tensor_of(bytes));
    }
  }
}

// The same of a tensor that held the weights as prepack made them, was taken, and whose version
// says nothing of the change.
Tensor changed_after_a_call(const Problem& problem, const std::string& bytes, unsigned layout) {
  const Tensor weights = laid_out(problem.packed, layout);
  (void)problem.run(weights);
  bytes.copy(static_cast<char*>(weights.data_ptr()), bytes.size());
  return weights;
}

bool same(const Outputs& a, const Outputs& b) {
  return at::equal(std::get<0>(a), std::get<0>(b)) && at::equal(std::get<1>(a), std::get<1>(b)) &&
         at::equal(std::get<2>(a), std::get<2>(b));
}

}  // namespace

std::string first_input(Random& random) {
  std::string input;
  for (size_t count = random.one_in(10) ? 2 : 4 + random.below(24); count > 0; --count) {
    input.push_back(static_cast<char>(random.next()));
  }
  return input;
}

void mutate(std::string& input, Random& random) {
  input.resize(std::max<size_t>(input.size(), 2));
  input[random.below(input.size())] = static_cast<char>(random.next());
}

void repair(std::string&, Random&) {}

void run(std::string_view input) {
  Script script(input);
  const Problem& problem = problems()[script.take<uint8_t>() % problems().size()];
  const auto layout = script.take<uint8_t>();
  std::string bytes = problem.packed;
  for (int changes = 0; changes < 16 && !script.ended(); ++changes) change(bytes, script);
  if (layout / 4 % 2 == 0 && bytes.size() >= kHeader) {
    set_word(bytes, kChecksum * kWord, checksum(bytes));
  }

  const bool behind_its_back =
      layout / 8 % 2 == 1 && bytes.size() == problem.packed.size() && problem.outputs.has_value();
  const Tensor weights =
      behind_its_back ? changed_after_a_call(problem, bytes, layout) : laid_out(bytes, layout);
  const bool same_header = bytes.compare(0, kHeader, problem.packed, 0, kHeader) == 0;
  std::optional<Outputs> outputs;
  const Allocations allocations;
  try {
    outputs = problem.run(weights);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    require(
        typeid(error) == typeid(c10::ValueError) || typeid(error) == typeid(c10::TypeError),
        "expected a ValueError or TypeError, got: ",
        text);
    require_message(text, "lltm::sequence_prepacked: expected weights from prepack");
  }
  constexpr uint64_t kMost = 1 << 21;  // problems are small
  require(allocations.bytes() <= kMost, allocations.bytes(), " bytes were allocated");
  if (bytes == problem.packed) {
    require(outputs.has_value() == problem.outputs.has_value(), "weights were not taken, or were");
    require(!outputs.has_value() || same(*outputs, *problem.outputs), "the outputs are others");
  } else if (outputs.has_value()) {
    require(
        is_sealed(bytes) || (behind_its_back && same_header), "bytes that have changed were taken");
    require(problem.outputs.has_value(), "weights of another dtype were taken");
    const Tensor& output = std::get<0>(*outputs);
    const Tensor& expected = std::get<0>(*problem.outputs);
    require(
        output.sizes() == expected.sizes() && output.scalar_type() == expected.scalar_type(),
        "the output has another shape or dtype");
  }
  ++(outputs.has_value() ? taken : refused);
}

}  // namespace lltm_fuzz
