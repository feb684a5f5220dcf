// Attention backward: recomputes the weights tile by tile from query, key and lse.
//
// Let P = exp(S - lse), Z the keep mask of dropout (0 or 1), c = dropout_scale(dropout_p) and
// delta = rowsum(dO * O) / c. Then:
//   dV = c (P Z)^T dO,  dP = dO V^T,  dS = P (c (Z dP - delta) + dlse),  dK = scale dS^T Q,
//   dQ = scale dS K.
// If the weights c P Z have a gradient dW, it is added to dP, and rowsum(dW * P Z) is added to
// delta.
//
// Sources: Dao et al. 2022 (FlashAttention), appendix B.4; FlashAttention-2, section 3.1 (delta).
#pragma once

#include "cpu/kernels/attention_bwd_tile.h"

namespace fused_attn {
namespace {

// Computes the gradients of query, key, value and, in some calls, of the bias.
//
// A task is one key/value head with all its query heads, so a single thread accumulates dK and dV;
// for the bias gradient, it is all heads that share a bias. With few heads, the keys are split as
// well (split-KV). The splits depend only on the shape, and their dQ are added in a fixed order, so
// results do not depend on the number of threads.
template <class T>
class AttentionBwd : BwdTile<T> {
  using Base = BwdTile<T>;
  using Base::arena_;
  using Base::bwd_;
  using Base::kLane;
  using Base::kRows;
  using Base::p_;
  using Base::wide_;
  using Base::wide_v_;
  using typename Base::A;
  using typename Base::LeftElement;
  using typename Base::P;
  using typename Base::RightElement;
  using typename Base::Weight;

  static constexpr int64_t kMinTasks = 8;  // target of split-KV; each split needs a dQ buffer
  // Bytes of packed queries per chunk. A chunk stays in L2 during the loop over all KV blocks.
  // Without chunks, the four packed operands of 2048 queries at head_dim 64 (three bfloat16 parts)
  // take 3 MiB, and L3 latency increases the time of an MMA from 30 to 50 cycles.
  static constexpr int64_t kChunkBytes = int64_t{768} << 10;
  // With more features, KV blocks have 64 keys. With 128, K, V and their gradients exceed L2: at
  // head_dim 512, float32 took 1.1 to 1.5 times as long (AVX-512, 2 MiB of L2; 1.15 times with
  // AVX2; 0.96 to 1.09 times with AVX-512 and 1 MiB, where bfloat16 took 0.92 to 1.1 times).
  static constexpr int64_t kMostFeatures = 256;
  static constexpr int64_t kGroup = P::kGroup, kGroupStride = kGroup * kRows + P::kRowGap;

 public:
  // Returns true if run() should also compute the bias gradient: if there are no splits, each
  // thread has a task, and T needs no correction (AttentionBwdBias). The separate pass is
  // bit-identical but computes the scores and dS again: forward and backward of 4 x 8 heads of 512
  // x 64 in float32 then take 63 instead of 50 ms (AMD Zen 4).
  static bool supports_bias(const AttentionBwdParams& bwd) {
    const AttentionParams& p = bwd.fwd;
    const int64_t* const strides = p.mask.bias.strides;
    const bool broadcast = strides[2] == 0 || strides[3] == 0;
    if (bwd.grad_bias == nullptr || broadcast || sizeof(T) < sizeof(A)) return false;
    return Shared(p, true).tasks(p) >= max64(kMinTasks, p.num_threads);
  }

