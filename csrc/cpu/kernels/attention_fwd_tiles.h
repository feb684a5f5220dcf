// Attention forward with AMX. A tile is 32 queries (rows) x 64 keys.
//
// A three-stage software pipeline runs across query tiles. Prologue and epilogue run once per chunk
// of keys, or once per task if all packed keys and values fit in kPackedBytes. A step is one call
// of advance(), which interleaves the vector work with the tile MMAs.
//
//   step                    0     1     2     3    ...   n-1    n    n+1
//   AMX: QK^T of tile       0     1     2     3    ...   n-1    -     -
//   vector: softmax of      -     0     1     2    ...   n-2   n-1    -
//   AMX: PV of tile         -     -     0     1    ...   n-3   n-2   n-1
//                          |prologue |                       | epilogue; drain() runs n-1 to n+1
//
// Invariants:
// - The call of add_tile() for tile i runs step i-1. Until then, tile i-1 is pending_job_: its
//   QK^T is not yet issued, and query_tile_keys() may still set its `last`.
// - A step computes the scores of `next`, the weights of scored_ and PV of weighted_. Each of them
//   may be null in the prologue or epilogue.
// - Four jobs are live in add_tile(): the new job, pending_job_, scored_ and weighted_. So jobs_
//   has four slots. Scores and weights are double-buffered by the parity of the tile index.
// - At most three query tiles are in flight when another begins, so kAlive slots suffice for a
//   single chunk. With more chunks, each query tile of the task occupies a slot until the final
//   chunk.
// - Packed blocks stay valid for one (head, chunk), even across tasks of the same thread. Each
//   chunk ends with drain(), so no job still reads a block when begin_chunk() invalidates it.
// - After a step, tile registers 0 to 3 hold the accumulators of its last quad, normally of PV of
//   weighted_. The next quad stores them. They are flushed earlier if their memory is accessed
//   first: the step had no PV (weighted_ is null), weighted_ ends its query tile, or a row of
//   scored_ is rescaled. Steps with non-finite values and drain() also flush.
// - `out` of a query tile is uninitialized until its first PV, which overwrites it (Job::first).
// - A rescale covers all earlier tiles of the query tile. PV of weighted_ is issued in the same
//   step, before the rescale, and the weights of scored_ already use the new shift.
// - A query tile ends in the step that issues PV of its job with `last` set. If it has no visible
//   tile in the final chunk, query_tiles() ends it, because none of its jobs is in flight.
//
// Sources: see attention_fwd.h. The order of loads and stores was tuned by measurement
// (docs/kernels-cpu.md).
#pragma once

#include "cpu/amx/tile_schedule.h"
#include "cpu/kernels/tile_softmax.h"

#if defined(__AMX_BF16__)

namespace fused_attn {
namespace {

// AMX forward kernel.
//
// kSum: also sum the unrounded weights, which lse requires.
// kDrops: apply dropout; requires kSum.
template <class T, bool kSum, bool kDrops = false>
class AttentionFwdTiles {
  using F = TileFormat<T>;
  using Pack = TilePack<T>;
  using Softmax = TileSoftmax<T, kSum>;
  // Bytes of packed keys and values per chunk. They stay in L2 (2 MiB) together with the query
  // tiles.
  static constexpr int64_t kPackedBytes = int64_t{1} << 20;
  static constexpr int64_t kScoreTiles = kTileKeys / 16;
  static constexpr int64_t kMaxQueryTiles = 64;  // per task; each task may have to repack K, V
  static constexpr int64_t kAlive = 4;           // three query tiles in flight and the new one

