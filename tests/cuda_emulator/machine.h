// A block of threads: whose turn it is, where warps and blocks meet, and what is an error.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "fibers.h"
#include "races.h"

namespace fused_attn::emulator {

// For all launches of the module.
struct Settings {
  uint64_t seed = 0;   // of whose turn it is and when copies complete
  int generation = 0;  // counts the changes
  bool race_check = true;
};
// Not shared with other modules of the process, which may be of another build.
#define FUSED_ATTN_OF_MODULE __attribute__((visibility("hidden")))
FUSED_ATTN_OF_MODULE inline Settings settings;

struct Site {
  int line;
  const char* file;
};

inline const char* base_name(const char* file) {
  const char* slash = std::strrchr(file, '/');
  return slash == nullptr ? file : slash + 1;
}

enum class Meeting { kBarrier, kWarp, kShuffle, kBallot, kLoadMatrices, kMma };

struct Copy {
  uint32_t address;
  const void* source;  // null: zeros
  int group;
  bool complete;
  Site site;
};

struct Copies {
  std::vector<Copy> copies;  // in the order of their groups
  size_t begin = 0;          // those before have been waited for
  int group = 0;             // of the next copy
};

struct Warp {
  Context contexts[32];
  void* operands[32];  // what the lanes bring to a meeting
  Meeting meeting;
  Site site;  // where they meet
  int arrived, ended;
  int lane;  // whose turn it is, was and will be
  int id;
};

struct BarrierOperand {
  int id, threads;  // 0: all that have not ended
};

struct Barrier {
  uint32_t waiting;  // a bit for each warp
  int threads;       // for how many they wait
};

// A kernel and its arguments, whose types `run` knows.
struct Call {
  void* kernel;
  const void* arguments;
  void (*run)(void* kernel, const void* arguments);
};

class Machine {
 public:
  static constexpr int kMaxShared = 227 << 10;  // of a block on sm_90

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

  // All lanes of the warp meet; the last one to come runs `compute` for all.
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
  void wait_at_barrier(BarrierOperand barrier, Site site) {
    meet(Meeting::kBarrier, &barrier, site,
         [this](void* const* operands) { wait_for_warps(operands); });
  }

  template <int kSize>
  void check_address(uint32_t address, int thread, Site site) {
    if (address % kSize != 0) {
      fail(thread, site, "shared address %u is no multiple of %d", address, kSize);
    }
    if (address > static_cast<uint32_t>(shared_size) || shared_size - address < kSize) {
      fail(thread, site, "%d bytes at shared address %u, of %d bytes", kSize, address, shared_size);
    }
  }
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
  void note_write(uint32_t address, bool atomic, Site site) {
    if (!race_check) return;
    check_write<kSize>(address, atomic, site);
    shadow.write<kSize>(address, access(), atomic, site.line);
  }

  void start_copy(uint32_t address, const void* source, Site site) {
    if (race_check) {
      check_write<16>(address, false, site);
      shadow.start_copy(address, access(), site.line);
    }
    Copies& mine = copies();
    mine.copies.push_back({address, source, mine.group, false, site});
    if (random() % 2 == 0) complete(mine.copies.back());
  }
  void wait_for_copies(int pending) {
    Copies& mine = copies();
    for (; mine.begin < mine.copies.size(); ++mine.begin) {
      Copy& copy = mine.copies[mine.begin];
      if (copy.group >= mine.group - pending) return;
      complete(copy);
      if (race_check) shadow.write<16>(copy.address, access(), false, copy.site.line);
    }
    mine.copies.clear();
    mine.begin = 0;
  }

  // Ends the launch with an error: the fibers are never switched to again.
  template <class... Values>
  [[noreturn]] __attribute__((noinline, cold)) void fail(int thread, Site site, const char* format,
                                                         Values... values) {
    const int size = std::snprintf(error_, sizeof(error_),
                                   "%s:%d: block %lld, thread %d: ", base_name(site.file),
                                   site.line, (long long)block, thread);
    append(size, format, values...);
    leave();
  }
  // What the kernel does wrong, until the next launch; or null.
  const char* run(int64_t blocks, int threads, int shared_bytes, const Call& call);

 private:
  template <int kSize>
  void check_write(uint32_t address, bool atomic, Site site) {
    Access by;
    int line;
    const char* race = shadow.write_race<kSize>(address, access(), atomic, &by, &line);
    if (race != nullptr) fail_race(race, address, thread(), by, line, site);
  }
  void append(int size, const char* format, ...) {
    va_list values;
    va_start(values, format);
    std::vsnprintf(error_ + size, sizeof(error_) - size, format, values);
    va_end(values);
  }
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
  void wait_for_warps(void* const* operands);
  void release_if_complete(Barrier& barrier);
  void yield();
  static void run_fiber();
  [[noreturn]] void end_fiber();
  [[noreturn]] void fail_deadlock();
  void run_block(int warps);

  Warp warps_[kMaxWarps];
  Copies copies_[kMaxWarps * 32];
  Barrier barriers_[16];
  uint32_t ready_ = 0, alive_ = 0;  // a bit for each warp
  int until_yield_ = 1;
  uint64_t random_ = 1;
  int generation_ = -1;  // of the settings whose seed `random_` comes from
  Stacks stacks_;
  std::vector<char> memory_;
  Context host_;
  const Call* call_ = nullptr;
  char error_[4096] = "";
};

// Of this thread; found without a call (there is room for a few such variables).
__attribute__((
    tls_model("initial-exec"))) FUSED_ATTN_OF_MODULE inline thread_local Machine* machine = nullptr;

}  // namespace fused_attn::emulator
