// Region 2: scores, softmax and context of new queries against the KV cache, which is never transposed or copied.
//
// The cache keeps each head's keys and values in consecutive slots, [batch][KV head][slot][head_dim], so the slots of a
// head are one forward stream. The scores of a tile of queries for all slots fit in the second-level cache for contexts
// of about ten thousand tokens, so there is no running softmax: scores, softmax and values are three plain passes.
#pragma once

#include "../gemm/cpp_impl.cpp"

#include "prompt.h"

namespace labkit {

// Query rows that share one pass over keys and values. 4 queries x 4 keys are 16 sums, enough to cover the latency of a
// multiply-add, and leave AVX-512 registers for the operands.
constexpr int kQueries = 4;
constexpr int kMostQueries = kMaxRows > kQueries ? kMaxRows : kQueries;  // of a tile, also in a prompt

// Queries that read the same keys and values: neighbouring tokens of one head, or the heads that share a KV head.
struct QueryTile {
  int count;
  const float* q[kMostQueries];
  int64_t low[kMostQueries], high[kMostQueries];  // slots [low, high) are seen
  float slope[kMostQueries];

  // The range from the first to the last slot that any of the queries sees.
  Range seen() const {
    Range slots{low[0], high[0]};
    for (int r = 1; r < count; ++r) {
      slots.begin = low[r] < slots.begin ? low[r] : slots.begin;
      slots.end = high[r] > slots.end ? high[r] : slots.end;
    }
    return {slots.begin, slots.end < slots.begin ? slots.begin : slots.end};
  }
};

// How to read a KV cache that was last read a step ago, so that the weights have evicted it since.
struct Cold {
  Reading reading;
  int64_t to_next;  // elements from a KV head's keys to the next one's
};

constexpr int64_t kNextBytes = 16 << 10;  // prefetched bytes of the next head's keys; the processor reads on by itself

// scores[r][j] = scale * q_r . k_j for the slots [begin, end); for int8 keys without the keys' own scales. `cold`: null
// if the keys are in a processor cache. Else values and the scales of both are prefetched with the keys, so that they
// are in a cache when the last pass reads them.
template <class T, int R>
void score(const QueryTile& tile, const HeadSlots<T>& head, float scale, int64_t begin, int64_t end, const Cold* cold,
           float* scores, int64_t stride) {
  constexpr int kKeys = 4;
  const int padded_dim = head.padded_dim;
  const T *keys = head.keys, *values = head.values;
  const int64_t group_bytes = kKeys * padded_dim * sizeof(T);
  for (int64_t j = begin; j < end; j += kKeys) {
    const int n = end - j < kKeys ? int(end - j) : kKeys;
    if (cold) {
      const auto [into, ahead] = cold->reading;
      for (int64_t line = 0; line < group_bytes; line += kLine) {
        prefetch(into, reinterpret_cast<const char*>(keys + j * padded_dim) + ahead + line);
        prefetch(into, reinterpret_cast<const char*>(values + j * padded_dim) + line);
      }
      if (HeadSlots<T>::kScaled && (j - begin) % int64_t(kLine / sizeof(bf16)) == 0) {
        prefetch(into, reinterpret_cast<const char*>(head.key_scales + j));
        prefetch(into, reinterpret_cast<const char*>(head.value_scales + j));
      }
    }
    const T* k[kKeys];  // past the end the last key is repeated; its scores are not used
    for (int i = 0; i < kKeys; ++i) k[i] = keys + (j + (i < n ? i : n - 1)) * padded_dim;
    vf acc[R][kKeys] = {};
    for (int d = 0; d < padded_dim; d += kWidth) {
      vf key[kKeys];
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) key[i] = load(k[i] + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const vf query = load(tile.q[r] + d);
#pragma GCC unroll 4
        for (int i = 0; i < kKeys; ++i) acc[r][i] += query * key[i];
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums(acc[r], scale, scores + r * stride + j - begin);
  }
}

// Prefetches the beginning of the next head's keys while this head's softmax computes and the memory would be idle.
// With many sequences the heads are short, and each began with a wait (a third of the attention of 32 sequences on a
// Zen 4).
template <class T>
void prefetch_next_head(const Cold& cold, const T* keys, int padded_dim, int64_t begin, int64_t end) {
  const char* next = reinterpret_cast<const char*>(keys + cold.to_next + begin * padded_dim);
  const int64_t all = (end - begin) * padded_dim * int64_t(sizeof(T)), bytes = all < kNextBytes ? all : kNextBytes;
  for (int64_t line = 0; line < bytes; line += kLine) prefetch(cold.reading.between(), next + line);
}

// out_r = sum over j of p[r][j] * v_j. A few vectors of the head at a time, so that their sums stay in registers over
// all slots; with 128-bit vectors there are fewer registers.
template <class T, int R>
void weighted_values(const T* values, int padded_dim, int64_t begin, int64_t end, const float* p, int64_t stride,
                     float (*out)[kMostDim]) {
  constexpr int kChunk = kWidth == 4 ? 2 : 4;
  for (int d = 0; d < padded_dim; d += kChunk * kWidth) {
    const int vectors = (padded_dim - d) / kWidth < kChunk ? (padded_dim - d) / kWidth : kChunk;
    vf acc[R][kChunk] = {};
    if (vectors == kChunk) {
      for (int64_t j = begin; j < end; ++j) {
        const T* v = values + j * padded_dim + d;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const vf weight = broadcast(p[r * stride + j - begin]);
#pragma GCC unroll 4
          for (int c = 0; c < kChunk; ++c) acc[r][c] += weight * load(v + c * kWidth);
        }
      }
    } else {
      for (int64_t j = begin; j < end; ++j)
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < vectors; ++c)
            acc[r][c] += p[r * stride + j - begin] * load(values + j * padded_dim + d + c * kWidth);
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < vectors; ++c) store(out[r] + d + c * kWidth, acc[r][c]);
  }
}

