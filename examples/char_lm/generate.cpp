// Continues a text with a model of demo.py, without Python.
//
//     generate CHECKPOINT PROMPT LENGTH                    most likely characters
//     generate CHECKPOINT PROMPT LENGTH SEED TEMPERATURE   sampled characters
//
// The new characters go to standard output, everything else to standard error.
#include <lltm/lltm.h>

// <torch/torch.h> would take the compiler ten seconds longer.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <clocale>
#include <cuchar>
#include <exception>
#include <fstream>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace {

// The same names and shapes as in char_lm.py, so that its checkpoint can be loaded.
class CharLM : public torch::nn::Module {
 public:
  CharLM(int64_t vocabulary_size, int64_t embedding_size, int64_t hidden_size)
      : vocabulary(register_buffer("vocabulary", torch::zeros({vocabulary_size}, torch::kInt64))),
        embedding_(
            register_module("embedding", torch::nn::Embedding(vocabulary_size, embedding_size))),
        rnn_(register_module("rnn", lltm::LLTM(embedding_size, hidden_size))),
        output_(register_module("output", torch::nn::Linear(hidden_size, vocabulary_size))) {}

  // characters (T): indices into the vocabulary. Returns the logits (V) of the next character, and
  // the state.
  std::tuple<torch::Tensor, lltm::State> forward(
      const torch::Tensor& characters, const std::optional<lltm::State>& state) {
    auto [hidden, next_state] = rnn_->forward(embedding_->forward(characters), state);
    return {output_->forward(hidden)[-1], next_state};
  }

  torch::Tensor vocabulary;  // (V), int64: code points, ascending

 private:
  torch::nn::Embedding embedding_;
  lltm::LLTM rnn_;
  torch::nn::Linear output_;
};

CharLM load(const std::string& path) {
  const auto tensors = lltm::load_safetensors(path);
  const auto& embedding = tensors.at("embedding.weight");  // (V, E)
  const auto& output = tensors.at("output.weight");        // (V, H)
  CharLM model(embedding.size(0), embedding.size(1), output.size(1));
  lltm::load_state_dict(model, path);
  return model;
}

std::vector<int64_t> code_points(const std::string& utf8) {
  std::vector<int64_t> points;
  std::mbstate_t shift{};
  for (const char *at = utf8.data(), *end = at + utf8.size(); at < end;) {
    char32_t point = 0;
    const size_t bytes = std::mbrtoc32(&point, at, end - at, &shift);
    if (bytes > utf8.size()) throw std::invalid_argument("the prompt is not UTF-8");
    points.push_back(point);
    at += std::max<size_t>(bytes, 1);
  }
  return points;
}

std::string utf8(char32_t point) {
  char bytes[MB_LEN_MAX];
  std::mbstate_t shift{};
  return {bytes, std::c32rtomb(bytes, point, &shift)};
}

// Writes the same text as CharLM.generate in char_lm.py, which explains why.
std::string generate(
    CharLM& model,
    const std::string& prompt,
    int64_t length,
    std::optional<uint64_t> seed,
    double temperature) {
  const torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed.value_or(0));
  const auto& vocabulary = model.vocabulary;
  const auto points = torch::tensor(code_points(prompt), torch::kInt64);
  const auto indices = torch::searchsorted(vocabulary, points).clamp_max(vocabulary.size(0) - 1);
  if (!torch::equal(vocabulary.index_select(0, indices), points))
    throw std::invalid_argument("the prompt has a character that the training text lacks");

  auto [logits, state] = model.forward(indices, std::nullopt);
  std::string written;
  for (int64_t i = 0; i < length; ++i) {
    const auto scores = logits.to(torch::kFloat64);
    torch::Tensor index;
    if (!seed) {
      index = scores.argmax();
    } else {
      const auto cumulative = torch::softmax(scores / temperature, 0).cumsum(0);
      const auto uniform = torch::rand({}, generator, torch::kFloat64);
      index = torch::searchsorted(cumulative, uniform).clamp_max(cumulative.size(0) - 1);
    }
    written += utf8(static_cast<char32_t>(vocabulary[index].item<int64_t>()));
    std::tie(logits, state) = model.forward(index.view({1}), state);
  }
  return written;
}

// Returns the first shared library in this process whose name contains `name`.
std::string mapped_library(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto slash = line.rfind('/');
    if (slash != std::string::npos && line.find(name, slash) != std::string::npos)
      return line.substr(slash + 1);
  }
  return "none";
}

void run(const std::vector<std::string>& arguments) {
  if (arguments.size() != 3 && arguments.size() != 5)
    throw std::invalid_argument("usage: generate CHECKPOINT PROMPT LENGTH [SEED TEMPERATURE]");
  const bool random = arguments.size() == 5;
  CharLM model = load(arguments[0]);

  const int64_t length = std::stoll(arguments[2]);
  const auto start = std::chrono::steady_clock::now();
  std::cout << generate(
                   model,
                   arguments[1],
                   length,
                   random ? std::optional(std::stoull(arguments[3])) : std::nullopt,
                   random ? std::stod(arguments[4]) : 1.0)
            << std::flush;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;

  std::cerr << "lltm " << lltm::version() << ", " << static_cast<int64_t>(length / seconds.count())
            << " characters per second; shared libraries in this process:"
            << " lltm: " << mapped_library("liblltm")
            << ", torch: " << mapped_library("libtorch_cpu")
            << ", Python: " << mapped_library("python") << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::setlocale(LC_CTYPE, "C.UTF-8");  // for the prompt and the output
    run({argv + 1, argv + argc});
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "generate: " << error.what() << "\n";
    return 1;
  }
}