  static bool run(const AttentionBwdParams& bwd, bool bias = false) {
    const AttentionParams& p = bwd.fwd;
    MaskView<A> mask;
    if (!mask.init(p)) return false;
    const Shared shared(p, bias);
    const int64_t blocks = div_up(p.seqlen_k, kBlockN), heads = p.batch * p.num_heads_kv;
    const int64_t group = p.num_heads / max64(p.num_heads_kv, 1);
    const int64_t query_tiles = div_up(p.seqlen_q, kRows);
    const int64_t part = query_tiles * P::pad_dim(p.head_dim) * kRows;
    int64_t splits = 1;
    if (heads > 0 && heads < kMinTasks) splits = max64(1, min64(blocks, kMinTasks / heads));
    const int64_t per_split = div_up(blocks, splits), tasks = shared.tasks(p) * splits;
    const Tasks kind = tasks_of(2 * operand_bytes<T>(p), heads);
    const bool in_a_row = shared.heads > 1 || run_length(kind, tasks, p.num_threads) > 1;
    const int64_t next = shared.batches > 1 ? p.num_heads_kv : in_a_row ? 1 : p.num_threads;
    Arena parts;  // dQ of each split: (heads, group, splits, part)
    A* grad_query;
    if (!parts.layout(
            [&] { grad_query = parts.template take<A>(splits > 1 ? tasks * group * part : 0); }))
      return false;
    return run_team(p.num_threads, tasks, [&] {
      AttentionBwd self(bwd, mask, bias);
      const bool ok =
          self.allocate(query_tiles, min64(per_split * kBlockN, p.seqlen_k), splits == 1);
      share_tasks(tasks, kind, [&](int64_t task) {
        if (!ok) return;
        const int64_t split = task % splits;
        for (int64_t at = 0; at < shared.batches * shared.heads; ++at) {
          const int64_t head = shared.head(p, task / splits, at);
          const int64_t num_keys = key_rows(p, head / p.num_heads_kv).count;
          const int64_t begin = min64(split * per_split * kBlockN, num_keys);
          const int64_t end = min64(begin + per_split * kBlockN, num_keys);
          self.prefetch_head(splits == 1 ? head + next : heads);
          A* const split_grad_query =
              splits == 1 ? nullptr : grad_query + (head * group * splits + split) * part;
          self.keys(head / p.num_heads_kv, head % p.num_heads_kv, begin, end, split_grad_query,
                    splits * part);
        }
      });
      if (splits > 1) {
#pragma omp barrier
#pragma omp for schedule(static) nowait
        for (int64_t head = 0; head < p.batch * p.num_heads; ++head) {
          if (!ok) continue;
          A* const first = grad_query + head * splits * part;
          for (int64_t s = 1; s < splits; ++s) {
            for (int64_t e = 0; e < part; ++e) first[e] += first[s * part + e];
          }
          self.write_grad_query(head / p.num_heads, head % p.num_heads, first);
        }
      }
      return ok;
    });
  }

 private:
  // Number of sequences in a task, and of key/value heads per sequence.
  struct Shared {
    Shared(const AttentionParams& p, bool bias)
        : batches(bias && p.mask.bias.strides[0] == 0 ? max64(p.batch, 1) : 1),
          heads(bias && p.mask.bias.strides[1] == 0 ? max64(p.num_heads_kv, 1) : 1) {}
    int64_t tasks(const AttentionParams& p) const {
      return p.batch / batches * (p.num_heads_kv / heads);
    }
    // Returns head `at` of a task, counted over all sequences.
    int64_t head(const AttentionParams& p, int64_t task, int64_t at) const {
      const int64_t first = batches == 1 ? task * heads : task * heads % p.num_heads_kv;
      return first + at / heads * p.num_heads_kv + at % heads;
    }
    const int64_t batches, heads;
  };

  AttentionBwd(const AttentionBwdParams& bwd, const MaskView<A>& mask, bool bias)
      : Base(bwd, mask), has_bias_(bias) {
    const int64_t calls = div_up(p_.seqlen_q, kRows) * div_up(p_.seqlen_k, kBlockN) *
                          (2 * P::groups(min64(p_.seqlen_k, kBlockN)) + P::groups(p_.head_dim));
    this->prefetch_ = HeadPrefetch(2 * operand_bytes<T>(p_), p_.batch * p_.num_heads,
                                   max64(p_.seqlen_q, p_.seqlen_k), calls);
  }