// Turns the scores of the slots [begin, end) into probabilities in place. The rows of a tile share the slots that any
// of them sees, so slots that are hidden or outside [low, high) of this row get 0.
inline void softmax(const QueryTile& tile, int r, const uint8_t* visible, const int32_t* key_positions, float cap,
                    int64_t begin, int64_t end, float* s) {
  const int64_t count = end - begin, low = tile.low[r] - begin, high = tile.high[r] - begin;
  if (cap != 0.0f)
    for (int64_t j = 0; j < count; j += kWidth) store(s + j, soft_capped(load(s + j), cap));
  if (tile.slope[r] != 0.0f)
    for (int64_t j = low; j < high; ++j) s[j] += tile.slope[r] * float(key_positions[begin + j]);
  for (int64_t j = 0; j < low; ++j) s[j] = -INFINITY;
  for (int64_t j = high < 0 ? 0 : high; j < count; ++j) s[j] = -INFINITY;
  if (visible)
    for (int64_t j = low; j < high; ++j)
      if (!visible[begin + j]) s[j] = -INFINITY;
  const int64_t padded = round_up(count, kWidth);
  for (int64_t j = count; j < padded; ++j) s[j] = -INFINITY;
  vf top = broadcast(-INFINITY);
  for (int64_t j = 0; j < padded; j += kWidth) top = max(load(s + j), top);
  const float peak = maximum(top);
  if (peak == -INFINITY) {  // a padding row sees no slot
    std::memset(s, 0, size_t(padded) * 4);
    return;
  }
  vf total = {};
  for (int64_t j = 0; j < padded; j += kWidth) {
    const vf e = exp(load(s + j) - peak);
    store(s + j, e);
    total += e;
  }
  const vf inverse = broadcast(1.0f / sum(total));
  for (int64_t j = 0; j < padded; j += kWidth) store(s + j, load(s + j) * inverse);
}