 public:
  static bool run(const AttentionParams& p) {
    MaskView<float> mask;
    if (!mask.init(p, kTileKeys)) return false;
    const int64_t heads = p.batch * p.num_heads_kv, group = p.num_heads / max64(p.num_heads_kv, 1);
    const int64_t query_tiles = group * div_up(p.seqlen_q, kTileQueries);
    if (heads * query_tiles == 0) return true;
    int64_t per_task = min64(query_tiles, kMaxQueryTiles);
    while (per_task > 4 && heads * div_up(query_tiles, per_task) < 4 * p.num_threads) per_task /= 2;
    const int64_t per_head = div_up(query_tiles, per_task), tasks = heads * per_head;
    const Tasks kind = is_unmasked(p) ? Tasks::kEqual : tasks_of(operand_bytes<T>(p), heads);
    return run_team(p.num_threads, tasks, [&] {
      AttentionFwdTiles self(p, mask, per_task);
      const bool ok = self.allocate();
      // Start with the last query tiles: under a causal mask they take longest.
      share_tasks(tasks, kind, [&](int64_t task) {
        const int64_t first = (per_head - 1 - task % per_head) * per_task;
        if (ok) self.query_tiles(task / per_head, first, min64(first + per_task, query_tiles));
      });
      return ok;
    });
  }

 private:
  // Returns the position of the weight of key t within a packed row of 32 weights.
  FUSED_ATTN_INLINE static int position(int t) {
    return Softmax::kByTable ? TableWeights::position(t) : F::woven(t);
  }

  // A packed query tile and its accumulators.
  struct QueryTile {
    int64_t b, h, first, count;  // queries [first, first + count) of head (b, h)
    uint16_t* query;             // left tiles (steps, parts, 2)
    float* out;                  // tiles (2 steps_v, 2): PV, unnormalized
    float* nonfinite;            // (32, wide_v): contributions of non-finite rows of V
    bool begun;                  // at least one tile was added
    bool has_nonfinite;
    QueryTileRows rows;
  };

  // State of a score tile in the software pipeline.
  struct Job {
    QueryTile* query_tile;
    const KeyBlock* block;
    float* scores;
    uint16_t* weights;
    int64_t j, n;      // keys [j, j + n)
    bool partial;      // a mask or bias must be applied
    bool first, last;  // first or last tile of its query tile
  };

  AttentionFwdTiles(const AttentionParams& p, const MaskView<float>& mask, int64_t max_query_tiles)
      : p_(p),
        mask_(mask),
        scores_(p),
        unit_(scores_.units.natural),
        steps_(tile_steps(p.head_dim)),
        steps_v_(tile_steps(p.head_dim_v)),
        wide_v_(steps_v_ * kTileSteps),
        max_query_tiles_(max_query_tiles),
        tile_{nullptr, nullptr, nullptr, unit_, &dropout_},
        dropout_(p) {
    const int64_t size = Pack::size(kTileKeys, steps_) + Pack::size(kTileKeys, steps_v_);
    const int64_t fit = max64(kPackedBytes / (size * 2), 1), all = div_up(p.seqlen_k, kTileKeys);
    blocks_of_chunk_ = max64(min64(fit, all), 1);
    slots_ = all <= fit ? min64(kAlive, max_query_tiles) : max_query_tiles;
  }

  void place() {
    query_tiles_ = arena_.template take<QueryTile>(slots_);
    free_ = arena_.template take<QueryTile*>(slots_);
    of_task_ = arena_.template take<QueryTile*>(max_query_tiles_);
    blocks_ = arena_.template take<KeyBlock>(blocks_of_chunk_);
    queries_ = arena_.template take<uint16_t>(slots_ * Pack::size(kTileQueries, steps_));
    outs_ = arena_.template take<float>(slots_ * kTileQueries * wide_v_);
    nonfinite_sums_ = arena_.template take<float>(slots_ * kTileQueries * wide_v_);
    keys_ = arena_.template take<uint16_t>(blocks_of_chunk_ * Pack::size(kTileKeys, steps_));
    values_ = arena_.template take<uint16_t>(blocks_of_chunk_ * Pack::size(kTileKeys, steps_v_));
    for (int i = 0; i < 2; ++i) {
      score_tiles_[i] = arena_.template take<float>(2 * kScoreTiles * kTileSums);
      weights_[i] = arena_.template take<uint16_t>(4 * F::kParts * kTileNumbers);
    }
    rows_ = arena_.template take<float>(kTileQueries * wide_v_);
    sums_ = arena_.template take<TileQuad>(steps_v_);
  }

