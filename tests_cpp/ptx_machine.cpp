#include "ptx.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

namespace ptx {
namespace {

constexpr std::uint64_t kSharedGranule = 4;

int choose(std::mt19937_64& random, std::size_t count) {
  return static_cast<int>(random() % count);
}

int thread_of(const Warp& warp, int lane) {
  return warp.block->first_thread + warp.first_thread + lane;
}

}  // namespace

const char* record(Access& access, Kind kind, int thread, std::uint32_t epoch) {
  if (access.epoch != epoch) access = {epoch};
  const auto is_other = [thread](int who) { return who != Access::kNobody && who != thread; };
  if (is_other(access.writer)) return "another thread's store races with this access";
  if (kind == Kind::kLoad || kind == Kind::kStore) {
    if (access.publisher != Access::kNobody) return "a published word needs relaxed accesses";
  }
  if (!is_load(kind) && is_other(access.reader))
    return "this store races with another thread's load";
  if (kind == Kind::kPublish) {
    if (access.publisher != Access::kNobody) return "a word is published twice";
    access.publisher = thread;
  }
  if (kind == Kind::kLoad) access.reader = is_other(access.reader) ? Access::kSeveral : thread;
  if (kind == Kind::kStore) access.writer = thread;
  return nullptr;
}

void Memory::add(const void* data, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uint64_t>(data);
  if (bytes > 0) regions_[begin] = {begin, begin + bytes, {}};
}

Memory::Region* Memory::find(std::uint64_t address, std::uint64_t bytes) {
  auto found = regions_.upper_bound(address);
  if (found == regions_.begin()) return nullptr;
  Region& region = (--found)->second;
  return address + bytes <= region.end ? &region : nullptr;
}

Machine::Machine(const Kernel& kernel, const Launch& launch, Memory& memory, const Options& options)
    : kernel_(kernel), launch_(launch), memory_(memory), options_(options), random_(options.seed) {
  static std::uint32_t launches = 0;
  epoch_ = ++launches;
  // Launches differ: some see stores after few instructions, some after thousands.
  delay_bits_ = 4 + choose(random_, 10);
  if (launch.parameters.size() != kernel.parameters.size())
    throw Error("another number of parameters");
  std::size_t words = 0;
  for (const std::uint64_t bytes : kernel.parameters) words += (bytes + 7) / 8;
  parameters_.resize(words);
  auto* to = parameters_.data();
  for (std::size_t n = 0; n < launch.parameters.size(); ++n) {
    std::memcpy(to, launch.parameters[n], kernel.parameters[n]);
    parameter_addresses_.push_back(reinterpret_cast<std::uint64_t>(to));
    to += (kernel.parameters[n] + 7) / 8;
  }
  waiting_.resize(static_cast<std::size_t>(launch.grid[0]) * launch.grid[1] * launch.grid[2]);
  for (std::size_t n = 0; n < waiting_.size(); ++n) waiting_[n] = static_cast<int>(n);
  if (options.late_rounds == 0) std::shuffle(waiting_.begin(), waiting_.end(), random_);
}

void Machine::start_block() {
  const int number = waiting_.back();
  waiting_.pop_back();
  auto block = std::make_unique<Block>();
  const int x = launch_.grid[0], y = launch_.grid[1];
  block->id = {number % x, number / x % y, number / x / y};
  block->first_thread = number * launch_.threads;
  block->shared.resize((launch_.shared_bytes + 7) / 8);
  for (auto& word : block->shared) word = random_();
  block->accesses.resize(launch_.shared_bytes / kSharedGranule);
  for (int first = 0; first < launch_.threads; first += kWarpLanes) {
    auto warp = std::make_unique<Warp>();
    warp->block = block.get();
    warp->first_thread = first;
    warp->registers.resize(static_cast<std::size_t>(kernel_.registers) * kWarpLanes, random_());
    const auto fill = [&](int row, std::uint64_t value) {
      std::fill_n(warp->row(row), kWarpLanes, value);
    };
    for (int lane = 0; lane < kWarpLanes; ++lane) warp->row(kTidX)[lane] = first + lane;
    for (int axis = 0; axis < 3; ++axis) fill(kCtaidX + axis, block->id[axis]);
    fill(kSharedBase, 0);
    for (std::size_t n = 0; n < parameter_addresses_.size(); ++n) {
      fill(kFirstParameter + static_cast<int>(n), parameter_addresses_[n]);
    }
    for (const auto& [row, value] : kernel_.constants) fill(row, value);
    block->warps.push_back(std::move(warp));
  }
  blocks_.push_back(std::move(block));
}

void Machine::run() {
  // Blocks of other launches begin when earlier ones have ended.
  const std::size_t most = launch_.cooperative ? std::numeric_limits<std::size_t>::max() : 4;
  std::vector<Warp*> warps;
  for (int round = 0;; ++round) {
    const std::size_t late = round < options_.late_rounds ? 1 : 0;
    while (waiting_.size() > late && blocks_.size() < most) start_block();
    if (blocks_.empty() && waiting_.empty()) break;
    warps.clear();
    for (const auto& block : blocks_) {
      for (const auto& warp : block->warps) warps.push_back(warp.get());
    }
    std::shuffle(warps.begin(), warps.end(), random_);
    bool progress = late > 0;
    for (Warp* const warp : warps) progress |= run_warp(*warp);
    if (!progress && pending_.empty()) throw Error("deadlock");
    if (executed_ > static_cast<std::uint64_t>(options_.most_instructions)) {
      throw Error("too many instructions");
    }
    std::erase_if(blocks_, [](const auto& block) {
      return std::all_of(block->warps.begin(), block->warps.end(), [](const auto& warp) {
        return warp->groups.empty();
      });
    });
    // Time passes although all wait.
    if (!progress) executed_ = pending_.top().due;
  }
  for (; !pending_.empty(); pending_.pop()) make_visible(pending_.top());
}

bool Machine::can_run(const Group& group) const {
  const Control control = kernel_.code[group.pc].opcode->control;
  const bool waits = control == Control::kSync || control == Control::kAligned;
  return !group.is_at_barrier && (!waits || group.lanes == kAllLanes);
}

// Up to a random number of instructions. Returns false if all lanes wait.
bool Machine::run_warp(Warp& warp) {
  constexpr int kMost = 300;
  bool progress = false;
  std::vector<std::size_t> ready;
  for (int left = 1 + choose(random_, kMost); left > 0 && !warp.groups.empty(); --left) {
    for (; !pending_.empty() && pending_.top().due <= executed_; pending_.pop()) {
      make_visible(pending_.top());
    }
    ready.clear();
    bool is_at_barrier = false;
    for (std::size_t n = 0; n < warp.groups.size(); ++n) {
      if (can_run(warp.groups[n])) ready.push_back(n);
      is_at_barrier |= warp.groups[n].is_at_barrier;
    }
    if (ready.empty() && is_at_barrier) break;
    if (ready.empty()) {
      throw Error(
          "lanes wait at different places, also at " + kernel_.code[warp.groups[0].pc].text);
    }
    std::size_t chosen = ready[0];
    if (ready.size() > 1) {
      // Mostly the first in the code, so that lanes meet again.
      const auto is_earlier = [&](std::size_t a, std::size_t b) {
        return warp.groups[a].pc < warp.groups[b].pc;
      };
      chosen = choose(random_, 8) == 0 ? ready[choose(random_, ready.size())]
                                       : *std::min_element(ready.begin(), ready.end(), is_earlier);
    }
    step(warp, chosen);
    progress = true;
  }
  return progress;
}

void Machine::step(Warp& warp, std::size_t chosen) {
  Group& group = warp.groups[chosen];
  const Instruction& instruction = kernel_.code[group.pc];
  ++executed_;
  Lanes lanes = group.lanes;
  if (instruction.predicate >= 0) {
    const std::uint64_t* const predicate = warp.row(instruction.predicate);
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      if ((predicate[lane] != 0) == instruction.is_negated) lanes &= ~(1U << lane);
    }
  }
  const Control control = instruction.opcode->control;
  if (control == Control::kBarrier) {
    group.is_at_barrier = true;
    release_barrier(*warp.block);
  } else if (control == Control::kBranch) {
    branch(warp, chosen, lanes, instruction.target);
  } else if (control == Control::kExit) {
    ++group.pc;
    group.lanes &= ~lanes;
    std::erase_if(warp.groups, [](const Group& group) { return group.lanes == 0; });
    release_barrier(*warp.block);
  } else {
    ++group.pc;
    try {
      if (control == Control::kAligned && warp.has_diverged) {
        throw Error("the lanes left a loop at different times and were not synchronized");
      }
      if (control == Control::kSync) warp.has_diverged = false;
      if (lanes != 0) instruction.opcode->run(*this, warp, instruction, lanes);
    } catch (const Error& error) {
      throw Error(std::string(error.what()) + ": " + instruction.text + ", in " + kernel_.name);
    }
  }
  if (warp.groups.size() > 1) merge(warp);
}