// A value's scale is applied to its probability, so that the values are multiplied in their stored type.
template <class T, int R = kQueries>
void attend(const QueryTile& tile, const HeadSlots<T>& head, const AttentionParams& params, const uint8_t* visible,
            const int32_t* key_positions, const Cold* cold, float* scores, int64_t stride, float (*out)[kMostDim]) {
  if constexpr (R > 1) {
    if (tile.count < R) return attend<T, R - 1>(tile, head, params, visible, key_positions, cold, scores, stride, out);
  }
  const auto [begin, end] = tile.seen();
  score<T, R>(tile, head, params.scale, begin, end, cold, scores, stride);
  if (cold) prefetch_next_head(*cold, head.keys, head.padded_dim, begin, end);
  for (int r = 0; r < R; ++r) {
    float* row = scores + r * stride;
    if constexpr (HeadSlots<T>::kScaled) multiply_by_scales(head.key_scales + begin, end - begin, row);
    softmax(tile, r, visible, key_positions, params.cap, begin, end, row);
    if constexpr (HeadSlots<T>::kScaled) multiply_by_scales(head.value_scales + begin, end - begin, row);
  }
  weighted_values<T, R>(head.values, head.padded_dim, begin, end, scores, stride, out);
}

// As `attend`, for queries of a prompt with a packed head. queries: of the tile, [count][padded_dim].
inline void attend_packed(const PackedHead& head, const QueryTile& tile, const float* queries,
                          const AttentionParams& params, const uint8_t* visible, const int32_t* key_positions,
                          float* scores, int64_t stride, float (*out)[kMostDim]) {
  const Range seen = tile.seen();
  const int64_t low = seen.begin < head.begin() ? head.begin() : seen.begin;  // a padding row sees an empty range
  const int64_t first = head.block_of(low), last = seen.end > low ? head.block_of(seen.end - 1) + 1 : first;
  const int64_t begin = head.first_slot(first), end = seen.end > begin ? seen.end : begin;
  head.score(tile.count, queries, params.scale, first, last, scores, stride);
  for (int r = 0; r < tile.count; ++r)
    softmax(tile, r, visible, key_positions, params.cap, begin, end, scores + r * stride);
  head.weigh(tile.count, scores, stride, begin, end, out);
}