  bool allocate() {
    if (!arena_.layout([&] { place(); })) return false;
    for (num_free_ = 0; num_free_ < slots_; ++num_free_) {
      QueryTile& query_tile = query_tiles_[num_free_];
      query_tile.query = queries_ + num_free_ * Pack::size(kTileQueries, steps_);
      query_tile.out = outs_ + num_free_ * kTileQueries * wide_v_;
      query_tile.nonfinite = nonfinite_sums_ + num_free_ * kTileQueries * wide_v_;
      free_[num_free_] = &query_tile;
    }
    return true;
  }

  // Computes query tiles [begin, end) of a key/value head. They are numbered consecutively across
  // the query heads that share it.
  void query_tiles(int64_t head, int64_t begin, int64_t end) {
    const int64_t b = head / p_.num_heads_kv, h_kv = head % p_.num_heads_kv;
    const int64_t group = p_.num_heads / p_.num_heads_kv;
    const int64_t of_head = div_up(p_.seqlen_q, kTileQueries);
    const int64_t num_keys = key_rows(p_, b).count;
    for (int64_t chunk = 0; chunk == 0 || chunk < num_keys; chunk += blocks_of_chunk_ * kTileKeys) {
      const int64_t chunk_end = min64(chunk + blocks_of_chunk_ * kTileKeys, num_keys);
      const bool final_chunk = chunk_end == num_keys;
      begin_chunk(head, chunk);
      for (int64_t at = begin; at < end; ++at) {
        const int64_t first = at % of_head * kTileQueries;
        if (first >= query_rows(p_, b).count) continue;
        QueryTile*& query_tile = of_task_[at - begin];
        if (chunk == 0) query_tile = begin_query_tile(b, h_kv * group + at / of_head, first);
        const bool any = query_tile_keys(query_tile, h_kv, chunk, chunk_end, final_chunk);
        if (final_chunk && !any) {
          if (!query_tile->begun) clear(query_tile->out, kTileQueries * wide_v_);
          end_query_tile(query_tile);
        }
      }
      drain();
    }
  }

  void begin_chunk(int64_t head, int64_t chunk) {
    if (head == packed_head_ && chunk == packed_chunk_) return;
    for (int64_t i = 0; i < blocks_of_chunk_; ++i) blocks_[i].packed = false;
    packed_head_ = head;
    packed_chunk_ = chunk;
  }

  // Adds the visible tiles of keys [chunk, chunk_end) to the pipeline for one query tile. Returns
  // false if there are none.
  bool query_tile_keys(QueryTile* query_tile, int64_t h_kv, int64_t chunk, int64_t chunk_end,
                       bool final_chunk) {
    bool any = false;
    for (int64_t j = chunk; j < chunk_end; j += kTileKeys) {
      const int64_t n = min64(kTileKeys, chunk_end - j), at = (j - chunk) / kTileKeys;
      const Tile kind = mask_.classify(query_tile->b, query_tile->h, query_tile->first, j, j + n);
      if (kind == Tile::kSkip) continue;
      if (!blocks_[at].packed) pack_block(query_tile->b, h_kv, j, n, at, &blocks_[at]);
      add_tile(query_tile, &blocks_[at], j, n, kind == Tile::kPartial);
      any = true;
    }
    if (any) pending_job_->last = final_chunk;
    return any;
  }