  // Starts to prefetch a key/value head, counted over all sequences, and its first query head.
  void prefetch_head(int64_t head) {
    const int64_t b = head / p_.num_heads_kv, h_kv = head % p_.num_heads_kv;
    if (!this->prefetch_.begin(b < p_.batch)) return;
    const int64_t h = h_kv * (p_.num_heads / p_.num_heads_kv);
    const SequenceRows queries = query_rows(p_, b), keys = key_rows(p_, b);
    const auto add = [&](const void* data, const int64_t strides[3], bool of_keys, int64_t dim,
                         bool written) {
      const SequenceRows& rows = of_keys ? keys : queries;
      const T* const first = at_head<T>(data, strides, rows, of_keys ? h_kv : h);
      this->prefetch_.add(first, strides[2], rows.count, dim, written);
    };
    add(p_.query, p_.query_strides, false, p_.head_dim, false);
    add(p_.key, p_.key_strides, true, p_.head_dim, false);
    add(p_.value, p_.value_strides, true, p_.head_dim_v, false);
    add(p_.out, p_.out_strides, false, p_.head_dim_v, false);
    add(bwd_.grad_out, bwd_.grad_out_strides, false, p_.head_dim_v, false);
    if (p_.partial) return;  // its gradients may be wider than T
    add(bwd_.grad_query, bwd_.grad_query_strides, false, p_.head_dim, true);
    add(bwd_.grad_key, bwd_.grad_key_strides, true, p_.head_dim, true);
    add(bwd_.grad_value, bwd_.grad_value_strides, true, p_.head_dim_v, true);
  }

  void place(int64_t query_tiles, int64_t keys, bool has_grad_query) {
    const int64_t query_tile_size =
        2 * (P::right_size(wide_, kRows) + P::right_size(wide_v_, kRows));
    const int64_t fit =
        kChunkBytes / max64(query_tile_size * static_cast<int64_t>(sizeof(RightElement)), 1);
    chunk_ = min64(query_tiles, max64(fit / kGroup, 1) * kGroup);
    Base::place_tile(chunk_, true);
    const int64_t rows = round_up(keys, kBlockN);
    grad_key_ = arena_.template take<A>(rows * wide_);
    grad_value_ = arena_.template take<A>(rows * wide_v_);
    grad_query_ = arena_.template take<A>(has_grad_query ? query_tiles * wide_ * kRows : 0);
    key_columns_buffer_ = arena_.template take<LeftElement>(P::columns_size(kBlockN, wide_));
    kept_ = arena_.template take<LeftElement>(P::kParts * kPlane);
    grads_ = arena_.template take<LeftElement>(P::kParts * kPlane);
    grads_right_ = arena_.template take<RightElement>(P::right_size(kBlockN, kRows));
    rows_ = arena_.template take<A>(kRows * p_.head_dim);
  }

  bool allocate(int64_t query_tiles, int64_t keys, bool has_grad_query) {
    return arena_.layout([&] { place(query_tiles, keys, has_grad_query); });
  }

