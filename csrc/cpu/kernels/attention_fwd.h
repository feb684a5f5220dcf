// Attention forward: online softmax over KV blocks, without materializing the scores.
//
// Sources: Milakov and Gimelshein 2018 (online normalizer), Dao 2023 (FlashAttention-2).
#pragma once

#include "cpu/kernels/attention_common.h"

namespace fused_attn {
namespace {

// Maximum number of query tiles per task. They share each packed KV block while it is cached. 16
// tiles hold 512 queries in float32. At head_dim 64, their queries (three bfloat16 parts) and
// outputs occupy 320 KiB of L2.
constexpr int64_t kMaxQueryTiles = 16;

// The running maximum of a row is raised only if the new maximum exceeds it by more than this power
// of 2. Outputs are then rescaled a few times per row instead of at nearly every block.
constexpr int kMaximumSlack = 8;

// Computes the softmax weights exp(score - maximum) of one tile in small pieces, which are
// interleaved with the matmuls of other tiles.
template <class T>
struct SoftmaxStream {
  using A = Acc<T>;
  using P = Product<T>;
  static constexpr int kLane = kLanes<A>;
  // Keys and query vectors per piece. With three parts per operand, the matmuls are the bottleneck.
  // A larger piece would fill the reorder buffer and delay the next tile loads. Otherwise the
  // softmax is the bottleneck, and larger pieces reduce the overhead.
  static constexpr int kKeys = 4, kVectors = P::kParts == 3 ? 1 : 2;

  // Computes one share of the pieces. The matmuls invoke this operator `calls` times before
  // finish().
  void operator()() {
    due += pieces();
    while (done < pieces() && done * calls < due) step();
  }

  void finish() {
    while (done < pieces()) step();
  }

  int64_t pieces() const { return steps / kKeys * (2 / kVectors); }

  void step() { dropout == nullptr && !in_place ? piece<true>() : piece<false>(); }

  template <bool kPlain>
  __attribute__((noinline)) void piece() {
    const int64_t t = kVectors == 2 ? done * kKeys : done / 2 * kKeys;
    const int first = kVectors == 2 ? 0 : static_cast<int>(done % 2);
    A* const from = scores + t * kPanel<A>;
    const ExpUnit<A> exp_unit = unit;
    if (!kPlain && dropout != nullptr && first == 0 && t % kDecisions == 0) {
      dropout_words<A>(*dropout, dropped_at, t, keep);
    }
    const uint32_t* const own = keep + t % kDecisions;
    for (int v = first; v < first + kVectors; ++v) {
      const Vec<A> below = shift[v];
      Vec<A> x[kKeys];
      typename P::Weight weight[kKeys], undropped[kKeys];  // weights after and before dropout
      for (int r = 0; r < kKeys; ++r) {
        A* const score = from + r * kPanel<A> + v * kLane;
        x[r] = exp_nonpositive<A, kPrecision<T>>(load(score) - below, exp_unit);
        Vec<A> kept = x[r];
        if (!kPlain) {
          if (dropout != nullptr) kept = where<A>(own[r] >> (v * kLane), kept, Vec<A>{});
          if (in_place) store(score, kept);
        }
        undropped[r] = P::weight(x[r]);
        weight[r] = kPlain ? undropped[r] : P::weight(kept);
      }
      for (int r = 0; r < kKeys; r += 2) {
        sum[v] += x[r] + x[r + 1];
        if constexpr (P::kRoundsWeights) {
          rounded_sum[v] = P::add_rounded(rounded_sum[v], undropped[r], undropped[r + 1]);
        }
        P::store_right(weights, P::right_size(kBlockN, kPanel<A>) / P::kParts, t + r, v, weight[r],
                       weight[r + 1]);
      }
    }
    ++done;
  }