  void pack_block(int64_t b, int64_t h_kv, int64_t j, int64_t n, int64_t at, KeyBlock* block) {
    const SequenceRows keys = key_rows(p_, b);
    const T* rows[kTileKeys];
    block->key = keys_ + at * Pack::size(kTileKeys, steps_);
    block->value = values_ + at * Pack::size(kTileKeys, steps_v_);
    list_rows(at_head<T>(p_.key, p_.key_strides, keys, h_kv), p_.key_strides[2], j, n, kTileKeys,
              rows);
    Pack::right(rows, kTileKeys, p_.head_dim, steps_, block->key);
    list_rows(at_head<T>(p_.value, p_.value_strides, keys, h_kv), p_.value_strides[2], j, n,
              kTileKeys, rows);
    Pack::values(
        rows, kTileKeys, p_.head_dim_v, steps_v_,
        [](int i) { return Softmax::kByTable ? TableWeights::key_at(i) : F::unwoven(i); }, block);
    block->packed = true;
  }

  // Assigns a free slot to a query tile and packs its queries. The most recently freed slot is
  // reused first, because it may still be in L1.
  QueryTile* begin_query_tile(int64_t b, int64_t h, int64_t first) {
    QueryTile* const query_tile = free_[--num_free_];
    const SequenceRows queries = query_rows(p_, b);
    query_tile->b = b;
    query_tile->h = h;
    query_tile->first = first;
    query_tile->count = min64(kTileQueries, queries.count - first);
    query_tile->begun = query_tile->has_nonfinite = false;
    const T* own[kTileQueries];
    list_rows(at_head<T>(p_.query, p_.query_strides, queries, h), p_.query_strides[2], first,
              query_tile->count, kTileQueries, own);
    Pack::left(own, p_.head_dim, steps_, query_tile->query);
    Softmax::reset(&query_tile->rows);
    return query_tile;
  }

  // Adds a tile to the pipeline. Its MMAs are issued only after the next tile is packed, because
  // tile loads of recently written data would stall on the stores.
  void add_tile(QueryTile* query_tile, const KeyBlock* block, int64_t j, int64_t n, bool partial) {
    Job& job = jobs_[added_ % 4];
    job.query_tile = query_tile;
    job.block = block;
    job.scores = score_tiles_[added_ % 2];
    job.weights = weights_[added_ % 2];
    job.j = j;
    job.n = n;
    job.partial = partial;
    job.first = !query_tile->begun;
    job.last = false;
    query_tile->begun = true;
    if (pending_job_ != nullptr) advance(pending_job_);
    pending_job_ = &job;
    ++added_;
  }

  void drain() {
    if (pending_job_ != nullptr) advance(pending_job_);
    pending_job_ = nullptr;
    while (scored_ != nullptr || weighted_ != nullptr) advance(nullptr);
    pending_sums_.flush();  // query_tiles() may read `out` without issuing another quad
  }

  // Runs one pipeline step. Not inlined: the body is large, and a tile takes thousands of cycles.
  __attribute__((noinline)) void advance(Job* next) {
    if (scored_ != nullptr) open(*scored_);
    softmax_.template finish<kDrops>(tile_, multiply(next));
    const bool nonfinite = weighted_ != nullptr && weighted_->block->num_nonfinite > 0;
    const bool ended = weighted_ != nullptr && weighted_->last;
    if (weighted_ == nullptr || nonfinite || ended || softmax_.rescaled != 0) pending_sums_.flush();
    if (nonfinite) add_nonfinite(*weighted_);
    if (ended) end_query_tile(weighted_->query_tile);
    if (softmax_.rescaled != 0) rescale(scored_->query_tile);
    weighted_ = scored_;
    scored_ = next;
  }

  static TileAt tile_at(const Job& job) {
    return {job.query_tile->b, job.query_tile->h, job.query_tile->first, job.j, job.n};
  }

  void open(const Job& job) {
    tile_.rows = &job.query_tile->rows;
    tile_.scores = job.scores;
    tile_.weights = job.weights;
    if (scores_.wanted(job.partial, job.n)) {
      scores_.finish(tile_at(job), job.partial, job.query_tile->count, job.scores, nullptr);
    }
    if (job.first) Softmax::begin(tile_);
    if (kDrops) dropout_.begin(p_, tile_at(job));
  }

