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

// The most queries of a unit of work. All of them use a block of keys and values while it is in a cache.
constexpr int kMostQueries = 16;

constexpr int64_t kBlockBytes = 16 << 10;  // of a block's keys; its values take as many
constexpr int64_t kMostBlockSlots = 256;

// Queries that read the same keys and values: of one or several tokens, and of the heads that share a KV head.
struct Queries {
  int count;
  const float* rows;  // [count][padded_dim]
  Sight sights[kMostQueries];

  Range seen() const { return seen_by(sights, count); }
};

// The stored numbers of kCount vectors. Two vectors of bf16 are one vector of 32-bit lanes, whose lower and upper
// halves become floats with one instruction each, so their order is: even numbers, then odd numbers. Queries and
// contexts have the same order meanwhile.
template <class T, int kCount>
[[gnu::always_inline]] inline void load_numbers(const T* from, vf (&to)[kCount]) {
#pragma GCC unroll 4
  for (int c = 0; c < kCount; ++c) {
    if constexpr (std::is_same_v<T, bf16>) {
      if (c + 1 < kCount) {
        vu both;
        std::memcpy(&both, from + c * kWidth, sizeof both);
        to[c] = (vf)(both << 16);
        to[++c] = (vf)(both & 0xffff0000u);
        continue;
      }
    }
    to[c] = load(from + c * kWidth);
  }
}

// Gives a row of floats the order of `load_numbers`, or takes it back.
template <class T>
void reorder(float* row, int64_t dim, bool back) {
  if constexpr (!std::is_same_v<T, bf16>) return;
  for (int64_t d = 0; d + 2 * kWidth <= dim; d += 2 * kWidth) {
    float copy[2 * kWidth];
    std::memcpy(copy, row + d, sizeof copy);
    for (int i = 0; i < kWidth; ++i)
      for (int odd = 0; odd < 2; ++odd) {
        const int apart = odd * kWidth + i, together = 2 * i + odd;
        row[d + (back ? together : apart)] = copy[back ? apart : together];
      }
  }
}

// Prefetches `bytes` at `from`, if it is not null.
template <class T>
[[gnu::always_inline]] inline void prefetch_bytes(Into into, const T* from, int64_t bytes) {
  if (from)
    for (int64_t line = 0; line < bytes; line += kLine) prefetch(into, reinterpret_cast<const char*>(from) + line);
}

// sums[r][i] += q_r . k_i over kCount vectors of R queries and four keys.
template <class T, int R, int kCount>
[[gnu::always_inline]] inline void multiply_keys(const float* q, int padded_dim, const T* const (&keys)[4], int d,
                                                 vf (&acc)[R][4]) {
  vf key[4][kCount];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) load_numbers(keys[i] + d, key[i]);
#pragma GCC unroll 4
  for (int c = 0; c < kCount; ++c)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf query = load(q + r * padded_dim + d + c * kWidth);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) acc[r][i] += query * key[i][c];
    }
}

// scores[r][j] = scale * q_r . k_j for R queries and `count` keys; for int8 keys without the keys' own scales.
// Prefetches as many bytes from `next`, if it is not null.
template <class T, int R>
void score(const float* q, const T* keys, int padded_dim, int64_t count, float scale, Into into, const T* next,
           float* scores) {
  for (int64_t j = 0; j < count; j += 4) {
    const int n = count - j < 4 ? int(count - j) : 4;
    prefetch_bytes(into, next ? next + j * padded_dim : nullptr, 4 * padded_dim * int64_t(sizeof(T)));
    const T* k[4];  // past the end the last key is repeated; its scores are not used
    for (int i = 0; i < 4; ++i) k[i] = keys + (j + (i < n ? i : n - 1)) * padded_dim;
    vf acc[R][4] = {};
    int d = 0;
    for (; d + 2 * kWidth <= padded_dim; d += 2 * kWidth) multiply_keys<T, R, 2>(q, padded_dim, k, d, acc);
    if (d < padded_dim) multiply_keys<T, R, 1>(q, padded_dim, k, d, acc);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums(acc[r], scale, scores + r * kMostBlockSlots + j);
  }
}

// out_r = factor_r * out_r + the sum of p[r][j] * v_j over `count` values, for kCount vectors of the head. Their sums
// stay in registers over all slots.
template <class T, int R, int kCount>
void add_vectors(const T* values, int padded_dim, int64_t count, const float* p, const float* factors, Into into,
                 const T* next, float* out) {
  constexpr int64_t kBytes = kCount * kWidth * sizeof(T);
  vf acc[R][kCount];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kCount; ++c) acc[r][c] = load(out + r * padded_dim + c * kWidth) * factors[r];
  for (int64_t j = 0; j < count; ++j) {
    prefetch_bytes(into, next ? next + j * padded_dim : nullptr, kBytes);
    vf value[kCount];
    load_numbers(values + j * padded_dim, value);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf weight = broadcast(p[r * kMostBlockSlots + j]);
#pragma GCC unroll 4
      for (int c = 0; c < kCount; ++c) acc[r][c] += weight * value[c];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kCount; ++c) store(out + r * padded_dim + c * kWidth, acc[r][c]);
}

// As `add_vectors`, for all vectors of the head. Prefetches as many bytes from `next`, if it is not null.
template <class T, int R>
void add_values(const T* values, int padded_dim, int64_t count, const float* p, const float* factors, Into into,
                const T* next, float* out) {
  constexpr int kMost = kWidth == 4 ? 2 : 4;  // there are fewer registers of 128 bits
  int d = 0;
  const auto add = [&](auto vectors) {
    add_vectors<T, R, vectors.value>(values + d, padded_dim, count, p, factors, into, next ? next + d : nullptr,
                                     out + d);
    d += vectors.value * kWidth;
  };
  while (d + kMost * kWidth <= padded_dim) add(std::integral_constant<int, kMost>());
  if (d + 2 * kWidth <= padded_dim) add(std::integral_constant<int, 2>());
  if (d < padded_dim) add(std::integral_constant<int, 1>());
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
// Both the queries and the context have the order of `load_numbers`. next: the keys that the thread reads afterwards. A
// value's scale is applied to its probability, so that the values are multiplied in their stored type.
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