  // Computes dK and dV of keys [begin, end) of a key/value head, and the contribution of these keys
  // to dQ of all its query heads.
  //
  // parts: dQ buffers of this split, one per query head, `parts_stride` elements apart. Null if the
  // keys are not split: dQ is then complete and is written to grad_query.
  void keys(int64_t b, int64_t h_kv, int64_t begin, int64_t end, A* parts, int64_t parts_stride) {
    const int64_t group = p_.num_heads / p_.num_heads_kv;
    const int64_t query_tiles = div_up(query_rows(p_, b).count, kRows);
    this->zero(grad_key_, round_up(end - begin, kBlockN) * wide_);
    this->zero(grad_value_, round_up(end - begin, kBlockN) * wide_v_);
    for (int64_t g = 0; g < group; ++g) {
      const int64_t h = h_kv * group + g;
      A* const grad_query = parts == nullptr ? grad_query_ : parts + g * parts_stride;
      this->zero(grad_query, query_tiles * wide_ * kRows);
      for (chunk_begin_ = 0; chunk_begin_ < query_tiles; chunk_begin_ += chunk_) {
        const int64_t count = min64(chunk_, query_tiles - chunk_begin_);
        for (int64_t slot = 0; slot < count; ++slot) {
          this->pack_query_tile(b, h, chunk_begin_ + slot, slot, true);
        }
        for (int64_t j = begin; j < end; j += block_keys_) {
          block(b, h, h_kv, begin, j, end, count, grad_query);
        }
      }
      if (parts == nullptr) write_grad_query(b, h, grad_query);
    }
    write_rows(grad_key_, wide_, p_.head_dim, p_.scale, begin, end, bwd_.grad_key,
               bwd_.grad_key_strides, b, h_kv);
    write_rows(grad_value_, wide_v_, p_.head_dim_v, 1, begin, end, bwd_.grad_value,
               bwd_.grad_value_strides, b, h_kv);
  }

  // Accumulates dK and dV of the KV block that begins at key j over the query tiles of the chunk,
  // and adds the contribution of the block to grad_query.
  void block(int64_t b, int64_t h, int64_t h_kv, int64_t begin, int64_t j, int64_t end,
             int64_t slots, A* grad_query) {
    const int64_t n = min64(block_keys_, end - j);
    A* const grad_key = grad_key_ + (j - begin) * wide_;
    A* const grad_value = grad_value_ + (j - begin) * wide_v_;
    bool loaded = false;
    for (int64_t first = 0; first < slots; first += kGroup) {
      const int64_t count = min64(kGroup, slots - first);
      Run run{first, 0, 0, n, 0};
      for (int64_t at = 0; at < count; ++at) {
        const int64_t row = (chunk_begin_ + first + at) * kRows;
        const Tile kind = this->mask_.classify(b, h, row, j, j + n);
        int64_t from = j, to = j + n;
        if (kind == Tile::kPartial) this->mask_.visible_span(b, h, row, j, j + n, &from, &to);
        if (kind == Tile::kSkip || from >= to) {
          add_run(run, grad_key, grad_value);
          run = {first, at + 1, at + 1, n, 0};
          continue;
        }
        if (!loaded) load_keys(b, h_kv, j, n);
        loaded = true;
        tile(kind, {b, h, row, from, to - from}, from - j, n, first + at, at, grad_query);
        run = {first, run.begin, at + 1, min64(run.lo, from - j), max64(run.hi, to - j)};
      }
      add_run(run, grad_key, grad_value);
    }
  }

  void load_keys(int64_t b, int64_t h_kv, int64_t j, int64_t n) {
    const int64_t stride = p_.key_strides[2], stride_v = p_.value_strides[2];
    const SequenceRows keys = key_rows(p_, b);
    const T* const key = at_head<T>(p_.key, p_.key_strides, keys, h_kv) + j * stride;
    const T* const value = at_head<T>(p_.value, p_.value_strides, keys, h_kv) + j * stride_v;
    key_columns_.load(key, stride, n, p_.head_dim, true, this->stage_, key_columns_buffer_);
    const bool same = !P::kPairs && key_columns_.count == 0;  // P::rows() would return the same
    k_ = same ? key_columns_.left : P::rows(key, stride, n, p_.head_dim, this->stage_, this->key_);
    v_ = P::rows(value, stride_v, n, p_.head_dim_v, this->stage_, this->value_);
  }

