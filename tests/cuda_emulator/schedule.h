// Execution of a launch: blocks run one after another, and warps interleave in a random order. Any
// error ends the launch early.
#pragma once

#include <algorithm>
#include <memory>

#include "machine.h"

namespace fused_attn::emulator {

inline const char* name_of(Meeting meeting) {
  constexpr const char* kNames[] = {"a barrier", "sync_warp",     "a shuffle",
                                    "a ballot",  "load_matrices", "an mma"};
  return kNames[static_cast<int>(meeting)];
}

inline void Machine::check_together(Meeting meeting, Site site) {
  if (warp->ended != 0) {
    fail(thread(), site, "comes to %s, but thread %d of the same warp has ended", name_of(meeting),
         warp->id * 32 + (warp->lane + 31) % 32);
  }
  const Site other = warp->site;
  if (warp->meeting == meeting && other.line == site.line && !std::strcmp(other.file, site.file)) {
    return;
  }
  fail(thread(), site, "comes to %s, but others of the same warp are at %s, %s:%d",
       name_of(meeting), name_of(warp->meeting), base_name(other.file), other.line);
}

inline void Machine::fail_race(const char* race, uint32_t address, int thread, Access by, int line,
                               Site site) {
  char whom[64] = "";
  if (by.lane < 32) {
    std::snprintf(whom, sizeof(whom), "thread %d", by.warp * 32 + by.lane);
  } else {
    std::snprintf(whom, sizeof(whom), "warp %d", by.warp);
  }
  fail(thread, site, "race: %s (shared address %u; the other: %s, line %d)", race, address, whom,
       line);
}

inline void Machine::wait_for_warps(void* const* operands) {
  const BarrierOperand mine = *static_cast<const BarrierOperand*>(operands[0]);
  for (int lane = 1; lane < 32; ++lane) {
    const BarrierOperand& other = *static_cast<const BarrierOperand*>(operands[lane]);
    if (other.id != mine.id || other.threads != mine.threads) {
      fail(thread(), warp->site, "the lanes of a warp are at different barriers");
    }
  }
  Barrier& barrier = barriers_[mine.id];
  if (barrier.waiting != 0 && barrier.threads != mine.threads) {
    fail(thread(), warp->site, "%d threads wait at barrier %d, but others for %d", mine.threads,
         mine.id, barrier.threads);
  }
  barrier.threads = mine.threads;
  barrier.waiting |= 1u << warp->id;
  ready_ &= ~barrier.waiting;
  release_if_complete(barrier);
  yield();
}

inline void Machine::release_if_complete(Barrier& barrier) {
  const int waiting = __builtin_popcount(barrier.waiting) * 32;
  const int threads = barrier.threads != 0 ? barrier.threads : __builtin_popcount(alive_) * 32;
  if (waiting == 0 || waiting < threads) return;
  shadow.join(barrier.waiting);
  ready_ |= barrier.waiting;
  barrier.waiting = 0;
}

// Switches to a randomly chosen warp that can run, which may be the current one.
inline void Machine::yield() {
  if (race_check && shadow.full()) fail(thread(), warp->site, "too many meetings in one block");
  if (ready_ == 0) {
    if (alive_ == 0) leave();
    fail_deadlock();
  }
  uint32_t candidates = ready_;
  for (int i = random() % __builtin_popcount(ready_); i > 0; --i) candidates &= candidates - 1;
  Warp& from = *warp;
  warp = &warps_[__builtin_ctz(candidates)];
  if (warp != &from) switch_context(from.contexts[from.lane], warp->contexts[warp->lane]);
}

inline void Machine::fail_deadlock() {
  char where[3072] = "";  // not a std::string: destructors do not run in an abandoned fiber
  int size = 0;
  for (int id = 0; id < 16; ++id) {
    for (int w = 0; w < kMaxWarps; ++w) {
      if (!(barriers_[id].waiting >> w & 1)) continue;
      const Site site = warps_[w].site;
      size += std::snprintf(where + size, sizeof(where) - size, "; warp %d at barrier %d, %s:%d", w,
                            id, base_name(site.file), site.line);
      size = std::min<int>(size, sizeof(where) - 1);
    }
  }
  for (warp = warps_; !(alive_ >> warp->id & 1);) ++warp;
  fail(thread(), warp->site, "deadlock: no warp can go on%s", where);
}

inline void Machine::run_fiber() {
  machine->call_->run(machine->call_->kernel, machine->call_->arguments);
  machine->end_fiber();
}

inline void Machine::end_fiber() {
  if (warp->arrived != 0) {
    fail(thread(), warp->site, "ends, but others of the same warp are at %s",
         name_of(warp->meeting));
  }
  wait_for_copies(0);
  if (++warp->ended < 32) {
    Context& mine = warp->contexts[warp->lane];
    warp->lane = (warp->lane + 1) % 32;
    switch_context(mine, warp->contexts[warp->lane]);
    __builtin_unreachable();
  }
  ready_ &= ~(1u << warp->id);
  alive_ &= ~(1u << warp->id);
  if (barriers_[0].waiting != 0) release_if_complete(barriers_[0]);
  yield();
  __builtin_unreachable();
}

inline void Machine::run_block(int warps) {
  std::memset(shared, 0xff, shared_size);  // NaN in every floating-point type
  std::memset(barriers_, 0, sizeof(barriers_));
  shadow.start(shared_size, warps);
  for (int id = 0; id < warps; ++id) {
    Warp& w = warps_[id];
    w.id = id;
    w.arrived = w.ended = 0;
    w.lane = random() % 32;
    for (int lane = 0; lane < 32; ++lane) {
      stacks_.start(w.contexts[lane], id * 32 + lane, run_fiber);
      copies_[id * 32 + lane].copies.clear();
      copies_[id * 32 + lane].begin = copies_[id * 32 + lane].group = 0;
    }
  }
  ready_ = alive_ = warps == kMaxWarps ? ~0u : (1u << warps) - 1;
  until_yield_ = 1 + random() % 64;
  warp = &warps_[random() % warps];
  switch_context(host_, warp->contexts[warp->lane]);
}

inline const char* Machine::run(int64_t blocks, int threads, int shared_bytes, const Call& call) {
  if (generation_ != settings.generation) {
    generation_ = settings.generation;
    random_ = settings.seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
    if (random_ == 0) random_ = 1;
  }
  memory_.resize(shared_bytes + 128);
  shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_.data()) + 127) / 128 * 128);
  shared_size = shared_bytes;
  race_check = settings.race_check;
  num_blocks = blocks;
  call_ = &call;
  error_[0] = '\0';
  // Kernels must not depend on the order of blocks, so the first block and the direction are
  // random.
  const int64_t first = random() % blocks, direction = random() % 2 == 0 ? 1 : blocks - 1;
  for (int64_t i = 0; i < blocks; ++i) {
    block = (first + i * direction) % blocks;
    run_block(threads / 32);
    if (error_[0] != '\0') {
      shadow.forget();  // pending copies have left kUnderWay stamps
      return error_;
    }
  }
  return nullptr;
}

// Returns the machine of the host thread, which is created on first use.
FUSED_ATTN_OF_MODULE inline Machine& machine_of_thread() {
  static thread_local std::unique_ptr<Machine> mine;
  if (mine == nullptr) mine = std::make_unique<Machine>();
  machine = mine.get();
  return *mine;
}

}  // namespace fused_attn::emulator
