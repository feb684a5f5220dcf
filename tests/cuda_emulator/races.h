// Race detection in shared memory: records the last write and the last reads of each byte, and
// checks that a barrier separates conflicting accesses.
//
// Each meeting (warp-collective operation) gets a new number, and an access is stamped with the
// number of its warp's last meeting. An access happens before everything that its warp does after
// the warp's next meeting, and before everything that other warps do after the warp's next
// sync_block. Accesses of a warp after its last sync_block do not happen before any access of
// another warp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fused_attn::emulator {

constexpr int kMaxWarps = 32;

struct Access {
  int32_t warp, lane;  // lane: Shadow::kSeveral if more than one lane
};

// Shadow memory: the recorded accesses to the shared memory of a block. A stamp is the number of a
// meeting times kLanes, plus the lane.
class Shadow {
 public:
  static constexpr int kLanes = 64, kSeveral = 32;
  static constexpr int32_t kUnderWay = INT32_MAX;  // stamp of bytes that a pending copy writes
  static constexpr int32_t kMeetings = INT32_MAX / kLanes - 4096;  // keeps stamps within int32

  // Starts a new block with `size` bytes of shared memory. All earlier accesses happened before it.
  void start(int size, int warps) {
    size_ = size;
    warps_ = warps;
    if (meetings_ > kMeetings / 2) forget();
    if (written_.size() < static_cast<size_t>(size)) {
      written_.resize(size);
      writers_.resize(size);
    }
    const size_t reads = size_t(size) * warps;
    if (read_.size() < reads) {
      read_.resize(reads);
      readers_.resize(reads);
    }
    everyone_ = meetings_++;
    std::fill_n(past_, kMaxWarps, everyone_);
    std::fill_n(now_, kMaxWarps, meetings_);
  }
  // Clears all recorded accesses.
  void forget() {
    meetings_ = 0;
    std::fill(written_.begin(), written_.end(), 0);
    std::fill(read_.begin(), read_.end(), 0);
  }

  // Returns true if the numbers of meetings are about to overflow.
  bool full() const { return meetings_ > kMeetings; }
  // Records a meeting of a warp.
  void meet(int warp) { now_[warp] = ++meetings_; }
  // Records a sync_block of the warps in the bit mask `warps`: all that have not ended.
  void sync_block(uint32_t warps) {
    const int32_t before = meetings_++;
    everyone_ = before;
    for (int warp = 0; warp < warps_; ++warp) {
      if (warps >> warp & 1) {
        past_[warp] = before;
        now_[warp] = meetings_;
      }
      everyone_ = std::min(everyone_, past_[warp]);
    }
  }

  // Return a description of the race between an access of kSize bytes and an earlier access, or
  // null if there is none. by, line: receive the thread and the source line of the earlier access.
  template <int kSize>
  const char* write_race(uint32_t address, Access me, Access* by, int* line) const {
    const int32_t limit = everyone_ * kLanes + kLanes - 1;
    if (any_above<kSize>(&written_[address], limit)) {
      const char* race = find_writer<kSize>(address, me, by, line);
      if (race != nullptr) return race;
    }
    for (int warp = 0; warp < warps_; ++warp) {
      const int32_t* read = &read_[size_t(warp) * size_ + address];
      if (!any_above<kSize>(read, limit)) continue;
      for (int i = 0; i < kSize; ++i) {
        if (in_past(read[i], warp, me)) continue;
        *by = {warp, read[i] % kLanes};
        *line = readers_[size_t(warp) * size_ + address + i];
        return "overwrites what was read without a barrier in between";
      }
    }
    return nullptr;
  }
  template <int kSize>
  const char* read_race(uint32_t address, Access me, Access* by, int* line) const {
    const int32_t limit = everyone_ * kLanes + kLanes - 1;
    if (!any_above<kSize>(&written_[address], limit)) return nullptr;
    return find_writer<kSize>(address, me, by, line);
  }

  // Record an access of kSize bytes, or the start of a copy.
  template <int kSize>
  void write(uint32_t address, Access me, int line) {
    fill<kSize>(&written_[address], stamp(me));
    fill<kSize>(&writers_[address], line * kMaxWarps + me.warp);
  }
  template <int kSize>
  void read(uint32_t address, Access me, int line) {
    fill<kSize>(&readers_[size_t(me.warp) * size_ + address], line);
    const int32_t mine = stamp(me), now = mine / kLanes * kLanes, several = now + kSeveral;
    int32_t* read = &read_[size_t(me.warp) * size_ + address];
    if (me.lane != kSeveral && any_above<kSize>(read, now - 1)) {
      for (int i = 0; i < kSize; ++i) {
        read[i] = read[i] >= now && read[i] != mine ? several : mine;
      }
    } else {
      fill<kSize>(read, mine);
    }
  }
  void start_copy(uint32_t address, Access me, int line) {
    fill<16>(&written_[address], kUnderWay);
    fill<16>(&writers_[address], line * kMaxWarps + me.warp);
  }

 private:
  int32_t stamp(Access access) const { return now_[access.warp] * kLanes + access.lane; }
  // Returns true if the access with `stamp` by a warp happened before the current access of `me`.
  bool in_past(int32_t stamp, int warp, Access me) const {
    if (warp != me.warp) return stamp / kLanes <= past_[warp];
    return stamp / kLanes < now_[warp] || stamp % kLanes == me.lane;
  }
  typedef int32_t Stamps __attribute__((vector_size(16), aligned(4), may_alias));
  template <int kSize>
  static bool any_above(const int32_t* stamps, int32_t limit) {
    if constexpr (kSize < 4) return stamps[0] > limit || stamps[kSize - 1] > limit;
    Stamps above = {};
#pragma GCC unroll 4
    for (int i = 0; i < kSize; i += 4) above |= *(const Stamps*)(stamps + i) > limit;
    const auto halves = (long long __attribute__((vector_size(16))))above;
    return (halves[0] | halves[1]) != 0;
  }
  template <int kSize>
  static void fill(int32_t* stamps, int32_t value) {
    if constexpr (kSize < 4) {
      std::fill_n(stamps, kSize, value);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < kSize; i += 4) *(Stamps*)(stamps + i) = value - Stamps{};
    }
  }
  template <int kSize>
  const char* find_writer(uint32_t address, Access me, Access* by, int* line) const {
    for (int i = 0; i < kSize; ++i) {
      const int32_t stamp = written_[address + i];
      const int warp = writers_[address + i] % kMaxWarps;
      *by = {warp, stamp % kLanes};
      *line = writers_[address + i] / kMaxWarps;
      if (stamp == kUnderWay) {
        by->lane = kSeveral;
        return "touches what a copy that was not waited for writes";
      }
      if (in_past(stamp, warp, me)) continue;
      return "touches what was written without a barrier in between";
    }
    return nullptr;
  }

  int size_ = 0, warps_ = 0;
  int32_t meetings_ = 0;
  // Per warp: number of its last meeting; number up to which accesses happened before later ones
  // by other warps. everyone_: minimum of past_ over the warps of the block.
  int32_t now_[kMaxWarps], past_[kMaxWarps], everyone_ = 0;
  // Per byte: stamp of the last write; its line and warp; stamp and line of the last read by each
  // warp.
  std::vector<int32_t> written_, writers_, read_, readers_;
};

}  // namespace fused_attn::emulator