  // Computes the weights and dS of query tile `at` of the group, stores them for add_run(), and
  // accumulates their contribution to dQ.
  void tile(Tile kind, const TileAt& tile, int64_t offset, int64_t n, int64_t slot, int64_t at,
            A* grad_query) {
    LeftElement* const kept_at = kept_ + at * kRows;
    LeftElement* const grads_at = grads_ + at * kRows;
    const bool nonfinite = key_columns_.count > 0;
    const bool capped = p_.softcap > 0;
    const A* const cap_slope = this->cap_slope_;
    A *const numbers = this->grad_scores_, *const uncapped = this->scores_;
    const auto use = [&](int64_t t, const auto&, const auto& kept, auto& grad) {
      Weight grads[2][2];
      for (int r = 0; r < 2; ++r) {
        for (int v = 0; v < 2; ++v) {
          const int64_t e = (t + r) * kRows + v * kLane;
          if (has_bias_) store(uncapped + e, grad[r][v]);
          // The softcap derivative of a masked key may be NaN, so it is not applied where dS is 0.
          if (capped) grad[r][v] = grad[r][v] == 0 ? Vec<A>{} : grad[r][v] * load(cap_slope + e);
          if (nonfinite) store(numbers + e, grad[r][v]);
          grads[r][v] = P::weight(grad[r][v]);
        }
        const int64_t row = (offset + t + r) * kGroupStride;
        P::store_left(kept_at + row, kPlane, P::weight(kept[r][0]), P::weight(kept[r][1]));
        P::store_left(grads_at + row, kPlane, grads[r][0], grads[r][1]);
      }
      if (!P::kPairs) return;
      for (int v = 0; v < 2; ++v) {
        P::store_right(grads_right_, kRightPlane, t, v, grads[0][v], grads[1][v]);
      }
    };
    this->tile_gradients(kind, tile, slot, k_.from_row(offset), v_.from_row(offset), use);
    if (has_bias_) add_bias(tile);
    if (kGroup > 1) {  // zero the keys that only other query tiles attend to
      clear_rows(kept_at, grads_at, 0, offset);
      clear_rows(kept_at, grads_at, offset + P::pad_steps(tile.n), P::pad_steps(n));
    }
    A* const out = grad_query + (chunk_begin_ + slot) * wide_ * kRows;
    P::template multiply<Layout::kColumnMajor, Into::kAdd>(
        p_.head_dim, tile.n, key_columns_.left.from_key(offset), grads_view(offset), out, kRows,
        nullptr, this->prefetch_);
    if (nonfinite) {
      key_columns_.add_nonfinite(offset, offset + tile.n, p_.head_dim, numbers, out);
    }
  }

  // Adds dS of a tile, without the derivative of softcap, to the bias gradient.
  void add_bias(const TileAt& tile) {
    const int64_t* const strides = p_.mask.bias.strides;
    const int64_t heads = strides[1] == 0 ? 1 : p_.num_heads;
    const int64_t head = (strides[0] == 0 ? 0 : tile.b) * heads + (strides[1] == 0 ? 0 : tile.h);
    const int64_t rows = min64(kRows, p_.seqlen_q - tile.i);
    A* out = static_cast<A*>(bwd_.grad_bias) + (head * p_.seqlen_q + tile.i) * p_.seqlen_k + tile.j;
    transpose(this->scores_, kRows, tile.n, kRows, this->bias_, kBlockN);
    for (int64_t l = 0; l < rows; ++l, out += p_.seqlen_k) {
      const A* const row = this->bias_ + l * kBlockN;
      for (int64_t t = 0; t < tile.n; ++t) out[t] += row[t];
    }
  }

  typename P::Right grads_view(int64_t offset) const {
    if constexpr (P::kPairs) {
      (void)offset;
      return P::right_view(grads_right_, kRightPlane);
    } else {
      return P::right_view(grads_ + offset * kGroupStride, 0);
    }
  }

  static void clear_rows(LeftElement* a, LeftElement* b, int64_t begin, int64_t end) {
    for (int part = 0; part < P::kParts; ++part) {
      for (int64_t t = begin; t < end; ++t) {
        memset(a + part * kPlane + t * kGroupStride, 0, kRows * sizeof(LeftElement));
        memset(b + part * kPlane + t * kGroupStride, 0, kRows * sizeof(LeftElement));
      }
    }
  }

