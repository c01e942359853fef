// Loads a package that torch._inductor.aoti_compile_and_package wrote and runs it,
// with no Python in the process:
//
//     run MODEL.pt2 ARGUMENTS.safetensors RESULTS.safetensors
//
// The file of arguments holds the tensors "0", "1", ... in the order of the
// model's inputs; the results are written in the same manner.
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

    // The compiled model calls lltm's operators by name: they are registered when
    // liblltm is loaded, which a program that calls none of its functions would not
    // be (linkers drop a library that nothing refers to). This one does.
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