// The region. qkv: [rows][qkv_stride] with the rotated queries first; context: [rows][context_stride], one query head
// after the other, followed by zeros up to the deepest padding that a GEMM reads. Ends after a barrier.
//
// The unit of work is one tile of queries of one sequence. With several new tokens a tile is neighbouring tokens of a
// head. With one new token it is the query heads of a KV head, which read the same keys and values. Units are dealt
// out, because under a causal mask late tokens see more slots than early tokens.
//
// T: type of the slots. X: type of the context.
template <class T, class X>
void attend_all(Team& team, int thread, const AttentionParams& params, const Heads& heads, const Rows& rows,
                const Cache& cache, const float* qkv, int64_t qkv_stride, X* context, int64_t context_stride,
                ThreadScratch& scratch) {
  const int group = heads.query / heads.kv;
  const int64_t width = int64_t(heads.query) * heads.dim, padded = padded_depth<int8_t>(width);
  const bool over_tokens = rows.tokens > 1;
  const int64_t slots = cache.past + rows.tokens;
  const bool packs = rows.tokens > 2 * kMaxRows && slots <= kMostPacked;
  const int in_tile = over_tokens ? rows.tokens : group, most = packs ? kMaxRows : kQueries;
  const int64_t tiles = ceil_div(in_tile, most);
  const int64_t outer = over_tokens ? heads.query : heads.kv;
  const int64_t stride = (slots + 2 * kBlock) / kWidth * kWidth;
  float* scores = scratch.scores.get<float>(size_t(most) * size_t(stride + heads.padded_dim));
  float* queries = scores + most * stride;
  float out[kMostQueries][kMostDim];
  PackedHead packed(scratch.head, heads.padded_dim, packs ? slots : 0);
  const Cold cold{team.reading(), cache.capacity * heads.padded_dim};

  team.deal(rows.batch * outer * tiles, thread, [&](int64_t unit) {
    const int64_t b = unit / (outer * tiles), head = unit / tiles % outer;
    const int64_t first = unit % tiles * most;
    QueryTile tile{};
    tile.count = in_tile - first < most ? int(in_tile - first) : most;
    int64_t row_of[kMostQueries], head_of[kMostQueries];
    for (int r = 0; r < tile.count; ++r) {
      const int64_t token = over_tokens ? first + r : 0;
      row_of[r] = b * rows.tokens + token;
      head_of[r] = over_tokens ? head : head * group + first + r;
      float* q = queries + r * heads.padded_dim;
      std::memcpy(q, qkv + row_of[r] * qkv_stride + head_of[r] * heads.dim, size_t(heads.dim) * 4);
      std::memset(q + heads.dim, 0, size_t(heads.padded_dim - heads.dim) * 4);
      tile.q[r] = q;
      tile.high[r] = cache.past + (params.causal ? token + 1 : rows.tokens);
      tile.low[r] = rows.first[b];
      if (params.window && tile.high[r] - params.window > tile.low[r]) tile.low[r] = tile.high[r] - params.window;
      if (tile.low[r] > tile.high[r]) tile.low[r] = tile.high[r];
      tile.slope[r] = params.slopes ? params.slopes[head_of[r]] : 0.0f;
    }
    const int64_t kv_head = over_tokens ? head / group : head;
    const int64_t id = b * heads.kv + kv_head;
    const HeadSlots<T> slots_of_head(cache, id, heads.padded_dim);
    const uint8_t* visible = rows.visible ? rows.visible + b * rows.visible_stride : nullptr;
    const int32_t* key_positions = rows.key_positions ? rows.key_positions + b * rows.visible_stride : nullptr;
    if (packs) {
      packed.pack(id, slots_of_head, rows.first[b], slots);
      attend_packed(packed, tile, queries, params, visible, key_positions, scores, stride, out);
    } else {
      attend<T>(tile, slots_of_head, params, visible, key_positions, over_tokens ? nullptr : &cold, scores, stride,
                out);
    }
    for (int r = 0; r < tile.count; ++r) {
      const int64_t at = head_of[r] * heads.dim, end = at + heads.dim == width ? padded : at + heads.dim;
      to_activation(out[r], heads.dim, end - at, context + row_of[r] * context_stride + at);
    }
  });
  team.barrier();
}

// The region on a cache of T, or of int8 if it has scales.
template <class T>
void attention_region(Team& team, int thread, const AttentionParams& params, const Heads& heads, const Rows& rows,
                      const Cache& cache, const float* qkv, int64_t qkv_stride, Activation<T>* context,
                      int64_t context_stride, ThreadScratch& scratch) {
  if (cache.key_scales)
    attend_all<int8_t>(team, thread, params, heads, rows, cache, qkv, qkv_stride, context, context_stride, scratch);
  else
    attend_all<T>(team, thread, params, heads, rows, cache, qkv, qkv_stride, context, context_stride, scratch);
}

}  // namespace labkit

// queries and context: [rows][query heads * dim].
extern "C" int64_t labkit_attention(const labkit::AttentionParams* params, const labkit::Heads* heads,
                                    const labkit::Rows* rows, const labkit::Cache* cache, const float* queries,
                                    float* context, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    Team team(threads);
    const int64_t count = int64_t(rows->batch) * rows->tokens, width = int64_t(heads->query) * heads->dim;
    const int64_t stride = row_stride(width);
    Act* staged = call_buffers().context.get<Act>(count * stride);
    run_team(team, threads, [&](int thread) {
      attention_region<Stored>(team, thread, *params, *heads, *rows, *cache, queries, width, staged, stride,
                               thread_scratch());
      const Range mine = team.share(count, thread);
      for (int64_t m = mine.begin; m < mine.end; ++m)
        for (int64_t i = 0; i < width; ++i) context[m * width + i] = to_float(staged[m * stride + i]);
    });
    return 0;
  });
}