  // Query tiles [begin, end) of the group that starts at slot `first`. Their weights and dS for
  // keys [lo, hi) are stored, but not yet accumulated into dK and dV.
  struct Run {
    int64_t first, begin, end, lo, hi;
  };

  // Accumulates the contribution of a run into dK and dV.
  void add_run(const Run& run, A* grad_key, A* grad_value) {
    const int64_t steps = (run.end - run.begin) * kRows, m = run.hi - run.lo;
    if (steps == 0) return;
    const int64_t at = run.lo * kGroupStride + run.begin * kRows, slot = run.first + run.begin;
    const typename P::Left kept = P::left_view(kept_ + at, kGroupStride, kPlane);
    const typename P::Right out =
        P::rows_view(this->grad_out_rows_at(slot), p_.head_dim_v, this->query_tiles_);
    for (int64_t d = 0; d < wide_v_; d += kRows) {
      P::template multiply<Layout::kRowMajor, Into::kAdd>(
          m, steps, kept, out.from_lane(d), grad_value + run.lo * wide_v_ + d, wide_v_);
    }
    const typename P::Left grads = P::left_view(grads_ + at, kGroupStride, kPlane);
    const typename P::Right query =
        P::rows_view(this->query_rows_at(slot), p_.head_dim, this->query_tiles_);
    for (int64_t d = 0; d < wide_; d += kRows) {
      P::template multiply<Layout::kRowMajor, Into::kAdd>(m, steps, grads, query.from_lane(d),
                                                          grad_key + run.lo * wide_ + d, wide_);
    }
  }

  void write_grad_query(int64_t b, int64_t h, A* query_tiles) {
    const SequenceRows queries = query_rows(p_, b);
    const ResultRows<T> out(p_, bwd_.grad_query, bwd_.grad_query_strides, queries, h);
    const A scale = static_cast<A>(p_.scale);
    for (int64_t i = 0; i < queries.count; i += kRows) {
      A* const query_tile = query_tiles + i * wide_;
      for (int64_t e = 0; e < p_.head_dim * kRows; ++e) query_tile[e] *= scale;
      write_query_tile<T>(query_tile, p_.head_dim, min64(kRows, queries.count - i), rows_, out, i);
    }
  }

  void write_rows(A* rows, int64_t wide, int64_t dim, double factor, int64_t begin, int64_t end,
                  void* result, const int64_t strides[3], int64_t b, int64_t h) const {
    const ResultRows<T> out(p_, result, strides, key_rows(p_, b), h);
    for (int64_t j = begin; j < end; ++j) {
      A* const row = rows + (j - begin) * wide;
      for (int64_t d = 0; d < dim; ++d) row[d] *= static_cast<A>(factor);
      out.store(j, row, dim);
    }
  }

  static constexpr int64_t kPlane = kBlockN * kGroupStride;
  static constexpr int64_t kRightPlane = kBlockN * kRows / 2;  // in pairs; only if P::kPairs

  const bool has_bias_;  // accumulates the bias gradient
  const int64_t block_keys_ = max64(wide_, wide_v_) > kMostFeatures ? kBlockN / 2 : kBlockN;
  int64_t chunk_ = 0, chunk_begin_ = 0;  // query tiles per chunk; first of this chunk
  typename P::Left k_, v_;
  KeyColumns<T> key_columns_;
  LeftElement* key_columns_buffer_;  // (head_dim, kBlockN)
  LeftElement *kept_, *grads_;       // (kBlockN, kGroup * kRows): weights after dropout; dS
  RightElement* grads_right_;        // (kBlockN, kRows): dS of one query tile
  A *grad_key_, *grad_value_;        // (keys of a split, head_dim or head_dim_v)
  A* grad_query_;                    // (query tiles, head_dim, kRows), before scaling
  A* rows_;                          // (kRows, head_dim)
};

}  // namespace
}  // namespace fused_attn