  // Computes QK^T of `next` and PV of weighted_, interleaved with the softmax of tile_. Returns a
  // bit mask of the rows that the interleaved softmax left to finish().
  uint32_t multiply(const Job* next) {
    num_products_ = num_sums_ = 0;
    if (next != nullptr) {
      product_quads<F>(next->query_tile->query, next->block->key, steps_, kScoreTiles, next->scores,
                       products_);
      num_products_ = kScoreTiles / 2;
    }
    if (weighted_ != nullptr) {
      sum_quads<F>(weighted_->weights, weighted_->block->value, 2, 2 * steps_v_,
                   weighted_->query_tile->out, sums_);
      num_sums_ = steps_v_;
    }
    const int64_t steps = 2 * steps_ + 2 * steps_v_;
    if (steps >= 32) return multiply_beside<1>();
    if (steps >= 16) return multiply_beside<2>();
    if (steps >= 8) return multiply_beside<4>();
    return multiply_beside<8>();
  }

  template <int kRows>
  __attribute__((noinline)) uint32_t multiply_beside() {
    using Stream = typename Softmax::template Stream<kDrops>;
    TileSchedule<F, Stream> schedule(&pending_sums_, Stream(tile_, scored_ != nullptr));
    // The first PV of a query tile overwrites `out` instead of accumulating into a zeroed buffer.
    const bool adds = num_sums_ > 0 && !weighted_->first;
    const int64_t num_stored = num_products_ + (adds ? 0 : num_sums_);
    for (int64_t q = 0; q < num_stored; ++q) {
      schedule.template multiply<false, kRows>(
          *(q < num_products_ ? products_ + q : sums_ + (q - num_products_)));
    }
    for (int64_t q = 0; adds && q < num_sums_; ++q) {
      schedule.template multiply<true, kRows>(sums_[q]);
    }
    schedule.finish();
    return schedule.work.left();
  }

  void rescale(QueryTile* query_tile) {
    for (uint32_t left = softmax_.rescaled; left != 0; left &= left - 1) {
      const int64_t r = __builtin_ctz(left);
      scale_tile_row(r, softmax_.rescale[r], 2 * steps_v_, query_tile->out);
      if (!query_tile->has_nonfinite) continue;
      for (int64_t d = 0; d < wide_v_; ++d)
        query_tile->nonfinite[r * wide_v_ + d] *= softmax_.rescale[r];
    }
  }

  // Accumulates the non-finite rows of V, which are packed as 0, for the query rows that attend to
  // them.
  void add_nonfinite(const Job& job) {
    QueryTile& query_tile = *job.query_tile;
    if (!query_tile.has_nonfinite) clear(query_tile.nonfinite, kTileQueries * wide_v_);
    query_tile.has_nonfinite = true;
    const SequenceRows keys = key_rows(p_, query_tile.b);
    const int64_t h_kv = query_tile.h / (p_.num_heads / p_.num_heads_kv),
                  stride = p_.value_strides[2];
    const T* const value = at_head<T>(p_.value, p_.value_strides, keys, h_kv) + job.j * stride;
    const float unit = 1.f / (1 << F::kWeightExponent);
    for (int s = 0; s < job.block->num_nonfinite; ++s) {
      const int t = job.block->nonfinite[s];
      for (int64_t r = 0; r < kTileQueries; ++r) {
        const float weight = F::weight(job.weights + t / 32 * F::kParts * kPairNumbers +
                                       r * kTileSteps + position(t % 32)) *
                             unit;
        if (weight == 0) continue;
        for (int64_t d = 0; d < p_.head_dim_v; ++d) {
          query_tile.nonfinite[r * wide_v_ + d] += weight * to_acc(value[t * stride + d]);
        }
      }
    }
  }

