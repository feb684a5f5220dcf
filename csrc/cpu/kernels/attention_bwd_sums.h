// Work queues of the AMX backward: pending matmuls for dQ of a query tile, accumulated over KV
// blocks, and for dK^T and dV^T of a KV block, accumulated over query tiles. An entry is a quad
// (TileQuad). Each pipeline step computes a few entries.
#pragma once

#include "cpu/kernels/attention_bwd_query_tiles.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

// Work queues of one thread, and the packed P and dS that the queued matmuls read.
template <class F>
class BwdSums {
  static constexpr int64_t kStep = F::kParts * kTileNumbers;
  static constexpr int64_t kKeyTiles = kGradientKeys / 16;

 public:
  static constexpr int64_t kGroup = 8;                        // query tiles per group
  static constexpr int64_t kBlocks = F::kParts == 1 ? 4 : 2;  // KV blocks per epoch

  // Consecutive query tiles of a group to which the same KV block is visible.
  struct Run {
    const BwdBlock* block;
    const BwdQueryTile* first;
    int64_t at, count;  // index of `first` in the group; number of query tiles
  };

  // Query tiles whose P and dS are stored until their dK^T and dV^T are computed.
  struct Group {
    int64_t num_runs;
    Run runs[kBlocks * kGroup];
    Run* last[kBlocks];                   // latest run of each block
    uint16_t *weight_pairs, *grad_pairs;  // P, dS: right tiles (kBlocks, kGroup, 2, parts)
  };

  // State of a score tile in the software pipeline.
  struct Job {
    BwdQueryTile* query_tile;
    const BwdBlock* block;
    Group* group;
    uint16_t* grad_rows;  // dS of the query tile: left tiles (kBlocks, parts, 2)
    int64_t at;           // index of the query tile in the group
    int64_t run;          // length of the run of adjacent blocks that ends here
    bool partial;         // a mask or bias must be applied
    bool ends_run, ends_query_tile, ends_group;
    float *scores, *grads;
  };

  BwdSums(int64_t steps, int64_t steps_v)
      : steps_(steps), steps_v_(steps_v), size_(2 * steps * kStep) {
    share_ = div_up(kBlocks * (steps_ + steps_v_) + kGroup * steps_, kGroup * kBlocks);
  }

  void place(Arena* arena) {
    for (int i = 0; i < 2; ++i) {
      weight_pairs_[i] = arena->template take<uint16_t>(kBlocks * kGroup * kKeyTiles * kStep);
      grad_pairs_[i] = arena->template take<uint16_t>(kBlocks * kGroup * kKeyTiles * kStep);
    }
    // Upper bounds. Runs of a block are separated by at least one query tile, so a block has at
    // most kGroup / 2 runs per group.
    const int64_t of_queries = kBlocks * steps_,
                  of_keys = kBlocks * kGroup / 2 * (steps_ + steps_v_);
    query_sums_ = {arena->template take<TileQuad>(of_queries), 0, 0};
    key_sums_ = {arena->template take<TileQuad>(of_keys), 0, 0};
    due = arena->template take<TileQuad>(of_queries + of_keys);
  }

  Group* begin_group() {
    ++opened_;
    Group& group = groups_[opened_ % 4];
    group.num_runs = 0;
    for (Run*& run : group.last) run = nullptr;
    group.weight_pairs = weight_pairs_[opened_ % 2];
    group.grad_pairs = grad_pairs_[opened_ % 2];
    return &group;
  }

  static void add_to_run(const Job& job) {
    Group& group = *job.group;
    Run*& run = group.last[job.block->at];
    if (run == nullptr || run->at + run->count != job.at) {
      run = &group.runs[group.num_runs++];
      *run = {job.block, job.query_tile, job.at, 0};
    }
    ++run->count;
  }

  static int64_t pairs_at(int64_t block, int64_t query_tile) {
    return (block * kGroup + query_tile) * kKeyTiles * kStep;
  }
  static uint16_t* rows_of(const Job& job) { return job.grad_rows + job.block->at * 2 * kStep; }

  // Queues the dQ matmuls of the run of blocks that ends with this job.
  void add_query_sums(const Job& job) {
    const int64_t before = job.run - 1;
    for (int64_t c = 0; c < 2 * steps_; c += 2) {
      TileQuad& quad = add_to(&query_sums_);
      quad.left = rows_of(job) - before * 2 * kStep;
      quad.right = job.block->keys.value - before * size_ + c * kStep;
      quad.steps = job.run;
      quad.left_step = 2 * kStep;
      quad.right_column = kStep;
      quad.right_step = size_;
      set_out(job.query_tile->grad_query + c * kPairSums, &quad);
    }
  }

  // Queues the dK^T and dV^T matmuls of all runs of a group.
  void add_key_sums(const Group& group) {
    for (int64_t r = 0; r < group.num_runs; ++r) {
      const Run& run = group.runs[r];
      const int64_t pairs = pairs_at(run.block->at, run.at);
      add_block_sums(run, run.first->grad_out_columns, group.weight_pairs + pairs, steps_v_,
                     run.block->grad_value);
      add_block_sums(run, run.first->query_columns, group.grad_pairs + pairs, steps_,
                     run.block->grad_key);
    }
  }

  // Moves the quads of this step from the queues to `due`: an even share of the work of a group, or
  // an entire queue if the next step may overwrite its operands.
  //
  // current: the job whose P and dS this step computes; null while draining.
  void take_due(const Job* current) {
    num_due = 0;
    const bool none = current == nullptr;
    take(&query_sums_, none || current->ends_query_tile ? query_sums_.left() : share_);
    take(&key_sums_, none || current->ends_group ? key_sums_.left() : share_ - num_due);
  }

  bool waiting() const { return query_sums_.left() + key_sums_.left() > 0; }

  TileQuad* due;  // quads to compute in this step
  int64_t num_due = 0;

 private:
  // A queue of quads. Those in [next, count) are pending.
  struct Queue {
    TileQuad* quads;
    int64_t count, next;
    int64_t left() const { return count - next; }
  };

  void add_block_sums(const Run& run, const uint16_t* columns, const uint16_t* pairs, int64_t steps,
                      float* out) {
    for (int64_t f = 0; f < 2 * steps; f += 2) {
      TileQuad& quad = add_to(&key_sums_);
      quad.left = columns + f * kStep;
      quad.right = pairs;
      quad.steps = run.count;
      quad.left_step = 2 * steps * kStep;
      quad.right_column = kStep;
      quad.right_step = kKeyTiles * kStep;
      set_out(out + f * kKeyTiles * kTileSums, &quad);
    }
  }

  static TileQuad& add_to(Queue* queue) {
    if (queue->left() == 0) queue->count = queue->next = 0;
    return queue->quads[queue->count++];
  }

  void take(Queue* queue, int64_t count) {
    for (; count > 0 && queue->left() > 0; --count) due[num_due++] = queue->quads[queue->next++];
  }

  const int64_t steps_, steps_v_, size_;  // size_: elements of the packed K of a block
  int64_t share_;
  Group groups_[4];
  int64_t opened_ = 0;  // number of groups begun
  Queue query_sums_, key_sums_;
  uint16_t *weight_pairs_[2], *grad_pairs_[2];
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
