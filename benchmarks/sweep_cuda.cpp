// The ways in which the persistent engine can run a sequence, beside the stepwise engine: what
// tuning_table.py makes the tuning table of.
//
//     lltm_cuda_sweep [--seconds N]     every problem, until N seconds have passed; of those, with
//                                       --from K, all but the first K
//     lltm_cuda_sweep --list            how many there are; needs no GPU
//     lltm_cuda_sweep --run lstm forward persistent bfloat16 128 16 768
//                                       one call, for a profiler: cell, direction, engine, dtype,
//                                       T, B, H
//
// Prints JSON Lines, one candidate each, as soon as its problem is done: {"gpu", "cell",
// "direction", "dtype", "T", "B", "I", "H", "engine", "tiles", "poll_nanoseconds",
// "workspace_bytes", "same", "seconds": [one figure per round]}. "same" is whether the results are
// those of the first candidate of the same engine, bit by bit. Problems that say most come first. I
// is H. Backward is measured without the gradients of input and parameters, which are the same
// GEMMs in any case.
#include "cell/cells.h"
#include "cuda/engine/engine.h"
#include "cuda/kernel/persistent.h"
#include "cuda_timing.h"

#include <ATen/ATen.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <functional>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using namespace lltm;
using namespace lltm::cuda;

constexpr int kRounds = 7;
constexpr int64_t kSteps = 256;
constexpr int kPolls[] = {0, 20, 40};  // nanoseconds

enum class Engine { stepwise, persistent };

struct Problem {
  const CellInfo* cell;
  Direction direction;
  at::ScalarType dtype;
  int64_t steps, batch, hidden;
};

struct Candidate {
  Engine engine;
  std::optional<Tuning> tuning = std::nullopt;
  int64_t workspace_bytes = kWorkspaceBytes;
};

const char* name(Direction direction) {
  return direction == Direction::forward ? "forward" : "backward";
}
const char* name(Engine engine) {
  return engine == Engine::stepwise ? "stepwise" : "persistent";
}
std::string name(at::ScalarType dtype) {
  return dtype == at::kHalf ? "float16" : dtype == at::kBFloat16 ? "bfloat16" : "float32";
}

// The arguments of one problem, and what forward has saved for backward.
class Arguments {
 public:
  explicit Arguments(const Problem& p)
      : cell_(*p.cell),
        direction_(p.direction),
        input_(random({p.steps, p.batch, p.hidden}, p.dtype)),
        h_(random({p.batch, p.hidden}, p.dtype)) {
    const int64_t rows_x = cell_.x.count() * p.hidden, rows_h = cell_.h.count() * p.hidden;
    const double scale = 1 / std::sqrt(static_cast<double>(2 * p.hidden));
    if (cell_.has_c()) c_ = random({p.batch, p.hidden}, p.dtype);
    bias_ih_ = random({rows_x}, p.dtype);
    if (cell_.joined) {
      weight_ih_ = scale * random({rows_x, 2 * p.hidden}, p.dtype);
    } else {
      weight_ih_ = scale * random({rows_x, p.hidden}, p.dtype);
      weight_hh_ = scale * random({rows_h, p.hidden}, p.dtype);
      bias_hh_ = random({rows_h}, p.dtype);
    }
    if (direction_ == Direction::forward) return;
    std::tie(output_, std::ignore, std::ignore, activations_) = stepwise_forward(forward());
    grad_output_ = random(output_.sizes(), p.dtype);
  }

  // The results of a call, or nothing where the engine cannot run in this way.
  std::vector<Tensor> run(const Candidate& candidate) const {
    if (direction_ == Direction::forward) {
      const SequenceArgs args = forward();
      SequenceResult result;
      if (candidate.engine == Engine::stepwise) {
        result = stepwise_forward(args, candidate.workspace_bytes);
      } else {
        auto results = persistent_forward({&args, 1}, candidate.workspace_bytes, candidate.tuning);
        if (!results) return {};
        result = std::move(results->front());
      }
      return {std::get<0>(result), std::get<1>(result), std::get<2>(result)};
    }
    const SequenceBackwardArgs args = backward();
    Gradients gradients;
    if (candidate.engine == Engine::stepwise) {
      gradients = stepwise_backward(args);
    } else {
      auto results = persistent_backward({&args, 1}, candidate.tuning);
      if (!results) return {};
      gradients = std::move(results->front());
    }
    return {std::get<1>(gradients), std::get<2>(gradients)};
  }

