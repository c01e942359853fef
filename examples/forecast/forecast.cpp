// Learns a time series from a CSV file and forecasts it, without Python.
//
//     forecast train DATA.csv MODEL.safetensors
//     forecast predict DATA.csv MODEL.safetensors STEPS
#include <lltm/lltm.h>

#include <c10/util/Exception.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace {

constexpr int64_t kContext = 48;  // input values per forecast
constexpr int64_t kHidden = 32, kBatch = 32, kEpochs = 20;

std::optional<double> number(const std::string& text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stopped != end || !std::isfinite(value)) return std::nullopt;
  return value;
}

[[noreturn]] void fail(const std::string& place, const std::string& what) {
  throw std::runtime_error(place + ": " + what);
}

// A header line, then a line per time step, whose last field is the value. Returns (N), float64.
torch::Tensor read_csv(const std::string& path, size_t min_rows) {
  std::ifstream file(path);
  std::vector<double> values;
  std::string line;
  for (int64_t k = 1; std::getline(file, line); ++k) {
    if (line.ends_with('\r')) line.pop_back();
    const std::string place = path + ", line " + std::to_string(k);
    const std::string cell = line.substr(line.rfind(',') + 1);
    const std::optional<double> value = number(cell);
    if (k == 1 && value) fail(place, "expected a header, got " + line);
    if (k > 1 && !value)
      fail(place, "expected a finite number in the last column, got '" + cell + "'");
    if (value) values.push_back(*value);
  }
  if (!file.eof()) fail(path, std::string("cannot read: ") + std::strerror(errno));
  const std::string rows = std::to_string(values.size());
  if (values.size() < min_rows) {
    fail(path, "expected " + std::to_string(min_rows) + " rows or more, got " + rows);
  }
  return torch::tensor(values, torch::kFloat64);
}

class ForecasterImpl : public torch::nn::Module {
 public:
  // window (B, C), standardized. Returns the next values (B). Computes relative to the last value:
  // a series with a trend leaves the range of its training part, but its changes do not.
  torch::Tensor forward(const torch::Tensor& window) {
    const auto last = window.slice(1, -1);
    const auto hidden = std::get<0>(rnn->forward((window - last).unsqueeze(2))).select(1, -1);
    return (last + output->forward(hidden)).squeeze(1);
  }

  torch::Tensor standardise(const torch::Tensor& values) const {
    return ((values - mean) / deviation).to(torch::kFloat32);
  }

  // Of the training part. Buffers, so that a checkpoint contains them.
  torch::Tensor mean = register_buffer("mean", torch::zeros({}, torch::kFloat64));
  torch::Tensor deviation = register_buffer("deviation", torch::ones({}, torch::kFloat64));
  lltm::LLTM rnn =
      register_module("rnn", lltm::LLTM(lltm::LLTMOptions(1, kHidden).batch_first(true)));
  torch::nn::Linear output = register_module("output", torch::nn::Linear(kHidden, 1));
};
TORCH_MODULE(Forecaster);

void train(const std::string& data, const std::string& checkpoint) {
  torch::manual_seed(0);
  const auto series = read_csv(data, 2 * kContext);
  // The last fifth is held out, to validate on later values.
  const int64_t rows = series.size(0) * 4 / 5;
  Forecaster model;
  const auto part = series.slice(0, 0, rows);
  if (part.amin().equal(part.amax())) fail(data, "expected values that differ, got equal ones");
  model->mean.copy_(part.mean());
  model->deviation.copy_(part.std());

  // Example k: values k to k+C-1, and value k+C.
  const auto examples = model->standardise(series).unfold(0, kContext + 1, 1);
  const auto training = examples.slice(0, 0, rows - kContext);
  const auto held_out = examples.slice(0, rows - kContext);
  const auto loss = [&](const torch::Tensor& batch) {
    return torch::mse_loss(model->forward(batch.slice(1, 0, kContext)), batch.select(1, kContext));
  };
  const auto naive =
      torch::mse_loss(held_out.select(1, kContext - 1), held_out.select(1, kContext));
  std::cout << "loss of repeating the last value: " << naive.item<double>() << '\n';

  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(3e-3));
  for (int64_t epoch = 1; epoch <= kEpochs; ++epoch) {
    for (const auto& batch : torch::randperm(training.size(0)).split(kBatch)) {
      optimizer.zero_grad();
      loss(training.index_select(0, batch)).backward();
      torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
    }
    const torch::NoGradGuard no_grad;
    std::cout << "epoch " << epoch << ": loss " << loss(held_out).item<double>() << std::endl;
  }
  lltm::save_state_dict(*model, checkpoint);
}

// Each forecast is an input of the next one.
void predict(const std::string& data, const std::string& checkpoint, int64_t steps) {
  const torch::NoGradGuard no_grad;
  Forecaster model;
  lltm::load_state_dict(*model, checkpoint);
  auto window = model->standardise(read_csv(data, kContext).slice(0, -kContext)).unsqueeze(0);
  for (int64_t step = 1; step <= steps; ++step) {
    const auto next = model->forward(window);  // (1)
    window = torch::cat({window.slice(1, 1), next.unsqueeze(1)}, 1);
    const auto value = next * model->deviation + model->mean;
    std::cout << step << ',' << value.item<double>() << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const auto steps = words.size() == 4 ? number(words[3]) : std::nullopt;
  try {
    if (words.size() == 3 && words[0] == "train") {
      train(words[1], words[2]);
    } else if (steps && words[0] == "predict") {
      predict(words[1], words[2], static_cast<int64_t>(*steps));
    } else {
      std::cerr << "usage: forecast train DATA.csv MODEL.safetensors\n"
                   "       forecast predict DATA.csv MODEL.safetensors STEPS\n";
      return 2;
    }
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "forecast: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "forecast: " << error.what() << '\n';
  }
  return 1;
}
