// Uses each part of the C++ API once; results are computed by hand.
//
//     app CELL WEIGHTS.safetensors INPUT.safetensors RESULTS.safetensors
//
// runs files saved by Python: a cell, the state_dict of two bidirectional layers, and the tensor
// "input". Results "0", "1", ... are the output and the last states; "prepacked 0", ... are the
// prepacked layer's.
#include <lltm/lltm.h>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <map>
#include <string>
#include <tuple>

namespace {

int mismatches = 0;

void expect_near(const char* what, const at::Tensor& got, double expected, double error = 1e-14) {
  const double value = got.item<double>();
  if (!(std::abs(value - expected) <= error)) {
    std::cerr << what << ": expected " << expected << ", got " << value << '\n';
    ++mismatches;
  }
}

void expect(const char* what, bool condition) {
  if (!condition) {
    std::cerr << what << '\n';
    ++mismatches;
  }
}

int run_custom_cell(char** paths) {
  try {
    const lltm::Cell cell = lltm::Cell::load(paths[1]);
    const auto weights = lltm::load_safetensors(paths[2]);
    const at::Tensor input = lltm::load_safetensors(paths[3]).at("input");
    const int64_t hidden_size = weights.at("weight_hh_l0").size(1);
    lltm::CustomLayer layer(
        lltm::CustomLayerOptions(cell, input.size(2), hidden_size)
            .num_layers(2)
            .bidirectional(true));
    layer->to(input.scalar_type());
    lltm::load_state_dict(layer, paths[2]);

    const at::NoGradGuard no_grad;
    std::map<std::string, at::Tensor> results;
    const auto keep = [&](const std::string& prefix, const auto& result) {
      const auto& [output, states] = result;
      results[prefix + "0"] = output;
      for (size_t k = 0; k < states.size(); ++k) {
        results[prefix + std::to_string(k + 1)] = states[k];
      }
    };
    keep("", layer->forward(input));
    keep("prepacked ", layer->prepack().forward(input));
    lltm::save_safetensors(results, paths[4]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 5) return run_custom_cell(argv);
  const at::TensorOptions float64(at::kDouble);
  // B = I = H = 1. The weights' columns multiply h and x.
  const at::Tensor weights = at::tensor({0.5, -1.0, 1.0, 0.25, -0.3, 0.8}, float64).view({3, 2});
  const at::Tensor bias = at::tensor({0.1, -0.2, 0.3}, float64);
  const at::Tensor h = at::full({1, 1}, -0.4, float64);
  const at::Tensor c = at::full({1, 1}, 0.6, float64);
  const at::Tensor x = at::tensor({0.7, -1.1}, float64).view({2, 1, 1});

  // z = (-0.8, -0.425, 0.98): i = 0.3100, o = 0.3953, g = 0.98.
  const auto next = lltm::step("lltm", x[0], {h, c}, weights, /*weight_hh=*/{}, bias);
  expect_near("c' of one step", next[1], 0.9038250084949397);
  expect_near("h' of one step", next[0], 0.2839017849323909);

  // z = (1.3420, -0.1911, -0.6652): i = 0.7928, o = 0.4524, g = -0.4858.
  const auto [output, states] = lltm::sequence("lltm", x, {h, c}, weights, /*weight_hh=*/{}, bias);
  expect_near("output of the first step", output[0], 0.2839017849323909);
  expect_near("output of the second step", output[1], 0.2156313885689766);
  expect_near("h_n", states[0], 0.2156313885689766);
  expect_near("c_n", states[1], 0.5186663962857727);

  const auto in_float32 = [&](const at::Tensor& input) {
    const auto narrow = [](const at::Tensor& tensor) { return tensor.to(at::kFloat); };
    return std::get<0>(lltm::sequence(
        "lltm", narrow(input), {narrow(h), narrow(c)}, narrow(weights), {}, narrow(bias)));
  };
  expect_near("float32", in_float32(x)[1], 0.2156313885689766, 1e-6);
  expect("NaN stays NaN", at::isnan(in_float32(x * NAN)).all().item<bool>());

  // One training step: bias -= 0.5 dz, with dz of h' above:
  // tanh(c') = t, dc = o (1 - t^2), dz = (dc g i (1-i), t o (1-o), dc i).
  lltm::LLTM layer(lltm::LLTMOptions(1, 1));
  layer->to(at::kDouble);
  auto parameters = layer->named_parameters();
  {
    const at::NoGradGuard no_grad;
    parameters["weights_l0"].copy_(weights);
    parameters["bias_l0"].copy_(bias);
  }
  torch::optim::SGD optimizer(layer->parameters(), torch::optim::SGDOptions(0.5));
  const auto loss = [&] {
    return std::get<0>(
               layer->forward(x.narrow(0, 0, 1), std::make_tuple(h.unsqueeze(0), c.unsqueeze(0))))
        .sum();
  };
  const at::Tensor before = loss();
  before.backward();
  optimizer.step();
  expect_near("loss", before, 0.2839017849323909);
  expect_near("bias of i", parameters["bias_l0"][0], 0.1 - 0.5 * 0.04013088261184337);
  expect_near("bias of o", parameters["bias_l0"][1], -0.2 - 0.5 * 0.17166947146159164);
  expect_near("bias of g", parameters["bias_l0"][2], 0.3 - 0.5 * 0.05934984747442119);
  expect("the step lowers the loss", loss().item<double>() < before.item<double>());

  try {
    lltm::step("lltm", x[0], {h, c}, weights.t(), /*weight_hh=*/{}, bias);
    expect("wrong weights throw", false);
  } catch (const c10::ValueError&) {
  }
  expect(
      "the library is of the version of its headers",
      std::strcmp(lltm::version(), LLTM_VERSION) == 0);

  std::cout << lltm::build_info();
  return mismatches == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
