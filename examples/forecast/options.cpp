#include "options.h"

#include "csv.h"

#include <charconv>
#include <map>
#include <set>

namespace forecast {
namespace {

int64_t whole_number(const std::string& option, const std::string& text) {
  const int64_t smallest = option == "--seed" ? 0 : 1;
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stopped != end || value < smallest) {
    throw UsageError(
        option + ": expected a whole number from " + std::to_string(smallest) + " on, got " + text);
  }
  return value;
}

}  // namespace

Options parse(const std::vector<std::string>& words) {
  Options options;
  options.command = words.empty() ? "nothing" : words[0];
  std::string columns;
  std::map<std::string, std::string*> texts = {{"--checkpoint", &options.checkpoint}};
  std::map<std::string, int64_t*> numbers;
  std::set<std::string> required = {"--checkpoint"};
  if (options.command == "train") {
    texts.insert({{"--losses", &options.losses}, {"--columns", &columns}});
    numbers = {
        {"--epochs", &options.epochs},
        {"--hidden", &options.hidden},
        {"--context", &options.context},
        {"--seed", &options.seed},
        {"--period", &options.period}};
    required.insert("--losses");
  } else if (options.command == "predict") {
    numbers = {{"--steps", &options.steps}};
    required.insert("--steps");
  } else {
    throw UsageError("expected train or predict, got " + options.command);
  }

  std::set<std::string> given;
  for (size_t k = 1; k < words.size(); ++k) {
    const std::string& word = words[k];
    if (word == "--resume" && options.command == "train") {
      options.resume = true;
    } else if (!word.starts_with("--")) {
      if (!options.data.empty()) throw UsageError("expected one CSV file, got " + word + " too");
      options.data = word;
    } else if (texts.count(word) == 0 && numbers.count(word) == 0) {
      throw UsageError("expected an option of " + options.command + ", got " + word);
    } else if (++k == words.size()) {
      throw UsageError(word + ": expected a value, got nothing");
    } else {
      given.insert(word);
      if (const auto text = texts.find(word); text != texts.end()) {
        *text->second = words[k];
      } else {
        *numbers[word] = whole_number(word, words[k]);
      }
    }
  }

  if (options.data.empty()) throw UsageError("expected a CSV file, got none");
  for (const std::string& name : required) {
    if (given.count(name) == 0) throw UsageError("expected " + name + ", got none");
  }
  for (const std::string name : {"--columns", "--hidden", "--context", "--seed"}) {
    if (options.resume && given.count(name) != 0) {
      throw UsageError("--resume: expected no " + name + ", which the checkpoint holds, got one");
    }
  }
  if (!columns.empty()) options.columns = split(columns);
  return options;
}

}  // namespace forecast