  void end_query_tile(QueryTile* ended) {
    free_[num_free_++] = ended;
    const QueryTile& query_tile = *ended;
    const QueryTileRows& state = query_tile.rows;
    const float scale = static_cast<float>(dropout_scale(p_.dropout_p));
    const float unit = 1 << F::kWeightExponent;
    const int64_t at = lse_begin(p_, query_tile.b, query_tile.h) + query_tile.first;
    alignas(64) float factors[kTileQueries], sums[kTileQueries];
    for (int64_t half = 0; half < kTileQueries; half += 16) {
      // Normalize by the sum of the rounded weights in 16-bit types. The backward computes delta
      // from out, and delta is accurate only if the weights of PV sum to 1. If one key dominates a
      // row, a sum of 1.002 would hide the contributions of all other keys.
      const Vec<float> divisor = row_sums((F::kRounds ? state.rounded : state.sum) + half);
      // Fully masked rows stay 0.
      store(factors + half, scale / (divisor == 0 ? Vec<float>{} + 1.f : divisor));
      if (kSum) store(sums + half, F::kRounds ? row_sums(state.sum + half) : divisor);
    }
    for (int64_t r = 0; r < query_tile.count; ++r) {
      const float factor = factors[r];
      const float* const out = query_tile.out + r * 16;
      float* const row = rows_ + r * wide_v_;
      for (int64_t c = 0; c < 2 * steps_v_; ++c) {
        Vec<float> x = load(out + c * kPairSums) * factor;
        if (__builtin_expect(query_tile.has_nonfinite, 0)) {
          x += load(query_tile.nonfinite + r * wide_v_ + c * 16) * (factor * unit);
        }
        store(row + c * 16, x);
      }
      if (kSum) write_lse(p_, scores_.units.natural, at + r, state.shift[r], sums[r]);
    }
    write_out(query_tile);
  }

  // Returns the sums of 16 rows of 16 floats, one per lane.
  static Vec<float> row_sums(const float (*rows)[16]) {
    Vec<float> vectors[16];
    for (int r = 0; r < 16; ++r) vectors[r] = load(rows[r]);
    return lane_sums<float>(vectors);
  }

  void write_out(const QueryTile& query_tile) {
    const SequenceRows queries = query_rows(p_, query_tile.b);
    const ResultRows<T> out(p_, p_.out, p_.out_strides, queries, query_tile.h);
    for (int64_t r = 0; r < query_tile.count; ++r) {
      out.store(query_tile.first + r, rows_ + r * wide_v_, p_.head_dim_v);
    }
    write_out_residual<T>(p_, queries, query_tile.h, query_tile.first, query_tile.count, rows_,
                          wide_v_);
  }

  const AttentionParams& p_;
  const MaskView<float>& mask_;
  TileScores<kTileKeys> scores_;
  const ExpUnit<float> unit_;  // unit of the scores
  const int64_t steps_, steps_v_, wide_v_, max_query_tiles_;
  int64_t blocks_of_chunk_, slots_;
  Arena arena_;
  TileRegisters registers_;
  int64_t packed_head_ = -1, packed_chunk_ = -1;
  Softmax softmax_;
  typename Softmax::Tile tile_;
  int64_t added_ = 0;
  Job jobs_[4];
  Job* pending_job_ = nullptr;
  Job *scored_ = nullptr, *weighted_ = nullptr;  // jobs whose scores, and whose weights, are done
  TileQuad products_[kScoreTiles / 2], *sums_;   // quads of the step: QK^T, PV
  int64_t num_products_ = 0, num_sums_ = 0;
  PendingSums pending_sums_;
  QueryTile* query_tiles_;
  QueryTile **free_, **of_task_;
  int64_t num_free_ = 0;
  KeyBlock* blocks_;
  uint16_t *queries_, *keys_, *values_;
  float *outs_, *nonfinite_sums_;
  float* score_tiles_[2];
  uint16_t* weights_[2];
  float* rows_;  // (32, wide_v)
  TileDropout<kTileKeys> dropout_;
};

}  // namespace
}  // namespace fused_attn

#endif  // __AMX_BF16__