void Machine::branch(Warp& warp, std::size_t chosen, Lanes lanes, int target) {
  Group& group = warp.groups[chosen];
  if (lanes != 0 && lanes != kAllLanes && target <= group.pc) warp.has_diverged = true;
  if (lanes == group.lanes) {
    group.pc = target;
    return;
  }
  ++group.pc;
  if (lanes == 0) return;
  group.lanes &= ~lanes;
  warp.groups.push_back({target, lanes});
}

void Machine::merge(Warp& warp) const {
  auto& groups = warp.groups;
  for (std::size_t a = 0; a < groups.size(); ++a) {
    for (std::size_t b = groups.size() - 1; b > a; --b) {
      if (groups[a].pc != groups[b].pc || groups[a].is_at_barrier != groups[b].is_at_barrier)
        continue;
      groups[a].lanes |= groups[b].lanes;
      groups.erase(groups.begin() + static_cast<std::ptrdiff_t>(b));
    }
  }
}

void Machine::release_barrier(Block& block) const {
  for (const auto& warp : block.warps) {
    for (const Group& group : warp->groups) {
      if (!group.is_at_barrier) return;
    }
  }
  ++block.epoch;
  for (const auto& warp : block.warps) {
    if (warp->groups.empty()) continue;
    const int pc = warp->groups[0].pc;
    Lanes lanes = 0;
    for (const Group& group : warp->groups) {
      if (group.pc != pc) throw Error("lanes of a warp are at different barriers");
      lanes |= group.lanes;
    }
    warp->groups = {{pc + 1, lanes}};
    warp->has_diverged = false;
  }
}

