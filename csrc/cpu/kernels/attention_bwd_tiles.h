// Attention backward with AMX; attention_bwd.h defines the symbols.
//
// A tile is 32 queries (rows) x 32 keys. S is recomputed bit for bit as in the forward. An epoch
// processes the query tiles of a chunk, in groups of kGroup, against kBlocks packed KV blocks. dQ
// accumulates over adjacent blocks of a query tile; dK^T and dV^T accumulate over adjacent query
// tiles of a group. Accumulators stay in registers for several MMAs, because a cache line stored
// outside L1 costs 3.7 cycles, a quarter of an MMA.
//
// Software pipeline: a step is one call of advance(). In this example, query tiles A to D have two
// blocks each; A and B form one group, C and D the next. "queue" shows when the quads of a gradient
// are queued. Each step computes a fixed share of the queues. * marks a step that empties a queue.
//
//   step                    0    1    2    3    4    5    6    7    8
//   AMX: S and dP of        A0   A1   B0   B1   C0   C1   D0   D1   ..
//   vector: P and dS of     -    A0   A1   B0   B1   C0   C1   D0   D1
//   queue (start): dQ of    -    -    -    A    -    B    -    C    -
//   AMX: dQ of              -    -    -    A    A*   B    B*   C    C*
//   queue (end): dK, dV     -    -    -    -    AB   -    -    -    CD
//   AMX: dK, dV of          -    -    -    -    -    AB   AB   AB   AB*
//
// Invariants:
// - added_ counts tiles. Adding tile i runs step i-1: it computes S and dP of pending_job_ (tile
//   i-1) and P and dS of scored_, and queues dQ if weighted_ ends a run. So four jobs are live, and
//   score_tiles_ and grad_tiles_ are double-buffered by the parity of i.
// - pending_job_ is issued by the next add_tile() or drain(), which first sets its ends_* flags.
// - last_block_ is the previous block of the current query tile in this epoch, or -1. A run is a
//   maximal sequence of adjacent visible blocks. Its dQ is queued when its final tile is weighted_.
// - group_open_ is true if the current group has a tile. dK and dV are queued at the end of the
//   step in which scored_ ends the group.
// - tile_count_ counts (epoch, query tile) pairs; its parity selects grad_rows_. The step in which
//   scored_ ends a query tile empties the dQ queue, because the next query tile overwrites its
//   operands. weight_pairs and grad_pairs are double-buffered by group. The step in which scored_
//   ends a group therefore empties the queue of dK and dV.
// - epoch_ counts epochs with a visible tile; its parity selects blocks_. dQ reads the blocks last,
//   up to kBlocks steps after P and dS of the last tile of the epoch. After an epoch with fewer
//   than kBlocks + 4 tiles, the pipeline drains before the next epoch packs its blocks.
//   epoch_tiles_ is the value of added_ at the start of the latest epoch.
// - Tile registers 0 to 3 hold the accumulators of the last quad of a step. They are flushed before
//   add_nonfinite() modifies dQ, by drain(), and if no gradient was due: the quad is then dP, which
//   the next step reads.
// - drain() runs at the end of each chunk, before the next chunk overwrites the packed queries. dQ
//   is read after the last chunk of a query head, dK and dV after the last query head.
#pragma once

#include "cpu/kernels/attention_bwd_sums.h"
#include "cpu/kernels/bias_rows.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

template <class T>
class AttentionBwdTiles : BwdQueryTiles<T> {
  using Base = BwdQueryTiles<T>;
  using Base::arena_;
  using Base::bwd_;
  using Base::kKeyTiles;
  using Base::kStep;
  using Base::p_;
  using Base::scores_;
  using Base::steps_;
  using Base::steps_v_;
  using typename Base::F;
  using typename Base::Pack;
  using Gradients = TileGradients<T>;
  using Sums = BwdSums<F>;
  using Job = typename Sums::Job;

  static constexpr int64_t kMinTasks = 8;  // target of split-KV; each split needs a float dQ
  // Bytes of packed queries per chunk. A chunk stays in L2 during the loop over all KV blocks.
  static constexpr int64_t kChunkBytes = F::kParts * (int64_t{384} << 10);
  static constexpr int64_t kGroup = Sums::kGroup, kBlocks = Sums::kBlocks;

