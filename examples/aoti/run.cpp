// Runs a package of torch._inductor.aoti_compile_and_package without Python:
//
//     run MODEL.pt2 ARGUMENTS.safetensors RESULTS.safetensors
//
// Arguments are tensors "0", "1", ... in the order of the model's inputs, likewise the results.
#include <lltm/lltm.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <map>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: run MODEL.pt2 ARGUMENTS.safetensors RESULTS.safetensors\n";
    return EXIT_FAILURE;
  }
  try {
    std::map<std::string, at::Tensor> named = lltm::load_safetensors(argv[2]);
    std::vector<at::Tensor> arguments;
    for (size_t k = 0; k < named.size(); ++k) arguments.push_back(named.at(std::to_string(k)));

    // The compiled model calls lltm's operators by name, so liblltm must be loaded. Linkers drop a
    // library whose functions are not called; this call keeps it.
    std::cout << "lltm " << lltm::version() << ", CPU kernels " << lltm::cpu_kernels() << '\n';
    const c10::InferenceMode no_gradients;
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const std::vector<at::Tensor> results = model.run(arguments);

    named.clear();
    for (size_t k = 0; k < results.size(); ++k) named[std::to_string(k)] = results[k];
    lltm::save_safetensors(named, argv[3]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
