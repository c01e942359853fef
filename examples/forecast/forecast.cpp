// Trains a model on a time series in a CSV file, and forecasts with it. No Python takes part.
//
//     forecast train DATA.csv --checkpoint FILE --losses FILE
//     forecast predict DATA.csv --checkpoint FILE --steps N
//
// Forecasts go to standard output, everything else to standard error.
#include "csv.h"
#include "error.h"
#include "options.h"
#include "training.h"

#include <c10/util/Exception.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/map.h>
#include <torch/data/samplers/random.h>
#include <torch/data/samplers/sequential.h>
#include <torch/data/transforms/stack.h>
#include <torch/utils.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace forecast {
namespace {

using std::to_string;

constexpr int64_t kBatch = 32;
constexpr int kDigits = std::numeric_limits<double>::digits10;  // of a number in a CSV file

volatile std::sig_atomic_t stop_signal = 0;

extern "C" void request_stop(int signal) {
  stop_signal = signal;
  std::signal(SIGINT, SIG_DFL);  // the next one ends the program at once
  std::signal(SIGTERM, SIG_DFL);
  constexpr std::string_view kText = "forecast: saving after this update; again to end at once\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kText.data(), kText.size());
}

// (N, F), float64
torch::Tensor values(const Series& series) {
  return torch::tensor(series.values, torch::kFloat64)
      .view({-1, static_cast<int64_t>(series.columns.size())});
}

// The rows after these are held out, so the model is validated on what comes later.
int64_t training_rows(int64_t rows) {
  return rows * 4 / 5;
}

template <typename Sampler>
auto make_loader(const torch::Tensor& series, int64_t context) {
  return torch::data::make_data_loader<Sampler>(
      Windows(series, context).map(torch::data::transforms::Stack<>()),
      torch::data::DataLoaderOptions().batch_size(kBatch));
}

double mean_squared_error(const torch::Tensor& forecasts, const torch::Tensor& actual) {
  return torch::mse_loss(forecasts, actual).item<double>();
}

// ---- train: a new run, or one that goes on ----------------------------------

void refuse_existing(const std::string& path) {
  if (std::filesystem::is_regular_file(path)) {
    fail(path, "no such file without --resume, which goes on with it", "one");
  }
}

std::unique_ptr<Training> begin(const Options& options, const Series& series) {
  refuse_existing(options.checkpoint);
  refuse_existing(options.losses);
  const auto all = values(series);
  const int64_t rows = all.size(0), first_rows = training_rows(rows);
  if (first_rows <= options.context) {
    const std::string expected = "more than " + to_string(options.context) + " rows (--context)";
    fail(options.data, expected + " in the first 80 %", to_string(first_rows));
  }
  const auto part = all.slice(0, 0, first_rows);
  // Rounding can make the deviation of equal values more than zero.
  const auto deviation = torch::where(part.amax(0) == part.amin(0), 0.0, part.std({0}, false));
  for (size_t f = 0; f < series.columns.size(); ++f) {
    const auto value = deviation[static_cast<int64_t>(f)].item<double>();
    if (value == 0 || !std::isfinite(value)) {
      const std::string place = options.data + ", column " + series.columns[f];
      fail(place, "a finite deviation above 0 in the first 80 % of the rows", to_string(value));
    }
  }

  torch::manual_seed(static_cast<uint64_t>(options.seed));
  auto training = std::make_unique<Training>(series.columns, options.hidden);
  training->rows.fill_(rows);
  training->context.fill_(options.context);
  training->seed.fill_(options.seed);
  training->model->mean.copy_(part.mean(0));
  training->model->deviation.copy_(deviation);
  return training;
}

// ---- train: the loop --------------------------------------------------------

// The loss of forecasting each held-out row by the one `distance` rows earlier.
double naive_loss(const torch::Tensor& series, int64_t distance) {
  const int64_t first = training_rows(series.size(0)), last = series.size(0) - distance;
  return mean_squared_error(series.slice(0, first - distance, last), series.slice(0, first));
}

double validation_loss(Training& training, const torch::Tensor& series) {
  const torch::NoGradGuard no_grad;
  const int64_t context = training.context.item<int64_t>();
  const auto held_out = series.slice(0, training_rows(series.size(0)) - context);
  const auto loader = make_loader<torch::data::samplers::SequentialSampler>(held_out, context);
  double sum = 0;
  for (auto& batch : *loader) {
    const double mean = mean_squared_error(training.model->forward(batch.data), batch.target);
    sum += mean * static_cast<double>(batch.data.size(0));
  }
  return sum / static_cast<double>(held_out.size(0) - context);
}

// Returns the loss of the better one.
double report_naive_forecasts(const Options& options, const torch::Tensor& series) {
  const int64_t most = training_rows(series.size(0));
  if (options.period > most) {
    fail(options.data, "--period of at most " + to_string(most), to_string(options.period));
  }
  double loss = naive_loss(series, 1);
  std::cerr << "validation loss of naive forecasts: " << loss << " by the last value";
  if (options.period != 0) {
    const double seasonal = naive_loss(series, options.period);
    std::cerr << ", " << seasonal << " by the value " << options.period << " rows earlier";
    loss = std::min(loss, seasonal);
  }
  std::cerr << std::endl;
  return loss;
}

template <typename... Cells>
void append(const std::string& path, const Cells&... cells) {
  errno = 0;
  std::ofstream file(path, std::ios::app);
  file << std::setprecision(kDigits);
  (file << ... << cells) << std::flush;
  TORCH_CHECK(file.good(), path, ": cannot write: ", std::strerror(errno));
}

int train(const Options& options) {
  std::signal(SIGINT, request_stop);
  std::signal(SIGTERM, request_stop);
  std::unique_ptr<Training> training;
  if (options.resume) training = Training::load(options.checkpoint);
  const Series series = read_csv(options.data, training ? training->columns : options.columns);
  if (!training) training = begin(options, series);
  const auto all = training->model->standardise(values(series));
  const int64_t rows = all.size(0), first_rows = training_rows(rows);
  // With other rows, some of those held out would become training data.
  const int64_t saved_rows = training->rows.item<int64_t>();
  if (rows != saved_rows) {
    fail(options.data, to_string(saved_rows) + " rows, as its training began", to_string(rows));
  }
  const int64_t context = training->context.item<int64_t>();
  std::cerr << options.data << ": " << join(series.columns) << "; " << first_rows
            << " rows for training, " << rows - first_rows << " held out for validation\n";
  const double naive = report_naive_forecasts(options, all);

  const auto save = [&] { lltm::save_state_dict(training, options.checkpoint); };
  save();  // a path that cannot be written fails now, not after an epoch
  if (!std::filesystem::is_regular_file(options.losses)) {
    append(options.losses, "epoch,training,validation\n");
  }

  const auto loader =
      make_loader<torch::data::samplers::RandomSampler>(all.slice(0, 0, first_rows), context);
  const int64_t examples = first_rows - context;
  const int64_t updates_of_epoch = (examples + kBatch - 1) / kBatch;
  while (stop_signal == 0) {
    const int64_t updates = training->updates.item<int64_t>();
    const int64_t epoch = updates / updates_of_epoch + 1;
    if (epoch > options.epochs) return 0;
    // The sampler's order comes from this generator: an interrupted epoch goes on in
    // the same one, after the batches that it had.
    const auto seed = static_cast<uint64_t>(training->seed.item<int64_t>());
    torch::manual_seed(seed + static_cast<uint64_t>(epoch));
    int64_t to_skip = updates % updates_of_epoch;
    for (auto& batch : *loader) {
      if (to_skip-- > 0) continue;
      training->update(batch);
      if (stop_signal != 0) break;
    }
    if (training->updates.item<int64_t>() < epoch * updates_of_epoch) break;

    const double loss = training->loss.item<double>() / static_cast<double>(examples);
    const double held_out_loss = validation_loss(*training, all);
    training->loss.zero_();
    save();
    append(options.losses, epoch, ',', loss, ',', held_out_loss, '\n');
    std::cerr << "epoch " << epoch << ": training " << loss << ", validation " << held_out_loss
              << ", " << held_out_loss / naive << " of the naive forecast's" << std::endl;
  }
  save();
  std::cerr << "forecast: saved " << options.checkpoint << " after "
            << training->updates.item<int64_t>() << " updates; --resume goes on with it\n";
  return 128 + stop_signal;
}

// ---- predict ----------------------------------------------------------------

int predict(const Options& options) {
  const torch::NoGradGuard no_grad;
  const auto training = Training::load(options.checkpoint);
  const auto all = values(read_csv(options.data, training->columns));
  const int64_t context = training->context.item<int64_t>();
  if (all.size(0) < context) {
    fail(options.data, to_string(context) + " rows to forecast from", to_string(all.size(0)));
  }
  std::cout << "step," << join(training->columns) << '\n' << std::setprecision(kDigits);
  auto window = training->model->standardise(all.slice(0, -context)).unsqueeze(0);  // (1, C, F)
  for (int64_t step = 1; step <= options.steps; ++step) {
    const auto next = training->model->forward(window);  // (1, F)
    window = torch::cat({window.slice(1, 1), next.unsqueeze(1)}, 1);
    const auto restored = training->model->restore(next[0]);
    std::cout << step;
    for (int64_t f = 0; f < restored.size(0); ++f) std::cout << ',' << restored[f].item<double>();
    std::cout << '\n';
  }
  std::cout.flush();
  TORCH_CHECK(std::cout.good(), "standard output: cannot write: ", std::strerror(errno));
  return 0;
}

}  // namespace
}  // namespace forecast

int main(int argc, char** argv) {
  try {
    const std::vector<std::string> words(argv + 1, argv + argc);
    if (std::find(words.begin(), words.end(), "--help") != words.end()) {
      std::cout << forecast::kUsage;
      return 0;
    }
    const auto options = forecast::parse(words);
    return options.command == "train" ? forecast::train(options) : forecast::predict(options);
  } catch (const forecast::UsageError& error) {
    std::cerr << "forecast: " << error.what() << '\n' << forecast::kUsage;
    return 2;
  } catch (const c10::Error& error) {
    std::cerr << "forecast: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "forecast: " << error.what() << '\n';
  }
  return 1;
}