 public:
  // Returns true if run() also computes the bias gradient. Otherwise attention_bwd_bias.h computes
  // it in a separate pass: if the bias is broadcast over queries or keys, or if BiasRows requires
  // all keys of a row but split-KV would divide them.
  static bool supports_bias(const AttentionBwdParams& bwd) { return Work(bwd).bias; }

  // Returns true if run() does not support the call: weight gradients are unbounded, so in formats
  // with a short exponent range no scale prevents overflow of dS.
  static bool unsupported(const AttentionBwdParams& bwd) {
    return F::kShortRange && bwd.grad_weights != nullptr;
  }

  static bool run(const AttentionBwdParams& bwd) {
    const AttentionParams& p = bwd.fwd;
    MaskView<float> mask;
    if (!mask.init(p, kGradientKeys)) return false;
    const Work work(bwd);
    Arena parts;  // (batch, num_heads, splits, part): dQ of each split
    const int64_t count = work.splits > 1 ? p.batch * p.num_heads * work.splits * work.part : 0;
    float* grad_query;
    if (!parts.layout([&] { grad_query = parts.template take<float>(count); })) return false;
    const Tasks kind = tasks_of(2 * operand_bytes<T>(p), p.batch * p.num_heads_kv);
    return run_team(p.num_threads, work.tasks, [&] {
      AttentionBwdTiles self(bwd, mask, work, grad_query);
      const bool ok = self.allocate();
      share_tasks(work.tasks, kind, [&](int64_t task) {
        if (ok) self.task(task / work.splits, task % work.splits);
      });
      if (work.splits > 1) {
#pragma omp barrier
#pragma omp for schedule(static) nowait
        for (int64_t head = 0; head < p.batch * p.num_heads; ++head) {
          if (ok) self.add_parts(head);
        }
      }
      return ok;
    });
  }

 private:
  // Partition of the work into tasks. It depends on the shape alone, not on the number of threads.
  //
  // A unit is the set of heads that accumulate into the same dK, dV or bias gradient: one key/value
  // head with its query heads, or all heads that share a bias. With few units, the keys are split
  // as well (split-KV). Each split has a separate dQ, and these are added in a fixed order.
  struct Work {
    explicit Work(const AttentionBwdParams& bwd) {
      const AttentionParams& p = bwd.fwd;
      const int64_t* const strides = p.mask.bias.strides;
      bias = bwd.grad_bias != nullptr && strides[2] != 0 && strides[3] != 0;
      batches = bias && strides[0] == 0 ? p.batch : 1;
      heads = bias && strides[1] == 0 ? p.num_heads_kv : 1;
      int64_t units = p.batch * p.num_heads_kv / max64(batches * heads, 1);
      if (BiasRows<T>::kWholeRows && bias && units < kMinTasks) {
        bias = false;
        batches = heads = 1;
        units = p.batch * p.num_heads_kv;
      }
      const int64_t blocks = div_up(p.seqlen_k, kGradientKeys);
      if (units > 0 && units < kMinTasks) splits = max64(1, min64(blocks, kMinTasks / units));
      split_keys = div_up(blocks, splits) * kGradientKeys;
      tasks = units * splits;
      part = round_up(p.seqlen_q, kTileQueries) * round_up(p.head_dim, kTileSteps);
    }
    bool bias;
    int64_t batches, heads;  // per unit
    int64_t splits = 1, split_keys, tasks;
    int64_t part;  // elements of one dQ buffer
  };

  AttentionBwdTiles(const AttentionBwdParams& bwd, const MaskView<float>& mask, const Work& work,
                    float* parts)
      : Base(bwd),
        mask_(mask),
        work_(work),
        parts_(parts),
        bias_(bwd),
        dropout_(bwd.fwd),
        sums_(steps_, steps_v_) {
    const int64_t query_tiles = div_up(p_.seqlen_q, kTileQueries);
    chunk_ = max64(1, min64(query_tiles,
                            max64(kChunkBytes / Base::query_tile_bytes(steps_, steps_v_), kGroup)));
    plain_ = p_.dropout_p == 0 && p_.softcap == 0 && bwd_.grad_lse == nullptr && !work.bias;
  }

