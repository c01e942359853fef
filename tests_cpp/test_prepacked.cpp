// Arbitrary bytes as prepacked weights: a call throws or computes with them, and sanitizers detect
// other reads.
#include "testing.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace lltm_test {
namespace {

using at::Tensor;
using Packing = std::tuple<const char*, at::ScalarType, std::optional<at::ScalarType>>;

constexpr size_t kHeaderWords = 8;
using Header = std::array<int64_t, kHeaderWords>;

class PrepackedBytes : public testing::TestWithParam<Packing> {
 protected:
  PrepackedBytes()
      : a_(sequence_problem({3, 5, 6, 35}, std::get<1>(GetParam()), 1, true, cell())),
        packed_(pack(a_, std::get<2>(GetParam()))) {}

  void SetUp() override {
    if (packed_.scalar_type() != at::kByte) GTEST_SKIP() << "no packed format here";
  }

  static const char* cell() { return std::get<0>(GetParam()); }

  // Separate memory that ends after the bytes.
  static Tensor copy(const Tensor& bytes) { return bytes.clone(); }

  Header header() const {
    Header header;
    std::memcpy(header.data(), packed_.const_data_ptr(), sizeof(header));
    return header;
  }
  static Tensor with_header(const Tensor& bytes, const Header& header) {
    Tensor forged = copy(bytes);
    std::memcpy(forged.mutable_data_ptr(), header.data(), sizeof(header));
    return forged;
  }

  bool takes(const Tensor& weights) const {
    try {
      EXPECT_EQ(sequence_of_packed(a_, weights)[0].sizes(), at::IntArrayRef({3, 5, 35}));
      return true;
    } catch (const c10::ValueError&) {
    } catch (const c10::TypeError&) {
    }
    return false;
  }

  const c10::InferenceMode inference_;
  Arguments a_;
  Tensor packed_;
};

TEST_P(PrepackedBytes, MatchTheSizeInTheHeader) {
  EXPECT_TRUE(takes(packed_));
  const int64_t bytes = packed_.numel();
  for (const int64_t fewer : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{64}, bytes - 1}) {
    EXPECT_FALSE(takes(copy(packed_.slice(0, 0, fewer)))) << fewer << " bytes";
  }
  EXPECT_FALSE(takes(at::cat({packed_, packed_.slice(0, 0, 1)})));
  EXPECT_FALSE(takes(packed_.slice(0, 1)));
  EXPECT_FALSE(takes(packed_.slice(0, 0, bytes, 2)));
  EXPECT_FALSE(takes(packed_.unsqueeze(0)));
}

TEST_P(PrepackedBytes, OfTheHeaderAreChecked) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (size_t word = 0; word < kHeaderWords; ++word) {
    SCOPED_TRACE(testing::Message() << "word " << word);
    Header forged = header();
    for (int bit = 0; bit < 64; ++bit) {
      forged[word] = header()[word] ^ int64_t { 1 } << bit;
      // Only the number of blocks can change: another column division.
      EXPECT_TRUE(!takes(with_header(packed_, forged)) || word == 5) << "bit " << bit;
    }
    for (const int64_t value : {int64_t{0}, int64_t{-1}, int64_t{1} << 40, -kMost - 1, kMost}) {
      if (value == header()[word]) continue;
      forged[word] = value;
      EXPECT_FALSE(takes(with_header(packed_, forged))) << value;
      EXPECT_FALSE(takes(with_header(packed_.slice(0, 0, 64), forged))) << value << " alone";
    }
  }
}

TEST_P(PrepackedBytes, AfterTheHeaderAreValues) {
  at::manual_seed(1);
  for (int run = 0; run < 20; ++run) {
    Tensor forged = at::randint(256, packed_.sizes(), packed_.options());
    EXPECT_TRUE(takes(with_header(forged, header())));
  }
}

std::vector<Packing> forms() {
  std::vector<Packing> all;
  for (const char* const cell : kCells) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      all.emplace_back(cell, dtype, std::nullopt);
      if (info_of(cell).bounded) all.emplace_back(cell, dtype, at::kQInt8);
    }
  }
  return all;
}

std::string form_name(const testing::TestParamInfo<Packing>& info) {
  const auto& [cell, dtype, quantized] = info.param;
  return std::string(cell) + "_" + lltm_test::name(dtype) + (quantized.has_value() ? "_int8" : "");
}

INSTANTIATE_TEST_SUITE_P(Forms, PrepackedBytes, testing::ValuesIn(forms()), form_name);

}  // namespace
}  // namespace lltm_test