  int64_t steps, calls;               // padded number of keys; expected calls
  A* scores;                          // (steps, kRows)
  typename P::RightElement* weights;  // (steps, kRows)
  const AttentionParams* dropout;     // null without dropout
  DropoutAt dropped_at;               // dropout counters of the tile
  bool in_place;                      // also overwrite the scores with the weights
  ExpUnit<A> unit;                    // unit of the scores
  Vec<A> shift[2];                    // subtracted from the scores
  Vec<A> sum[2] = {};                 // row sums of the unrounded weights
  Vec<A> rounded_sum[2] = {};         // row sums of the rounded weights, if P::kRoundsWeights
  uint32_t keep[kDecisions] = {};     // dropout keep masks of the current keys
  int64_t done = 0, due = 0;          // pieces done; pieces due, multiplied by `calls`
};

template <class T>
class AttentionFwd {
  using A = Acc<T>;
  using P = Product<T>;
  static constexpr int64_t kRows = kPanel<A>;
  static constexpr int kLane = kLanes<A>;

 public:
  static bool run(const AttentionParams& p) {
    MaskView<A> mask;
    if (!mask.init(p)) return false;
    const int64_t num_query_tiles = div_up(p.seqlen_q, kRows), heads = p.batch * p.num_heads;
    // Use fewer query tiles per task if there are few tasks. This does not change the results.
    int64_t per_task = kMaxQueryTiles;
    while (per_task > 1 && heads * div_up(num_query_tiles, per_task) < 4 * p.num_threads)
      per_task /= 2;
    const int64_t per_head = div_up(num_query_tiles, per_task), tasks = heads * per_head;
    return run_team(p.num_threads, tasks, [&] {
      AttentionFwd self(p, mask);
      const bool ok = self.allocate(min64(per_task, num_query_tiles));
      // Start with the last query tiles: under a causal mask they take longest.
      share_tasks(tasks, is_unmasked(p) || fit_caches(operand_bytes<T>(p)), [&](int64_t task) {
        const int64_t head = task / per_head, group = per_head - 1 - task % per_head;
        const int64_t b = head / p.num_heads, first = group * per_task;
        const int64_t sequence_query_tiles = div_up(query_rows(p, b).count, kRows);
        const int64_t count = min64(per_task, sequence_query_tiles - first);
        if (ok && count > 0) self.head_query_tiles(b, head % p.num_heads, first, count);
      });
      return ok;
    });
  }

 private:
  using LeftElement = typename P::LeftElement;
  using RightElement = typename P::RightElement;

  struct QueryTile {
    RightElement* query;  // (head_dim, kRows)
    A* out;               // (head_dim_v, kRows), unnormalized
    A* maximum;           // (kRows), in score units
    A* sum;               // (kRows), of the unrounded weights
    A* divisor;           // (kRows), sum of the weights as rounded for PV; may alias `sum`
  };

  // A score tile: one query tile against the keys of a KV block from `offset` on.
  struct TileOf {
    Tile kind;
    TileAt at;
    int64_t offset;
    const QueryTile* query_tile;
  };

  // State of a score tile in the software pipeline.
  struct Job {
    TileOf tile;
    A* scores;              // (kBlockN, kRows)
    RightElement* weights;  // (kBlockN, kRows)
    bool rescale;
    alignas(64) A alpha[kRows];  // factor of the accumulators, if `rescale`
  };

  AttentionFwd(const AttentionParams& p, const MaskView<A>& mask)
      : p_(p), mask_(mask), units_(p), unit_(units_.natural) {}

  void place(int64_t query_tiles) {
    const int64_t wide = P::pad_dim(p_.head_dim), wide_v = P::pad_dim(p_.head_dim_v);
    for (int64_t i = 0; i < query_tiles; ++i) {
      query_tiles_[i] = {arena_.template take<RightElement>(P::right_size(wide, kRows)),
                         arena_.template take<A>(wide_v * kRows), arena_.template take<A>(kRows),
                         arena_.template take<A>(kRows), nullptr};
      QueryTile& query_tile = query_tiles_[i];
      query_tile.divisor = P::kRoundsWeights ? arena_.template take<A>(kRows) : query_tile.sum;
    }
    for (int i = 0; i < 2; ++i) {
      scores_[i] = arena_.template take<A>(kBlockN * kRows);
      weights_[i] = arena_.template take<RightElement>(P::right_size(kBlockN, kRows));
    }
    bias_ = arena_.template take<A>(kBlockN * kRows);
    stage_ = arena_.template take<T>(max64(kBlockN, kRows) * max64(wide, wide_v));
    scratch_ = arena_.template take<RightElement>(P::scratch_size(wide));
    rows_ = arena_.template take<A>(kRows * p_.head_dim_v);
    key_ = arena_.template take<LeftElement>(P::left_size(kBlockN, wide));
    value_ = arena_.template take<LeftElement>(P::columns_size(kBlockN, wide_v));
  }

