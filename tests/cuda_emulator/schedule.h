// Execution of a launch: blocks run one after another, and warps interleave in a random order. Any
// error ends the launch early.
#pragma once

#include <memory>

#include "machine.h"

namespace fused_attn::emulator {

inline const char* name_of(Meeting meeting) {
  constexpr const char* kNames[] = {"sync_block", "sync_warp",     "a shuffle",
                                    "a ballot",   "load_matrices", "an mma"};
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

inline void Machine::wait_for_warps() {
  waiting_ |= 1u << warp->id;
  ready_ &= ~waiting_;
  release_if_complete();
  yield();
}

// Completes sync_block if all warps that have not ended wait for it.
inline void Machine::release_if_complete() {
  if (waiting_ == 0 || waiting_ != alive_) return;
  shadow.sync_block(waiting_);
  ready_ = waiting_;
  waiting_ = 0;
}

// Switches to a randomly chosen warp that can run, which may be the current one.
inline void Machine::yield() {
  if (race_check && shadow.full()) fail(thread(), warp->site, "too many meetings in one block");
  if (ready_ == 0) leave();  // all warps have ended: they cannot all wait at sync_block
  uint32_t candidates = ready_;
  for (int i = random() % __builtin_popcount(ready_); i > 0; --i) candidates &= candidates - 1;
  Warp& from = *warp;
  warp = &warps_[__builtin_ctz(candidates)];
  if (warp != &from) switch_context(from.contexts[from.lane], warp->contexts[warp->lane]);
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
  release_if_complete();
  yield();
  __builtin_unreachable();
}

inline void Machine::run_block(int warps) {
  std::memset(shared, 0xff, shared_size);  // NaN in every floating-point type
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
  waiting_ = 0;
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
