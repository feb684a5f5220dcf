// The emulated machine: executes the threads of a block as fibers, implements barriers and warp
// collectives, and detects errors.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "fibers.h"
#include "races.h"

namespace fused_attn::emulator {

// Settings for all launches of the module.
struct Settings {
  uint64_t seed = 0;   // determines the order of warps and blocks, and when copies complete
  int generation = 0;  // incremented by each change
  bool race_check = true;
};
// Hides a variable from other modules of the process, which may come from a different build.
#define FUSED_ATTN_OF_MODULE __attribute__((visibility("hidden")))
FUSED_ATTN_OF_MODULE inline Settings settings;

// Source location of an operation in a kernel.
struct Site {
  int line;
  const char* file;
};

inline const char* base_name(const char* file) {
  const char* slash = std::strrchr(file, '/');
  return slash == nullptr ? file : slash + 1;
}

// Kinds of warp-collective operations. All lanes of a warp must execute the same one together.
enum class Meeting { kBlock, kWarp, kShuffle, kBallot, kLoadMatrices, kMma };

// An asynchronous copy of 16 bytes to shared memory.
struct Copy {
  uint32_t address;
  const void* source;  // null: write zeros
  int group;
  bool complete;
  Site site;
};

// Copies of one thread.
struct Copies {
  std::vector<Copy> copies;  // in ascending order of groups
  size_t begin = 0;          // index of the first copy that has not been waited for
  int group = 0;             // group of the next copy
};

struct Warp {
  Context contexts[32];
  void* operands[32];  // operand of each lane in the current collective
  Meeting meeting;     // the current collective
  Site site;           // location of the current collective
  int arrived, ended;  // lanes that have reached the collective; lanes whose thread has ended
  int lane;            // the running lane or, while the warp is suspended, the lane to resume
  int id;
};

// A kernel and its arguments, type-erased. run(kernel, arguments) calls the kernel.
struct Call {
  void* kernel;
  const void* arguments;
  void (*run)(void* kernel, const void* arguments);
};

// State of the emulator for one host thread. It runs one block at a time, and one fiber at a time.
// Member functions are called from fibers, except for run.
class Machine {
 public:
  static constexpr int kMaxShared = 227 << 10;  // maximum shared memory of a block on sm_90

  Warp* warp = nullptr;
  int64_t block = 0, num_blocks = 0;
  char* shared = nullptr;
  int shared_size = 0;
  Shadow shadow;
  bool race_check = true;

  int thread() const { return warp->id * 32 + warp->lane; }
  Access access() const { return {warp->id, warp->lane}; }
  Copies& copies() { return copies_[thread()]; }
  uint64_t random() {  // xorshift64*
    random_ ^= random_ >> 12;
    random_ ^= random_ << 25;
    random_ ^= random_ >> 27;
    return random_ * 0x2545f4914f6cdd1du >> 32;
  }

  // Executes a warp-collective operation. The calling lane suspends until all lanes of the warp
  // have called meet(). The last lane then calls compute(operands) for the whole warp. Fails the
  // launch if the lanes are at different operations.
  template <class Compute>
  __attribute__((always_inline)) void meet(Meeting meeting, void* operand, Site site,
                                           Compute compute) {
    Warp& w = *warp;
    const int lane = w.lane;
    w.operands[lane] = operand;
    if (w.arrived == 0 && w.ended == 0) {
      w.meeting = meeting;
      w.site = site;
    } else if (w.ended != 0 || w.meeting != meeting || w.site.line != site.line ||
               w.site.file != site.file) {
      check_together(meeting, site);
    }
    if (++w.arrived < 32) {
      w.lane = (lane + 1) % 32;
      switch_context(w.contexts[lane], w.contexts[w.lane]);
      return;
    }
    w.arrived = 0;
    compute(w.operands);
    shadow.meet(w.id);
    if (--until_yield_ == 0) {
      until_yield_ = 1 + random() % 64;
      yield();
    }
  }
  // Suspends the calling warp until all warps that have not ended have called this function.
  void sync_block(Site site) {
    meet(Meeting::kBlock, nullptr, site, [this](void* const*) { wait_for_warps(); });
  }