 private:
  static Tensor random(at::IntArrayRef sizes, at::ScalarType dtype) {
    return at::randn(sizes, at::TensorOptions(at::kCUDA)).to(dtype);
  }
  SequenceInputs inputs() const {
    return {
        cell_,
        input_,
        h_,
        c_,
        weight_ih_,
        weight_hh_,
        bias_ih_,
        bias_hh_,
        none_,
        /*reverse=*/false,
        none_,
        /*checkpoint_steps=*/0,
        none_};
  }
  // Saves in both directions, as in training.
  SequenceArgs forward() const { return {inputs(), /*save=*/true}; }
  SequenceBackwardArgs backward() const {
    return {
        inputs(),
        output_,
        activations_,
        grad_output_,
        none_,
        none_,
        /*output_mask=*/{false, true, true}};
  }

  const CellInfo& cell_;
  Direction direction_;
  Tensor input_, h_, c_, weight_ih_, weight_hh_, bias_ih_, bias_hh_, none_;
  Tensor output_, activations_, grad_output_;
};

std::string json_of_gpu() {
  int device = 0;
  cudaDeviceProp properties;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  const GpuKind gpu = current_gpu();
  return std::string("{\"name\": \"") + properties.name +
         "\", \"capability\": " + std::to_string(gpu.capability) +
         ", \"multiprocessors\": " + std::to_string(gpu.multiprocessors) + "}";
}

// All candidates of a problem, in interleaved rounds.
void measure(const Problem& p, const std::vector<Candidate>& candidates) {
  static const std::string gpu = json_of_gpu();
  const Arguments arguments(p);
  struct Row {
    const Candidate& candidate;
    bool same;
    std::vector<double> seconds = {};
  };
  std::vector<Row> rows;
  std::vector<Tensor> first[2];  // results, by engine
  for (const Candidate& candidate : candidates) {
    const std::vector<Tensor> results = arguments.run(candidate);
    if (results.empty()) continue;
    std::vector<Tensor>& expected = first[static_cast<int>(candidate.engine)];
    if (expected.empty()) expected = results;
    bool same = true;
    for (size_t k = 0; k < results.size(); ++k) same = same && at::equal(results[k], expected[k]);
    rows.push_back({candidate, same});
  }
  for (int round = 0; round < kRounds; ++round) {
    for (Row& row : rows) {
      row.seconds.push_back(
          lltm_benchmark::time([&] { arguments.run(row.candidate); }, /*runs=*/1));
    }
  }
  for (const auto& [candidate, same, seconds] : rows) {
    std::cout << "{\"gpu\": " << gpu << ", \"cell\": \"" << p.cell->name << "\", \"direction\": \""
              << name(p.direction) << "\", \"dtype\": \"" << name(p.dtype)
              << "\", \"T\": " << p.steps << ", \"B\": " << p.batch << ", \"I\": " << p.hidden
              << ", \"H\": " << p.hidden << ", \"engine\": \"" << name(candidate.engine) << '"';
    if (candidate.tuning) {
      std::cout << ", \"tiles\": " << candidate.tuning->tiles
                << ", \"poll_nanoseconds\": " << candidate.tuning->poll_nanoseconds;
    }
    std::cout << ", \"workspace_bytes\": " << candidate.workspace_bytes
              << ", \"same\": " << (same ? "true" : "false") << ", \"seconds\": [";
    for (size_t k = 0; k < seconds.size(); ++k) std::cout << (k == 0 ? "" : ", ") << seconds[k];
    std::cout << "]}\n";
  }
  std::cout << std::flush;
}

struct Measurement {
  Problem problem;
  std::vector<Candidate> candidates;
};

// What is measured, in this order.
std::vector<Measurement> measurements() {
  std::vector<Candidate> ways = {{Engine::stepwise}};
  for (const int poll : kPolls) {
    for (const int tiles : kTileCounts) ways.push_back({Engine::persistent, Tuning{tiles, poll}});
  }
  std::vector<Candidate> workspaces;
  for (const int64_t mebibytes : {4, 8, 16, 32, 64, 128}) {
    for (const Engine engine : {Engine::stepwise, Engine::persistent}) {
      workspaces.push_back({engine, std::nullopt, mebibytes << 20});
    }
  }
  std::vector<Measurement> all;
  const auto of_size = [&](const CellInfo* cell, int64_t batch, int64_t hidden) {
    for (const Direction direction : {Direction::forward, Direction::backward}) {
      all.push_back({{cell, direction, at::kBFloat16, kSteps, batch, hidden}, ways});
    }
  };
  // What the goals are about first. Then one number of hidden units after another, with ever more
  // rows: an end before time leaves whole numbers of hidden units.
  for (const CellInfo* const cell : kCells) of_size(cell, 16, 768);
  for (const auto& [batch, hidden] :
       {std::pair<int64_t, int64_t>{16, 768}, {64, 512}, {128, 1024}}) {
    const Problem problem = {&Lltm::kCell, Direction::forward, at::kBFloat16, 1024, batch, hidden};
    all.push_back({problem, workspaces});
  }
  for (const int64_t hidden : {768, 512, 1024, 256, 128, 1536}) {
    for (const CellInfo* const cell : kCells) {
      for (const int64_t batch : {1, 8, 16, 32, 64, 128, 256, 512, 1024}) {
        if (batch != 16 || hidden != 768) of_size(cell, batch, hidden);
      }
    }
  }
  return all;
}