  bool allocate(int64_t query_tiles) {
    return arena_.layout([&] { place(query_tiles); });
  }

  void head_query_tiles(int64_t b, int64_t h, int64_t first, int64_t count) {
    const int64_t h_kv = h / (p_.num_heads / p_.num_heads_kv);
    const SequenceRows keys = key_rows(p_, b);
    queries_ = query_rows(p_, b);
    const T* const query = at_head<T>(p_.query, p_.query_strides, queries_, h);
    const T* const key = at_head<T>(p_.key, p_.key_strides, keys, h_kv);
    const T* const value = at_head<T>(p_.value, p_.value_strides, keys, h_kv);
    for (int64_t i = 0; i < count; ++i)
      begin_query_tile(query, (first + i) * kRows, query_tiles_[i]);
    for (int64_t j = 0; j < keys.count; j += kBlockN) {
      const int64_t n = min64(kBlockN, keys.count - j);
      int64_t tiles = 0;
      bool partial = false;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = (first + i) * kRows;
        const Tile kind = mask_.classify(b, h, row, j, j + n);
        if (kind == Tile::kSkip) continue;
        int64_t lo = j, hi = j + n;
        if (kind == Tile::kPartial) mask_.visible_span(b, row, j, j + n, &lo, &hi);
        if (lo >= hi) continue;
        tiles_[tiles++] = {kind, {b, h, row, lo, hi - lo}, lo - j, &query_tiles_[i]};
        partial = partial || kind == Tile::kPartial;
      }
      if (tiles == 0) continue;
      k_ = P::rows(key + j * p_.key_strides[2], p_.key_strides[2], n, p_.head_dim, stage_, key_);
      v_.load(value + j * p_.value_strides[2], p_.value_strides[2], n, p_.head_dim_v, partial,
              stage_, value_);
      run_tiles(tiles);
    }
    for (int64_t i = 0; i < count; ++i) end_query_tile(b, h, (first + i) * kRows, query_tiles_[i]);
  }

  // Processes the tiles of a KV block in a three-stage software pipeline. The softmax of tile i is
  // interleaved with PV of tile i-1 and QK^T of tile i+1. On AMX, the vector and tile units then
  // work concurrently.
  void run_tiles(int64_t count) {
    const auto job = [&](int64_t i) -> Job& { return jobs_[i % 3]; };
    start(tiles_[0], 0, &job(0));
    multiply_query(job(0), kNothing);
    prepare(&job(0));
    for (int64_t i = 0; i < count; ++i) {
      if (i + 1 < count) start(tiles_[i + 1], (i + 1) % 2, &job(i + 1));
      SoftmaxStream<T> stream = open(job(i));
      if (i > 0) stream.calls += P::calls(p_.head_dim_v, job(i - 1).tile.at.n);
      if (i + 1 < count) stream.calls += P::calls(job(i + 1).tile.at.n, p_.head_dim);
      if (i > 0) multiply_value(job(i - 1), stream);
      if (i + 1 < count) multiply_query(job(i + 1), stream);
      stream.finish();
      close(stream, job(i));
      if (i + 1 < count) prepare(&job(i + 1));
    }
    multiply_value(job(count - 1), kNothing);
  }