  void place() {
    Base::place(chunk_);
    const int64_t blocks = work_.split_keys / kGradientKeys, wide = steps_ * kTileSteps,
                  wide_v = steps_v_ * kTileSteps;
    for (auto& packed : blocks_) {
      const int64_t size = Pack::size(kGradientKeys, steps_);
      const int64_t size_v = Pack::size(kGradientKeys, steps_v_);
      uint16_t* const key = arena_.template take<uint16_t>(kBlocks * size);
      uint16_t* const pairs = arena_.template take<uint16_t>(kBlocks * size);
      uint16_t* const value = arena_.template take<uint16_t>(kBlocks * size_v);
      for (int64_t m = 0; m < kBlocks; ++m) {
        packed[m].keys.key = key + m * size;
        packed[m].keys.value = pairs + m * size;
        packed[m].features = value + m * size_v;
        packed[m].at = m;
      }
    }
    for (int i = 0; i < 2; ++i) {
      score_tiles_[i] = arena_.template take<float>(2 * kKeyTiles * kTileSums);
      grad_tiles_[i] = arena_.template take<float>(2 * kKeyTiles * kTileSums);
      grad_rows_[i] = arena_.template take<uint16_t>(kBlocks * 2 * kStep);
    }
    cap_slope_ = arena_.template take<float>(p_.softcap > 0 ? 2 * kKeyTiles * kTileSums : 0);
    grad_key_ = arena_.template take<float>(blocks * kGradientKeys * wide);
    grad_value_ = arena_.template take<float>(blocks * kGradientKeys * wide_v);
    grad_query_ = arena_.template take<float>(work_.splits == 1 ? work_.part : 0);
    sums_.place(&arena_);
    bias_.place(&arena_, work_.bias ? chunk_ * kTileQueries : 0);
  }

  bool allocate() {
    return arena_.layout([&] { place(); });
  }

  void task(int64_t unit, int64_t split) {
    const int64_t units = p_.num_heads_kv / work_.heads;
    const int64_t b = unit / units * work_.batches, h_kv = unit % units * work_.heads;
    const int64_t begin = split * work_.split_keys, group = p_.num_heads / p_.num_heads_kv;
    if (work_.bias) {
      bias_.begin(b, h_kv * group, group, begin, min64(work_.split_keys, p_.seqlen_k - begin));
    }
    for (int64_t bb = b; bb < b + work_.batches; ++bb) {
      for (int64_t hh = h_kv; hh < h_kv + work_.heads; ++hh) keys(bb, hh, split);
    }
  }