  // Fails the launch if an access of kSize bytes to shared memory is misaligned or out of bounds.
  template <int kSize>
  void check_address(uint32_t address, int thread, Site site) {
    if (address % kSize != 0) {
      fail(thread, site, "shared address %u is no multiple of %d", address, kSize);
    }
    if (address > static_cast<uint32_t>(shared_size) || shared_size - address < kSize) {
      fail(thread, site, "%d bytes at shared address %u, of %d bytes", kSize, address, shared_size);
    }
  }
  // Record an access of kSize bytes to shared memory. Fail the launch if the access is a race.
  template <int kSize>
  void note_read(uint32_t address, int thread, Access me, Site site) {
    if (!race_check) return;
    Access by;
    int line;
    const char* race = shadow.read_race<kSize>(address, me, &by, &line);
    if (race != nullptr) fail_race(race, address, thread, by, line, site);
    shadow.read<kSize>(address, me, site.line);
  }
  template <int kSize>
  void note_write(uint32_t address, Site site) {
    if (!race_check) return;
    check_write<kSize>(address, site);
    shadow.write<kSize>(address, access(), site.line);
  }

  // Starts a copy, which completes at a random time: either now or when it is waited for.
  void start_copy(uint32_t address, const void* source, Site site) {
    if (race_check) {
      check_write<16>(address, site);
      shadow.start_copy(address, access(), site.line);
    }
    Copies& mine = copies();
    mine.copies.push_back({address, source, mine.group, false, site});
    if (random() % 2 == 0) complete(mine.copies.back());
  }
  // Completes all copies of the thread except for the `pending` newest groups.
  void wait_for_copies(int pending) {
    Copies& mine = copies();
    for (; mine.begin < mine.copies.size(); ++mine.begin) {
      Copy& copy = mine.copies[mine.begin];
      if (copy.group >= mine.group - pending) return;
      complete(copy);
      if (race_check) shadow.write<16>(copy.address, access(), copy.site.line);
    }
    mine.copies.clear();
    mine.begin = 0;
  }

  // Ends the launch with an error message. The fibers are abandoned, so destructors of objects on
  // their stacks do not run.
  template <class... Values>
  [[noreturn]] __attribute__((noinline, cold)) void fail(int thread, Site site, const char* format,
                                                         Values... values) {
    const int size = std::snprintf(error_, sizeof(error_),
                                   "%s:%d: block %lld, thread %d: ", base_name(site.file),
                                   site.line, (long long)block, thread);
    append(size, format, values...);
    leave();
  }
  // Runs all blocks of a kernel. Returns the error that was detected, valid until the next launch,
  // or null.
  const char* run(int64_t blocks, int threads, int shared_bytes, const Call& call);

 private:
  template <int kSize>
  void check_write(uint32_t address, Site site) {
    Access by;
    int line;
    const char* race = shadow.write_race<kSize>(address, access(), &by, &line);
    if (race != nullptr) fail_race(race, address, thread(), by, line, site);
  }
  void append(int size, const char* format, ...) {
    va_list values;
    va_start(values, format);
    std::vsnprintf(error_ + size, sizeof(error_) - size, format, values);
    va_end(values);
  }
  // Returns to run_block on the stack of the host.
  [[noreturn]] void leave() {
    Context abandoned;
    switch_context(abandoned, host_);
    __builtin_unreachable();
  }
  __attribute__((cold)) void check_together(Meeting meeting, Site site);
  [[noreturn]] __attribute__((cold)) void fail_race(const char* race, uint32_t address, int thread,
                                                    Access by, int line, Site site);
  void complete(Copy& copy) {
    if (copy.complete) return;
    copy.complete = true;
    if (copy.source == nullptr) {
      std::memset(shared + copy.address, 0, 16);
    } else {
      std::memcpy(shared + copy.address, copy.source, 16);
    }
  }
  void wait_for_warps();
  void release_if_complete();
  void yield();
  static void run_fiber();
  [[noreturn]] void end_fiber();
  void run_block(int warps);

  Warp warps_[kMaxWarps];
  Copies copies_[kMaxWarps * 32];
  // One bit per warp: has not ended; waits at sync_block; can run.
  uint32_t alive_ = 0, waiting_ = 0, ready_ = 0;
  int until_yield_ = 1;  // collectives until the next yield()
  uint64_t random_ = 1;
  int generation_ = -1;  // generation of the settings that seeded random_
  Stacks stacks_;
  std::vector<char> memory_;
  Context host_;
  const Call* call_ = nullptr;
  char error_[4096] = "";
};

// The machine of this host thread. With the initial-exec model, accesses need no function call. The
// loader reserves space for a few such variables in modules loaded at run time.
__attribute__((
    tls_model("initial-exec"))) FUSED_ATTN_OF_MODULE inline thread_local Machine* machine = nullptr;

}  // namespace fused_attn::emulator
