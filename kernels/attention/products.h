// The products of attention over the cache, in floats: of queries with keys, and of probabilities with values. Keys and
// values are widened as they are read.
#pragma once

#include "../team.h"
#include "slots.h"

namespace labkit {

// Query rows that share one pass over keys and values. 4 queries x 4 keys are 16 sums, enough to cover the latency of a
// multiply-add, and leave AVX-512 registers for the operands.
constexpr int kQueries = 4;

constexpr int64_t kMostBlockSlots = 256;  // the distance between the scores of two queries

// Prefetches `bytes` at `from` into the second cache level, if it is not null. On a Zen 4 prefetches into the first
// level made attention slower than none did.
template <class T>
[[gnu::always_inline]] inline void prefetch_bytes(const T* from, int64_t bytes) {
  if (from)
    for (int64_t line = 0; line < bytes; line += kLine)
      prefetch(Into::kSecond, reinterpret_cast<const char*>(from) + line);
}

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

// out_r = factor_r * out_r + the sum of p[r][j] * v_j over `count` values, for kCount vectors of the head. Their sums
// stay in registers over all slots.
template <class T, int R, int kCount>
void add_vectors(const T* values, int padded_dim, int64_t count, const float* p, const float* factors, const T* next,
                 float* out) {
  constexpr int64_t kBytes = kCount * kWidth * sizeof(T);
  vf acc[R][kCount];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kCount; ++c) acc[r][c] = load(out + r * padded_dim + c * kWidth) * factors[r];
  for (int64_t j = 0; j < count; ++j) {
    prefetch_bytes(next ? next + j * padded_dim : nullptr, kBytes);
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

// The products of some queries with keys and values of T. Its rows belong to the queries: [count][padded_dim].
template <class T>
struct FloatProducts {
  // Makes the row of a query an operand of `score`. Returns the unit of its scores.
  static float put_query(float* row, int64_t dim) {
    reorder(row, dim, false);
    return 1.0f;
  }

  // Makes the probabilities of a query over `count` slots an operand of `add`. Returns their unit.
  static float put_weights(float*, int64_t) { return 1.0f; }

  // scores[r][j] = scales[r] * q_r . k_j for R queries and `count` keys; for int8 keys without the keys' own scales.
  // Prefetches as many bytes from `next`, if it is not null.
  template <int R>
  static void score(const float* q, const T* keys, int padded_dim, int64_t count, const float* scales, const T* next,
                    float* scores) {
    for (int64_t j = 0; j < count; j += 4) {
      const int n = count - j < 4 ? int(count - j) : 4;
      prefetch_bytes(next ? next + j * padded_dim : nullptr, 4 * padded_dim * int64_t(sizeof(T)));
      const T* k[4];  // past the end the last key is repeated; its scores are not used
      for (int i = 0; i < 4; ++i) k[i] = keys + (j + (i < n ? i : n - 1)) * padded_dim;
      vf acc[R][4] = {};
      int d = 0;
      for (; d + 2 * kWidth <= padded_dim; d += 2 * kWidth) multiply_keys<T, R, 2>(q, padded_dim, k, d, acc);
      if (d < padded_dim) multiply_keys<T, R, 1>(q, padded_dim, k, d, acc);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums(acc[r], scales[r], scores + r * kMostBlockSlots + j);
    }
  }

  // context_r = factor_r * context_r + unit_r * the sum of weight[r][j] * v_j over `count` values. Prefetches as many
  // bytes from `next`, if it is not null.
  template <int R>
  static void add(const T* values, int padded_dim, int64_t count, const float* weights, const float*,
                  const float* factors, const T* next, float* context) {
    constexpr int kMost = kWidth == 4 ? 2 : 4;  // there are fewer registers of 128 bits
    int d = 0;
    const auto add_some = [&](auto vectors) {
      add_vectors<T, R, vectors.value>(values + d, padded_dim, count, weights, factors, next ? next + d : nullptr,
                                       context + d);
      d += vectors.value * kWidth;
    };
    while (d + kMost * kWidth <= padded_dim) add_some(std::integral_constant<int, kMost>());
    if (d + 2 * kWidth <= padded_dim) add_some(std::integral_constant<int, 2>());
    if (d < padded_dim) add_some(std::integral_constant<int, 1>());
  }

  // Gives the sums of a context the order of its numbers.
  static void put_in_order(float* row, int64_t dim) { reorder(row, dim, true); }

 private:
  // Gives a row of floats the order of `load_numbers`, or takes it back.
  static void reorder(float* row, int64_t dim, bool back) {
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
};

}  // namespace labkit
