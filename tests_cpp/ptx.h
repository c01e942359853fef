// Executes the PTX of a CUDA kernel on the CPU, as NVRTC generates it, asm statements included.
//
// Thread blocks, warps and diverged lanes run in random order, and relaxed stores become visible
// late and in any order. Throws ptx::Error for unknown instructions, unaligned or foreign
// addresses, accesses that race with another thread, `aligned` instructions after loops in which
// lanes diverged, and deadlocks. Registers and shared memory begin with random bits.
//
// The PTX ISA defines the instructions (docs.nvidia.com/cuda/parallel-thread-execution).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx {

constexpr int kWarpLanes = 32;
using Lanes = std::uint32_t;  // a bit per lane
constexpr Lanes kAllLanes = 0xFFFFFFFF;

struct Error : std::runtime_error {
  using runtime_error::runtime_error;
};

// ---- Memory -------------------------------------------------------------------

// Accesses to a piece of memory since the last synchronization, which starts an epoch.
struct Access {
  static constexpr int kNobody = -1, kSeveral = -2;
  std::uint32_t epoch = 0;
  int reader = kNobody, writer = kNobody;  // threads, by accesses that are not strong
  int publisher = kNobody;
};

// Strong accesses are relaxed. A word is published once, and becomes visible later.
enum class Kind { kLoad, kStore, kStrongLoad, kPublish, kStrongStore };
constexpr bool is_load(Kind kind) {
  return kind == Kind::kLoad || kind == Kind::kStrongLoad;
}

// Records the access. Returns an error, or null.
const char* record(Access& access, Kind kind, int thread, std::uint32_t epoch);

// Global memory that kernels may access, on the host.
class Memory {
 public:
  struct Region {
    std::uint64_t begin, end;
    std::vector<Access> accesses;  // per kGranule bytes
  };
  static constexpr std::uint64_t kGranule = 2;

  void add(const void* data, std::size_t bytes);
  void remove(const void* data) { regions_.erase(reinterpret_cast<std::uint64_t>(data)); }
  // Null unless all bytes are in a region.
  Region* find(std::uint64_t address, std::uint64_t bytes);

 private:
  std::map<std::uint64_t, Region> regions_;
};

// ---- Kernels ------------------------------------------------------------------

class Machine;
struct Warp;
struct Instruction;
using Run = void (*)(Machine&, Warp&, const Instruction&, Lanes);

// kSync waits for all lanes of the warp. kAligned does too, but needs an earlier synchronization if
// the lanes left a loop at different times.
enum class Control { kNone, kBranch, kExit, kBarrier, kSync, kAligned };

struct Opcode {
  std::string name;
  Run run;                  // null: only `control`
  std::vector<int> counts;  // registers of each operand
  std::vector<int> widths;  // their bits; 0: any
  Control control = Control::kNone;
};
// Null if unknown.
const Opcode* find_opcode(const std::string& name);
std::vector<std::string> opcode_names();

struct Instruction {
  std::string text;
  const Opcode* opcode;
  int predicate = -1;  // register
  bool is_negated = false;
  std::vector<int> registers;  // of all operands
  std::int64_t offset = 0;     // of an address
  int target = -1;             // of a branch
  int width = 0;               // bits of the first register
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<std::uint64_t> parameters;  // sizes
  int registers = 0;  // first those of kSpecialRegisters, which also have addresses
  std::vector<std::pair<int, std::uint64_t>> constants;
};
enum SpecialRegister { kTidX, kCtaidX, kCtaidY, kCtaidZ, kSharedBase, kFirstParameter };

Kernel parse(const std::string& text);

// ---- Execution ----------------------------------------------------------------

struct Launch {
  std::array<int, 3> grid;
  int threads;
  std::size_t shared_bytes = 0;
  std::vector<const void*> parameters = {};
  bool cooperative = false;  // all blocks run concurrently
};

struct Options {
  std::uint64_t seed = 1;
  // The last block starts after this number of rounds of all warps.
  int late_rounds = 0;
  // Relaxed stores that never become visible.
  std::function<bool(int block_x, int thread)> lost;
  bool any_memory = false;  // kernels may also access memory that is not in `Memory`
  std::int64_t most_instructions = 1'000'000'000;  // of warps
};

void run(const Kernel& kernel, const Launch& launch, Memory& memory, const Options& options);

// ---- State of a launch, for the instructions ----------------------------------

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
