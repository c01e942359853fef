// The CUDA engine, built with the cell page of the LSTM, on the CPU against torch.lstm: it
// takes from cell.h all that it knows of the cell.
#include "cuda_engine_autograd.h"
#include "lstm/torch_lstm.h"

namespace lltm_test {
namespace {

class CudaLstmCell : public testing::TestWithParam<at::ScalarType> {};

INSTANTIATE_TEST_SUITE_P(Dtypes, CudaLstmCell, testing::ValuesIn(kDtypes), [](const auto& info) {
  return name(info.param);
});

TEST_P(CudaLstmCell, ValuesAndGradientsMatchTorch) {
  for (const bool bias : {true, false}) {
    for (const Sizes& sizes :
         {Sizes{1, 1, 1, 1}, Sizes{1, 3, 5, 7}, Sizes{1, 2, 3, 16}, Sizes{1, 17, 9, 33}}) {
      SCOPED_TRACE(testing::PrintToString(sizes) + (bias ? "" : ", without bias"));
      check_lstm(engine_cell, torch_lstm_cell, [&](uint64_t seed) {
        return for_lstm(cell_problem(sizes, GetParam(), seed, bias), seed);
      });
    }
  }
}

class CudaLstm : public LstmSequenceTest {};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    CudaLstm,
    testing::Combine(testing::ValuesIn(kDtypes), testing::Bool()),
    lstm_sequence_name);

TEST_P(CudaLstm, ValuesAndGradientsMatchTorch) {
  for (const bool bias : {true, false}) {
    for (const Sizes& sizes :
         {Sizes{1, 1, 1, 1}, Sizes{5, 3, 5, 7}, Sizes{7, 2, 3, 16}, Sizes{3, 17, 9, 33}}) {
      SCOPED_TRACE(testing::PrintToString(sizes) + (bias ? "" : ", without bias"));
      check_lstm(engine_sequence, torch_lstm, [&](uint64_t seed) {
        return for_lstm(reversed(sequence_problem(sizes, dtype(), seed, bias)), seed);
      });
    }
  }
}

TEST_P(CudaLstm, PackedValuesAndGradientsMatchTorch) {
  for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{
           {5}, {3, 3, 3}, {7, 6, 5, 4, 3, 2, 1}, {9, 1, 1, 1}, {4, 4, 4, 4, 2, 2, 1}}) {
    for (const int64_t hidden : {7, 16}) {
      SCOPED_TRACE(testing::PrintToString(lengths) + ", H=" + std::to_string(hidden));
      check_lstm(engine_sequence, torch_lstm, [&](uint64_t seed) {
        return for_lstm(reversed(packed_problem(lengths, 3, hidden, dtype(), seed)), seed);
      });
    }
  }
}

}  // namespace
}  // namespace lltm_test
