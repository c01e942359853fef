// The state of a launch, for ptx_machine.cpp and the instructions.
#pragma once

#include "ptx.h"

#include <memory>
#include <queue>
#include <random>
#include <unordered_map>

namespace ptx {

struct Block {
  std::array<int, 3> id;
  int first_thread = 0;  // of the grid
  std::vector<std::uint64_t> shared;
  std::vector<Access> accesses;  // per 4 bytes
  std::uint32_t epoch = 1;       // changes at each barrier
  std::vector<std::unique_ptr<Warp>> warps;
};

// Lanes with the same program counter.
struct Group {
  int pc;
  Lanes lanes;
  bool is_at_barrier = false;
};

struct Warp {
  Block* block;
  int first_thread;  // of the block
  std::vector<std::uint64_t> registers;
  std::vector<Group> groups = {{0, kAllLanes}};
  bool has_diverged = false;  // in a loop, since the last synchronization of its lanes

  // The values in all lanes.
  std::uint64_t* row(int number) { return registers.data() + std::ptrdiff_t{number} * kWarpLanes; }
};

class Machine {
 public:
  Machine(const Kernel& kernel, const Launch& launch, Memory& memory, const Options& options);

  void run();

  // Checks the access, and returns the memory on the host.
  char* global(Warp& warp, int lane, std::uint64_t address, int bytes, Kind kind);
  char* shared(Warp& warp, int lane, std::uint64_t address, int bytes, Kind kind);
  char* parameter(std::uint64_t address, int bytes);
  void publish(Warp& warp, int lane, std::uint64_t address, std::uint32_t word);
  // Includes the lane's stores that others may not see yet.
  std::uint32_t load_relaxed(Warp& warp, int lane, std::uint64_t address);

 private:
  struct Store {
    std::uint64_t due, address;  // due: in executed instructions
    std::uint32_t word;
    bool operator<(const Store& other) const { return due > other.due; }
  };

  void start_block();
  bool run_warp(Warp& warp);
  bool can_run(const Group& group) const;
  void step(Warp& warp, std::size_t group);
  void branch(Warp& warp, std::size_t group, Lanes lanes, int target);
  void merge(Warp& warp) const;
  void release_barrier(Block& block) const;
  void make_visible(const Store& store);
  // Records the access to each piece of the memory. Null if it may be any memory.
  Memory::Region* accessed(
      Warp& warp, int lane, std::uint64_t address, std::uint64_t bytes, Kind kind);

  const Kernel& kernel_;
  const Launch& launch_;
  Memory& memory_;
  const Options& options_;
  std::mt19937_64 random_;
  std::uint64_t executed_ = 0;
  int delay_bits_;
  std::uint32_t epoch_;
  std::vector<std::uint64_t> parameters_;
  std::vector<std::uint64_t> parameter_addresses_;
  std::vector<int> waiting_;  // blocks that have not begun
  std::vector<std::unique_ptr<Block>> blocks_;
  std::priority_queue<Store> pending_;
  std::unordered_map<std::uint64_t, std::uint32_t> pending_words_;
  Memory::Region* last_region_ = nullptr;
};

}  // namespace ptx