  void begin_query_tile(const T* query, int64_t i, const QueryTile& query_tile) {
    copy_rows(query + i * p_.query_strides[2], p_.query_strides[2],
              min64(kRows, queries_.count - i), p_.head_dim, stage_, kRows,
              P::pad_dim(p_.head_dim));
    P::right_columns(stage_, p_.head_dim, scratch_, query_tile.query);
    memset(query_tile.out, 0, P::pad_dim(p_.head_dim_v) * kRows * sizeof(A));
    for (int64_t l = 0; l < kRows; ++l) {
      query_tile.maximum[l] = -static_cast<A>(__builtin_inf());
      query_tile.sum[l] = query_tile.divisor[l] = 0;
    }
  }

  void start(const TileOf& tile, int buffer, Job* job) {
    job->tile = tile;
    job->scores = scores_[buffer];
    job->weights = weights_[buffer];
  }

  template <class Meanwhile>
  void multiply_query(const Job& job, Meanwhile& meanwhile) {
    P::template multiply<Layout::kRowMajor, Into::kStore>(
        job.tile.at.n, p_.head_dim, k_.from_row(job.tile.offset),
        P::columns_view(job.tile.query_tile->query, p_.head_dim), job.scores, kRows, nullptr,
        meanwhile);
  }

  // Masks the scores, raises the running maxima and computes the rescale factors.
  void prepare(Job* job) {
    const TileAt& at = job->tile.at;
    finish_scores<T>(p_, mask_, units_, job->tile.kind, at, job->scores, nullptr, bias_);
    const Vec<A> nothing = broadcast<A>(-static_cast<A>(__builtin_inf()));
    const int64_t steps = P::pad_steps(at.n);
    job->rescale = false;
    for (int v = 0; v < 2; ++v) {
      const A* const column = job->scores + v * kLane;
      Vec<A> highest[4] = {nothing, nothing, nothing, nothing};
      for (int64_t t = 0; t < steps; t += 4) {
        for (int r = 0; r < 4; ++r) highest[r] = max<A>(highest[r], load(column + (t + r) * kRows));
      }
      A* const maximum = job->tile.query_tile->maximum + v * kLane;
      const Vec<A> old = load(maximum);
      const Vec<A> found = max<A>(max<A>(highest[0], highest[1]), max<A>(highest[2], highest[3]));
      const Vec<A> raised = (found - old) * unit_.high > kMaximumSlack ? found : old;
      store(maximum, raised);
      // Before the first visible key of a row, both maxima are -inf, and their difference would be
      // NaN.
      store(job->alpha + v * kLane,
            raised == old ? broadcast<A>(1) : exp_nonpositive<A>(old - raised, unit_));
      job->rescale = job->rescale || any(raised != old);
    }
  }

  SoftmaxStream<T> open(const Job& job) {
    const bool drops = p_.dropout_p > 0;
    SoftmaxStream<T> stream{P::pad_steps(job.tile.at.n),
                            0,
                            job.scores,
                            job.weights,
                            drops ? &p_ : nullptr,
                            drops ? dropout_at(p_, job.tile.at) : DropoutAt{},
                            v_.count > 0,
                            unit_,
                            {}};
    for (int v = 0; v < 2; ++v) {
      const Vec<A> maximum = load(job.tile.query_tile->maximum + v * kLane);
      // Rows without a visible key so far use a shift of 0, because -inf - -inf would be NaN.
      stream.shift[v] = maximum == -static_cast<A>(__builtin_inf()) ? Vec<A>{} : maximum;
    }
    return stream;
  }

  void close(const SoftmaxStream<T>& stream, const Job& job) {
    for (int v = 0; v < 2; ++v) {
      const Vec<A> alpha = load(job.alpha + v * kLane);
      A* const sum = job.tile.query_tile->sum + v * kLane;
      store(sum, load(sum) * alpha + stream.sum[v]);
      if constexpr (P::kRoundsWeights) {
        A* const divisor = job.tile.query_tile->divisor + v * kLane;
        store(divisor, load(divisor) * alpha + stream.rounded_sum[v]);
      }
    }
  }