// A problem that fails is left out, with the reason. After an error of CUDA that stays, by which
// all later ones would fail, a new process goes on.
int sweep(double seconds, size_t from) {
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<Measurement> all = measurements();
  bool complete = from == 0;
  for (size_t k = from; k < all.size(); ++k) {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    if (taken.count() > seconds) {
      std::cerr << "the time was up: " << all.size() - k << " of " << all.size()
                << " problems are left out\n";
      return 1;
    }
    const Problem& p = all[k].problem;
    try {
      measure(p, all[k].candidates);
    } catch (const std::exception& error) {
      complete = false;
      std::cerr << p.cell->name << ", " << name(p.direction) << " of B=" << p.batch
                << " H=" << p.hidden << " failed: " << error.what() << '\n';
      if (cudaDeviceSynchronize() != cudaSuccess) {
        const std::string left = std::to_string(seconds - taken.count());
        const std::string next = std::to_string(k + 1);
        execl(
            "/proc/self/exe",
            "lltm_cuda_sweep",
            "--seconds",
            left.c_str(),
            "--from",
            next.c_str(),
            nullptr);
      }
    }
  }
  return complete ? 0 : 1;
}

int list() {
  size_t candidates = 0;
  for (const Measurement& m : measurements()) candidates += m.candidates.size();
  std::cout << measurements().size() << " problems, " << candidates << " candidates\n";
  return 0;
}

int usage() {
  std::cerr << "expected nothing, --list, --seconds N, or --run lltm|lstm|gru forward|backward "
               "stepwise|persistent bfloat16|float16|float32 T B H\n";
  return 2;
}

// Twice: the first call of a process sets up cuBLAS.
int run_one(const std::vector<std::string>& words) {
  const auto at = [&](size_t k, const char* a, const char* b) {
    return words[k] == a || words[k] == b;
  };
  if (words.size() != 7 || !at(1, "forward", "backward") || !at(2, "stepwise", "persistent") ||
      (!at(3, "bfloat16", "float16") && words[3] != "float32")) {
    return usage();
  }
  const auto* const cell =
      std::ranges::find_if(kCells, [&](const CellInfo* known) { return words[0] == known->name; });
  if (cell == std::end(kCells)) return usage();
  const Problem problem = {
      *cell,
      words[1] == "forward" ? Direction::forward : Direction::backward,
      words[3] == "bfloat16"  ? at::kBFloat16
      : words[3] == "float16" ? at::kHalf
                              : at::kFloat,
      std::stoll(words[4]),
      std::stoll(words[5]),
      std::stoll(words[6])};
  const Candidate candidate = {words[2] == "stepwise" ? Engine::stepwise : Engine::persistent};
  const Arguments arguments(problem);
  for (int call = 0; call < 2; ++call) {
    if (arguments.run(candidate).empty()) {
      std::cerr << "the " << words[2] << " engine does not take this problem\n";
      return 1;
    }
  }
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  return 0;
}

int run(const std::vector<std::string>& words) {
  if (words == std::vector<std::string>{"--list"}) return list();
  const bool is_one = !words.empty() && words[0] == "--run";
  double seconds = 1e9;
  size_t from = 0;
  for (size_t k = 0; !is_one && k < words.size(); k += 2) {
    if (k + 1 == words.size()) return usage();
    if (words[k] == "--seconds") {
      seconds = std::stod(words[k + 1]);
    } else if (words[k] == "--from") {
      from = std::stoul(words[k + 1]);
    } else {
      return usage();
    }
  }
  if (!lltm_benchmark::has_gpu()) return 1;
  return is_one ? run_one({words.begin() + 1, words.end()}) : sweep(seconds, from);
}

}  // namespace

int main(int argc, char** argv) {
  std::cout.precision(9);
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::invalid_argument&) {  // no number
    return usage();
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