// ---- Memory -------------------------------------------------------------------

Memory::Region* Machine::accessed(
    Warp& warp, int lane, std::uint64_t address, std::uint64_t bytes, Kind kind) {
  Memory::Region* region = last_region_;
  if (region == nullptr || address < region->begin || address + bytes > region->end) {
    region = last_region_ = memory_.find(address, bytes);
    if (region == nullptr && options_.any_memory) return nullptr;
    if (region == nullptr) throw Error("a foreign address");
    region->accesses.resize(
        (region->end - region->begin + Memory::kGranule - 1) / Memory::kGranule);
  }
  const std::uint64_t begin = address - region->begin;
  for (auto n = begin / Memory::kGranule; n * Memory::kGranule < begin + bytes; ++n) {
    const char* const error = record(region->accesses[n], kind, thread_of(warp, lane), epoch_);
    if (error != nullptr) throw Error(error);
  }
  return region;
}

char* Machine::global(Warp& warp, int lane, std::uint64_t address, int bytes, Kind kind) {
  accessed(warp, lane, address, static_cast<std::uint64_t>(bytes), kind);
  return reinterpret_cast<char*>(address);
}

char* Machine::shared(Warp& warp, int lane, std::uint64_t address, int bytes, Kind kind) {
  Block& block = *warp.block;
  const std::uint64_t end = address + static_cast<std::uint64_t>(bytes);
  if (end > launch_.shared_bytes) throw Error("outside of shared memory");
  for (auto n = address / kSharedGranule; n * kSharedGranule < end; ++n) {
    const char* const error = record(block.accesses[n], kind, thread_of(warp, lane), block.epoch);
    if (error != nullptr) throw Error(error);
  }
  return reinterpret_cast<char*>(block.shared.data()) + address;
}

char* Machine::parameter(std::uint64_t address, int bytes) {
  for (std::size_t n = 0; n < parameter_addresses_.size(); ++n) {
    const std::uint64_t begin = parameter_addresses_[n];
    if (begin <= address &&
        address + static_cast<std::uint64_t>(bytes) <= begin + kernel_.parameters[n]) {
      return reinterpret_cast<char*>(address);
    }
  }
  throw Error("outside of the parameters");
}

void Machine::publish(Warp& warp, int lane, std::uint64_t address, std::uint32_t word) {
  accessed(warp, lane, address, sizeof(word), Kind::kPublish);
  if (options_.lost && options_.lost(warp.block->id[0], warp.first_thread + lane)) return;
  const std::uint64_t most = std::uint64_t{1} << choose(random_, delay_bits_);
  pending_.push({executed_ + random_() % most, address, word});
  pending_words_[address] = word;
}

std::uint32_t Machine::load_relaxed(Warp& warp, int lane, std::uint64_t address) {
  const Memory::Region* const region =
      accessed(warp, lane, address, sizeof(std::uint32_t), Kind::kStrongLoad);
  if (region != nullptr &&
      region->accesses[(address - region->begin) / Memory::kGranule].publisher ==
          thread_of(warp, lane)) {
    const auto own = pending_words_.find(address);
    if (own != pending_words_.end()) return own->second;
  }
  std::uint32_t word;
  std::memcpy(&word, reinterpret_cast<const void*>(address), sizeof(word));
  return word;
}

void Machine::make_visible(const Store& store) {
  std::memcpy(reinterpret_cast<void*>(store.address), &store.word, sizeof(store.word));
  pending_words_.erase(store.address);
}

void run(const Kernel& kernel, const Launch& launch, Memory& memory, const Options& options) {
  if (launch.threads % kWarpLanes != 0) throw Error("a partial warp");
  Machine(kernel, launch, memory, options).run();
}

}  // namespace ptx