  template <class Meanwhile>
  void multiply_value(const Job& job, Meanwhile& meanwhile) {
    const TileOf& tile = job.tile;
    const typename P::Left value = v_.left.from_key(tile.offset);
    const typename P::Right weights = P::right_view(job.weights, kPlane);
    A* const out = tile.query_tile->out;
    if (job.rescale) {
      P::template multiply<Layout::kColumnMajor, Into::kScale>(
          p_.head_dim_v, tile.at.n, value, weights, out, kRows, job.alpha, meanwhile);
    } else {
      P::template multiply<Layout::kColumnMajor, Into::kAdd>(
          p_.head_dim_v, tile.at.n, value, weights, out, kRows, nullptr, meanwhile);
    }
    if (v_.count == 0) return;
    v_.add_nonfinite(tile.offset, tile.offset + tile.at.n, p_.head_dim_v, job.scores, out);
  }

  void end_query_tile(int64_t b, int64_t h, int64_t i, const QueryTile& query_tile) {
    const int64_t rows = min64(kRows, queries_.count - i);
    const A scale = static_cast<A>(dropout_scale(p_.dropout_p));
    for (int v = 0; v < 2; ++v) {
      // Normalize by the sum of the rounded weights in 16-bit types. The backward computes delta
      // from out, and delta is accurate only if the weights of PV sum to 1. If one key dominates a
      // row, a sum of 1.002 would hide the contributions of all other keys.
      const Vec<A> sum = load(query_tile.divisor + v * kLanes<A>);
      const Vec<A> divisor = sum == 0 ? broadcast<A>(1) : sum;  // fully masked rows stay 0
      const Vec<A> factor = scale / divisor;
      for (int64_t d = 0; d < p_.head_dim_v; ++d) {
        A* const at = query_tile.out + d * kRows + v * kLane;
        // float64 uses a division, which takes 16 cycles but saves one rounding.
        store(at, sizeof(A) == 8 ? load(at) / divisor * scale : load(at) * factor);
      }
    }
    const ResultRows<T> out(p_, p_.out, p_.out_strides, queries_, h);
    write_query_tile<T>(query_tile.out, p_.head_dim_v, rows, rows_, out, i);
    if constexpr (sizeof(T) == 2) {
      if (p_.out_residual != nullptr) write_out_residual(h, i, rows, out.at(i));
    }
    const int64_t at = lse_begin(p_, b, h) + i;
    for (int64_t l = 0; l < rows; ++l) {
      write_lse(p_, units_.natural, at + l, query_tile.maximum[l], query_tile.sum[l]);
    }
  }

  // Writes the rounding residuals of `rows` rows of out. Requires the unrounded rows in rows_,
  // where write_query_tile() stores them.
  void write_out_residual(int64_t h, int64_t i, int64_t rows, const T* out) {
    int16_t* const residuals = const_cast<int16_t*>(at_head<int16_t>(
                                   p_.out_residual, p_.out_residual_strides, queries_, h)) +
                               i * p_.out_residual_strides[2];
    for (int64_t l = 0; l < rows; ++l) {
      store_residual_row(rows_ + l * p_.head_dim_v, out + l * p_.out_strides[2], p_.head_dim_v,
                         residuals + l * p_.out_residual_strides[2]);
    }
  }

  static constexpr int64_t kPlane = P::right_size(kBlockN, kRows) / P::kParts;

  const AttentionParams& p_;
  const MaskView<A>& mask_;
  const ScoreUnits units_;
  const ExpUnit<A> unit_;  // unit of the scores
  Arena arena_;
  typename P::Registers registers_;
  SequenceRows queries_{};  // query rows of the current sequence
  KeyColumns<T> v_;
  typename P::Left k_;
  QueryTile query_tiles_[kMaxQueryTiles];
  TileOf tiles_[kMaxQueryTiles];
  Job jobs_[3];
  A* scores_[2];              // (kBlockN, kRows)
  RightElement* weights_[2];  // (kBlockN, kRows)
  A* bias_;                   // (kBlockN, kRows)
  T* stage_;                  // (kBlockN, max(head_dim, head_dim_v)), padded
  RightElement* scratch_;
  A* rows_;             // (kRows, head_dim_v)
  LeftElement* key_;    // (kBlockN, head_dim)
  LeftElement* value_;  // (head_dim_v, kBlockN)
};

}  // namespace
}  // namespace fused_attn