  // Computes dK and dV of one split of a key/value head, and its share of dQ.
  void keys(int64_t b, int64_t h_kv, int64_t split) {
    const int64_t group = p_.num_heads / p_.num_heads_kv, num_keys = key_rows(p_, b).count;
    const int64_t begin = min64(split * work_.split_keys, num_keys);
    const int64_t end = min64(begin + work_.split_keys, num_keys);
    const int64_t query_tiles = div_up(query_rows(p_, b).count, kTileQueries);
    const int64_t blocks = div_up(end - begin, kGradientKeys);
    const float factor = this->grad_factor(b, h_kv);
    tile_.grad_factor = factor;
    clear(grad_key_, blocks * kGradientKeys * steps_ * kTileSteps);
    clear(grad_value_, blocks * kGradientKeys * steps_v_ * kTileSteps);
    for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
      float* const grad_query =
          work_.splits == 1 ? grad_query_
                            : parts_ + ((b * p_.num_heads + h) * work_.splits + split) * work_.part;
      clear(grad_query, query_tiles * kTileQueries * steps_ * kTileSteps);
      for (int64_t chunk = 0; chunk < query_tiles; chunk += chunk_) {
        const int64_t count = min64(chunk_, query_tiles - chunk);
        for (int64_t slot = 0; slot < count; ++slot) {
          const int64_t query_tile = chunk + slot;
          this->pack_query_tile(b, h, query_tile * kTileQueries, slot);
          this->query_tiles_[slot].grad_query =
              grad_query + query_tile * kTileQueries * steps_ * kTileSteps;
        }
        if (work_.bias) bias_.begin_rows(count * kTileQueries);
        for (int64_t j = begin; j < end; j += kBlocks * kGradientKeys) {
          meet(b, h_kv, begin, j, end, h, count);
        }
        drain();
        if (BiasRows<T>::kWholeRows && work_.bias) end_bias_rows(count);
      }
      if (F::kShortRange) {
        scale(grad_query, query_tiles * kTileQueries * steps_ * kTileSteps, 1 / factor);
      }
      if (work_.splits == 1) this->write_grad_query(b, h, grad_query);
    }
    this->write_key_rows(grad_key_, steps_, p_.head_dim, p_.scale / factor, begin, end,
                         bwd_.grad_key, bwd_.grad_key_strides, b, h_kv);
    this->write_key_rows(grad_value_, steps_v_, p_.head_dim_v,
                         dropout_scale(p_.dropout_p) / (1 << F::kWeightExponent), begin, end,
                         bwd_.grad_value, bwd_.grad_value_strides, b, h_kv);
  }

  static void scale(float* at, int64_t count, float factor) {
    for (int64_t e = 0; e < count; e += 16) store(at + e, load(at + e) * factor);
  }

  // Runs one epoch: kBlocks KV blocks, from key j on, against all query tiles of the chunk.
  void meet(int64_t b, int64_t h_kv, int64_t begin, int64_t j, int64_t end, int64_t h,
            int64_t query_tiles) {
    BwdBlock* const own = blocks_[epoch_ % 2];
    bool packed[kBlocks] = {}, any = false;
    for (int64_t first = 0; first < query_tiles; first += kGroup) {
      group_open_ = false;
      for (int64_t slot = first; slot < min64(first + kGroup, query_tiles); ++slot) {
        BwdQueryTile& query_tile = this->query_tiles_[slot];
        if (query_tile.alive == 0) continue;
        last_block_ = -1;
        for (int64_t m = 0; m < kBlocks && j + m * kGradientKeys < end; ++m) {
          const int64_t at = j + m * kGradientKeys, n = min64(kGradientKeys, end - at);
          const Tile kind = mask_.classify(b, h, query_tile.first, at, at + n);
          if (kind == Tile::kSkip) continue;
          // These buffers were last packed two epochs ago. After a short epoch, dQ still reads
          // them.
          if (!any && added_ - epoch_tiles_ < kBlocks + 4) drain();
          if (!any) epoch_tiles_ = added_;
          any = true;
          if (!packed[m]) {
            this->pack_block(b, h_kv, at, n, &own[m]);
            own[m].grad_key = grad_key_ + (at - begin) * steps_ * kTileSteps;
            own[m].grad_value = grad_value_ + (at - begin) * steps_v_ * kTileSteps;
            packed[m] = true;
          }
          add_tile(&query_tile, slot - first, &own[m], kind == Tile::kPartial);
        }
      }
    }
    if (any) ++epoch_;
  }

  // Adds the tile of `block` and query tile `at` of the group. The tile stays pending until the
  // next one determines whether it ends a run, query tile or group.
  void add_tile(BwdQueryTile* query_tile, int64_t at, const BwdBlock* block, bool partial) {
    Job& job = jobs_[added_ % 4];
    job.query_tile = query_tile;
    job.block = block;
    job.at = at;
    job.partial = partial;
    job.ends_run = job.ends_query_tile = job.ends_group = false;
    job.scores = score_tiles_[added_ % 2];
    job.grads = grad_tiles_[added_ % 2];
    const bool same_query_tile = last_block_ >= 0,
               next_block = same_query_tile && last_block_ + 1 == block->at;
    if (pending_job_ != nullptr) {
      pending_job_->ends_run = !next_block;
      pending_job_->ends_query_tile = !same_query_tile;
      pending_job_->ends_group = !group_open_;
    }
    if (!group_open_) group_ = sums_.begin_group();
    group_open_ = true;
    if (!same_query_tile) ++tile_count_;
    job.run = next_block ? pending_job_->run + 1 : 1;
    job.grad_rows = grad_rows_[tile_count_ % 2];
    job.group = group_;
    last_block_ = block->at;
    Sums::add_to_run(job);
    if (pending_job_ != nullptr) advance(pending_job_);
    pending_job_ = &job;
    ++added_;
  }

  void drain() {
    if (pending_job_ != nullptr) {
      pending_job_->ends_run = pending_job_->ends_query_tile = pending_job_->ends_group = true;
      advance(pending_job_);
    }
    pending_job_ = nullptr;
    while (scored_ != nullptr || weighted_ != nullptr || sums_.waiting()) advance(nullptr);
    pending_sums_.flush();
    group_open_ = false;
    last_block_ = -1;
  }

  // Runs one pipeline step. Not inlined: the body is large, and a tile takes thousands of cycles.
  __attribute__((noinline)) void advance(Job* next) {
    if (scored_ != nullptr) open(*scored_);
    if (next != nullptr) add_products(*next);
    if (weighted_ != nullptr && weighted_->ends_run) sums_.add_query_sums(*weighted_);
    sums_.take_due(scored_);
    if (plain_) {
      multiply<true>(next != nullptr);
    } else {
      multiply<false>(next != nullptr);
    }
    if (scored_ != nullptr && work_.bias) {
      bias_.add(tile_at(*scored_), (scored_->query_tile - this->query_tiles_) * kTileQueries,
                scored_->query_tile->count, scored_->grads, scored_->scores);
    }
    const bool nonfinite = weighted_ != nullptr && weighted_->block->keys.num_nonfinite > 0;
    if (sums_.num_due == 0 || nonfinite) pending_sums_.flush();
    if (nonfinite) add_nonfinite(*weighted_);
    if (scored_ != nullptr && scored_->ends_group) sums_.add_key_sums(*scored_->group);
    weighted_ = scored_;
    scored_ = next;
  }

  static TileAt tile_at(const Job& job) {
    return {job.query_tile->b, job.query_tile->h, job.query_tile->first, job.block->j,
            job.block->n};
  }

  void open(const Job& job) {
    const TileAt at = tile_at(job);
    if (scores_.wanted(job.partial, at.n)) {
      scores_.finish(at, job.partial, job.query_tile->count, job.scores, cap_slope_);
    }
    // Mask absent and fully masked rows, because 0 times a non-finite key would be NaN.
    for (uint32_t dead = ~job.query_tile->alive; dead != 0; dead &= dead - 1) {
      scores_.clear_row(static_cast<uint32_t>(__builtin_ctz(dead)), job.scores);
    }
    if (bwd_.grad_weights != nullptr) add_grad_weights(at, job.query_tile->count, job.grads);
    tile_.rows = &job.query_tile->rows;
    tile_.scores = job.scores;
    tile_.grads = job.grads;
    tile_.cap_slope = p_.softcap > 0 ? cap_slope_ : nullptr;
    tile_.dropout = p_.dropout_p > 0 ? &dropout_ : nullptr;
    if (p_.dropout_p > 0) dropout_.begin(p_, at);
    tile_.weight_pairs = job.group->weight_pairs + Sums::pairs_at(job.block->at, job.at);
    tile_.grad_pairs = job.group->grad_pairs + Sums::pairs_at(job.block->at, job.at);
    tile_.grad_rows = Sums::rows_of(job);
    tile_.unit = this->unit_;
    tile_.dropout_scale = static_cast<float>(dropout_scale(p_.dropout_p));
    tile_.for_bias = work_.bias;
  }

  void add_products(const Job& job) {
    product_quads<F>(job.query_tile->query, job.block->keys.key, steps_, kKeyTiles, job.scores,
                     products_);
    product_quads<F>(job.query_tile->grad_out, job.block->features, steps_v_, kKeyTiles, job.grads,
                     products_ + kKeyTiles / 2);
  }

  // Computes the quads of this step, interleaved with the vector work of tile_. With `products`,
  // these include S and dP of the next tile.
  template <bool kPlain>
  void multiply(bool products) {
    const int64_t steps = max64(steps_, steps_v_);
    if (steps == 1) return multiply_beside<kPlain, 4>(products);
    if (steps == 2) return multiply_beside<kPlain, 2>(products);
    multiply_beside<kPlain, 1>(products);
  }

  template <bool kPlain, int kUnits>
  __attribute__((noinline)) void multiply_beside(bool products) {
    constexpr int kSumUnits = kUnits == 1 ? 1 : kUnits / 2;
    using Stream = typename Gradients::template Stream<kPlain>;
    TileSchedule<F, Stream> schedule(&pending_sums_, Stream(tile_, scored_ != nullptr));
    if (products) {
      for (const TileQuad& quad : products_) schedule.template multiply<false, kUnits>(quad);
    }
    for (int64_t q = 0; q < sums_.num_due; ++q) {
      schedule.template multiply<true, kSumUnits>(sums_.due[q]);
    }
    schedule.finish();
  }

  // Accumulates the non-finite keys, which are packed as 0, into dQ of the rows that attend to
  // them.
  void add_nonfinite(const Job& job) {
    const int64_t h_kv = job.query_tile->h / (p_.num_heads / p_.num_heads_kv);
    const int64_t stride = p_.key_strides[2];
    const T* const key = at_head<T>(p_.key, p_.key_strides, key_rows(p_, job.query_tile->b), h_kv) +
                         job.block->j * stride;
    for (int s = 0; s < job.block->keys.num_nonfinite; ++s) {
      const int t = job.block->keys.nonfinite[s];
      for (uint32_t r = 0; r < kTileQueries; ++r) {
        const float grad = F::weight(Sums::rows_of(job) + r * kTileSteps + F::woven(t));
        if (grad == 0) continue;
        float* const out = job.query_tile->grad_query + r * 16;
        for (int64_t d = 0; d < p_.head_dim; ++d) {
          out[d / 16 * kPairSums + d % 16] += grad * to_acc(key[t * stride + d]);
        }
      }
    }
  }

  void add_grad_weights(const TileAt& at, int64_t rows, float* grads) {
    const int64_t* const strides = bwd_.grad_weights_strides;
    const T* const src = static_cast<const T*>(bwd_.grad_weights) + at.b * strides[0] +
                         at.h * strides[1] + at.i * strides[2] + at.j;
    const float factor = static_cast<float>(bwd_.grad_weights_factor);
    alignas(64) float row[kGradientKeys] = {};
    for (uint32_t r = 0; r < rows; ++r) {
      load_row(src + r * strides[2], at.n, row);
      for (int64_t v = 0; v < kKeyTiles; ++v) {
        float* const to = grads + r * 16 + v * kPairSums;
        store(to, load(to) + load(row + v * 16) * factor);
      }
    }
  }

  // Completes the bias gradient of the query rows of a chunk, after all keys are processed.
  void end_bias_rows(int64_t query_tiles) const {
    for (int64_t slot = 0; slot < query_tiles; ++slot) {
      const BwdQueryTile& query_tile = this->query_tiles_[slot];
      for (uint32_t alive = query_tile.alive; alive != 0; alive &= alive - 1) {
        const int64_t r = __builtin_ctz(alive);
        bias_.end_row(slot * kTileQueries + r, query_tile.b, query_tile.h, query_tile.first + r,
                      query_tile.rows.grad_lse[r]);
      }
    }
  }

  // Sums dQ of a head over the splits and writes it to grad_query.
  void add_parts(int64_t head) {
    float* const first = parts_ + head * work_.splits * work_.part;
    for (int64_t s = 1; s < work_.splits; ++s) {
      for (int64_t e = 0; e < work_.part; ++e) first[e] += first[s * work_.part + e];
    }
    this->write_grad_query(head / p_.num_heads, head % p_.num_heads, first);
  }

  const MaskView<float>& mask_;
  const Work work_;
  float* const parts_;  // (batch, num_heads, splits, part); unused without splits
  BiasRows<T> bias_;
  bool plain_;
  int64_t chunk_;
  TileDropout<kGradientKeys> dropout_;
  typename Gradients::Tile tile_{};
  BwdBlock blocks_[2][kBlocks];
  typename Sums::Group* group_ = nullptr;
  Job jobs_[4];
  int64_t epoch_ = 0, added_ = 0, tile_count_ = 0;  // see the invariants above
  int64_t epoch_tiles_ = 0;                         // added_ when the latest epoch began
  int64_t last_block_ = -1;                         // previous block of the query tile, or -1
  bool group_open_ = false;                         // the current group has a tile
  Job *pending_job_ = nullptr, *scored_ = nullptr, *weighted_ = nullptr;
  TileQuad products_[kKeyTiles];  // quads of this step: S and dP
  Sums sums_;
  PendingSums pending_sums_;
  float *score_tiles_[2], *grad_tiles_[2], *cap_slope_;
  uint16_t* grad_rows_[2];
  float *grad_key_, *grad_value_;  // (blocks, features x keys)
  float* grad_query_;              // (queries x features); unused with splits
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
