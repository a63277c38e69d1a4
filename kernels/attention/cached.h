// Attention of few queries, of one new token or some, which reads keys and values from the cache where they are.
//
// A block of slots at a time: scores, softmax, weighted values. While keys are multiplied the values of the block are
// prefetched, and while values are multiplied the keys of the next block, so that the memory is never idle.
#pragma once

#include "../team.h"
#include "slots.h"
#include "softmax.h"

namespace labkit {

// Query rows that share one pass over keys and values. 4 queries x 4 keys are 16 sums, enough to cover the latency of a
// multiply-add, and leave AVX-512 registers for the operands.
constexpr int kQueries = 4;

// Of a unit of work. All of them use a block of keys and values while it is in the first-level cache.
constexpr int kMostQueries = 16;

constexpr int64_t kBlockBytes = 8 << 10;  // of a block's keys; its values take as many
constexpr int64_t kMostBlockSlots = 256;

// Queries that read the same keys and values: of one or several tokens, and of the heads that share a KV head.
struct Queries {
  int count;
  const float* rows;  // [count][padded_dim]
  Sight sights[kMostQueries];

  Range seen() const { return seen_by(sights, count); }
};

// scores[r][j] = scale * q_r . k_j for R queries and `count` keys; for int8 keys without the keys' own scales. Prefetches
// as many bytes from `next`, if it is not null.
template <class T, int R>
void score(const float* q, const T* keys, int padded_dim, int64_t count, float scale, Into into, const T* next,
           float* scores) {
  constexpr int kKeys = 4;
  const int64_t group_bytes = kKeys * padded_dim * sizeof(T);
  for (int64_t j = 0; j < count; j += kKeys) {
    const int n = count - j < kKeys ? int(count - j) : kKeys;
    if (next)
      for (int64_t line = 0; line < group_bytes; line += kLine)
        prefetch(into, reinterpret_cast<const char*>(next + j * padded_dim) + line);
    const T* k[kKeys];  // past the end the last key is repeated; its scores are not used
    for (int i = 0; i < kKeys; ++i) k[i] = keys + (j + (i < n ? i : n - 1)) * padded_dim;
    vf acc[R][kKeys] = {};
    for (int d = 0; d < padded_dim; d += kWidth) {
      vf key[kKeys];
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) key[i] = load(k[i] + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const vf query = load(q + r * padded_dim + d);
#pragma GCC unroll 4
        for (int i = 0; i < kKeys; ++i) acc[r][i] += query * key[i];
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums(acc[r], scale, scores + r * kMostBlockSlots + j);
  }
}

// out_r = factor_r * out_r + the sum of p[r][j] * v_j over `count` values. A few vectors of the head at a time, so that
// their sums stay in registers over all slots; with 128-bit vectors there are fewer registers. Prefetches as many bytes
// from `next`, if it is not null.
template <class T, int R>
void add_values(const T* values, int padded_dim, int64_t count, const float* p, const float* factors, Into into,
                const T* next, float* out) {
  constexpr int kChunk = kWidth == 4 ? 2 : 4;
  for (int d = 0; d < padded_dim; d += kChunk * kWidth) {
    const int vectors = (padded_dim - d) / kWidth < kChunk ? (padded_dim - d) / kWidth : kChunk;
    const int64_t bytes = vectors * kWidth * int64_t(sizeof(T));
    vf acc[R][kChunk] = {};
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < vectors; ++c) acc[r][c] = load(out + r * padded_dim + d + c * kWidth) * factors[r];
    for (int64_t j = 0; j < count; ++j) {
      const T* v = values + j * padded_dim + d;
      if (next)
        for (int64_t line = 0; line < bytes; line += kLine)
          prefetch(into, reinterpret_cast<const char*>(next + j * padded_dim + d) + line);
      if (vectors == kChunk) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const vf weight = broadcast(p[r * kMostBlockSlots + j]);
#pragma GCC unroll 4
          for (int c = 0; c < kChunk; ++c) acc[r][c] += weight * load(v + c * kWidth);
        }
      } else {
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < vectors; ++c) acc[r][c] += p[r * kMostBlockSlots + j] * load(v + c * kWidth);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < vectors; ++c) store(out + r * padded_dim + d + c * kWidth, acc[r][c]);
  }
}

// Calls use(rows, first) for tiles of up to kQueries of `count` queries; rows: an integral constant.
template <int R = kQueries, class Use>
void by_tiles(int count, Use&& use) {
  int first = 0;
  for (; first + R <= count; first += R) use(std::integral_constant<int, R>(), first);
  if constexpr (R > 1)
    if (first < count) by_tiles<R - 1>(count - first, [&](auto rows, int at) { use(rows, first + at); });
}

// The context of the queries over some slots. sums: [count], context: [count][padded_dim], not yet divided by the sums.
// next: the keys that the thread reads afterwards. A value's scale is applied to its probability, so that the values
// are multiplied in their stored type.
template <class T>
void attend(const Queries& queries, const HeadSlots<T>& head, const AttentionParams& params, const SlotFacts& facts,
            Range slots, Into into, const T* next, Softmax* sums, float* context) {
  const int64_t dim = head.padded_dim;
  const int64_t whole = kBlockBytes / (dim * int64_t(sizeof(T))) / kWidth * kWidth;
  const int64_t step = whole < kWidth ? kWidth : whole < kMostBlockSlots ? whole : kMostBlockSlots;
  alignas(64) float scores[kMostQueries * kMostBlockSlots];
  float factors[kMostQueries];
  std::memset(context, 0, size_t(queries.count * dim) * sizeof(float));
  for (int r = 0; r < queries.count; ++r) sums[r] = Softmax();
  for (int64_t begin = slots.begin; begin < slots.end; begin += step) {
    const int64_t count = slots.end - begin < step ? slots.end - begin : step;
    const T *keys = head.keys + begin * dim, *values = head.values + begin * dim;
    const T* next_keys = begin + count < slots.end ? keys + count * dim : next;
    by_tiles(queries.count, [&](auto rows, int first) {
      score<T, rows.value>(queries.rows + first * dim, keys, int(dim), count, params.scale, into,
                           first == 0 ? values : nullptr, scores + first * kMostBlockSlots);
    });
    for (int r = 0; r < queries.count; ++r) {
      float* row = scores + r * kMostBlockSlots;
      if constexpr (HeadSlots<T>::kScaled) multiply_by_scales(head.key_scales + begin, count, row);
      factors[r] = sums[r].add(queries.sights[r], facts, params.cap, begin, count, row);
      if constexpr (HeadSlots<T>::kScaled) multiply_by_scales(head.value_scales + begin, count, row);
    }
    by_tiles(queries.count, [&](auto rows, int first) {
      add_values<T, rows.value>(values, int(dim), count, scores + first * kMostBlockSlots, factors + first, into,
                                first == 0 ? next_keys : nullptr, context + first * dim);
    });
  }
}

}  // namespace labkit
