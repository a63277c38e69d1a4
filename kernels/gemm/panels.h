// Small-batch GEMM on packed weights: out[M][N] = x[M][K] * weight[N][K]^T.
#pragma once

#include "../abi.h"
#include "amx.h"
#include "tile.h"
#include "vnni.h"

namespace labkit {

// All rows of a GEMM, in register tiles of nearly equal size. 13 rows are 6 and 7: with 12 and 1, the second tile would
// load all weights for a single row and wait for most of them.
template <class T>
class RegisterRows {
 public:
  RegisterRows(const Operand<T>* x, int64_t ldx, int64_t rows, ThreadScratch&)
      : x_(x), ldx_(ldx), rows_(rows), tiles_((rows + kMaxRows - 1) / kMaxRows) {}

  bool one_tile() const { return tiles_ == 1; }  // each weight is used once, so there is nothing to keep in a cache
  int64_t padded() const { return rows_; }       // rows that `multiply` writes

  // out[padded][32] (+)= the rows' columns [k, k + depth) * w[depth][32]. `reading`: of w; null if it is in a cache.
  void multiply(const Reading* reading, const T* w, int64_t k, int64_t depth, bool accumulate, float* out) const {
    for (int64_t t = 0; t < tiles_; ++t) {
      const int64_t first = rows_ * t / tiles_, count = rows_ * (t + 1) / tiles_ - first;
      tile_rows<T>(int(count), w, x_ + first * ldx_ + k, ldx_, depth, accumulate, out + first * kBlock,
                   reading ? ahead_of(*reading, w, depth, t, tiles_) : kNothingAhead);
    }
  }

 private:
  const Operand<T>* x_;
  int64_t ldx_, rows_, tiles_;
};

// A thread's part of a GEMM whose weights are multiplied as they are stored. One tile takes a block's whole depth in
// one pass, and its sums stay in registers; several tiles take kDepth at a time.
template <class T, class Rows, class Finish>
void stored_part(Team& team, int thread, const Linear& linear, const Rows& rows, ThreadScratch& scratch,
                 Finish&& finish) {
  const int64_t padded = padded_depth<T>(linear.inputs), pass = rows.one_tile() ? padded : kDepth;
  const Reading reading = team.reading();
  float* acc = scratch.sums.get<float>(rows.padded() * kBlock);
  team.deal(blocks_of(linear.outputs), thread, [&](int64_t block) {
    const T* w = static_cast<const T*>(linear.weight) + block * padded * kBlock;
    for (int64_t k = 0; k < padded; k += pass)
      rows.multiply(&reading, w + k * kBlock, k, padded - k < pass ? padded - k : pass, k > 0, acc);
    finish(block, acc);
  });
}

// Widens `depth` k of int8 weights to bf16 pairs or floats, which hold every int8 exactly, and prefetches what follows.
// For many rows: the weights are converted once per pass instead of once per tile.
template <class W>
void widen(Reading reading, const int8_t* w, int64_t depth, W* out) {
  for (int64_t k = 0; k < depth; k += 4) {
    const int8_t* from = w + k * kBlock;
    for (int line = 0; line < 2; ++line)
      prefetch(reading.between(), reinterpret_cast<const char*>(from) + reading.ahead + line * kLine);
    for (int v = 0; v < kVectors; ++v) {
      vi quads;
      std::memcpy(&quads, from + v * sizeof quads, sizeof quads);
      for (int n = 0; n < 4; n += 2) {
        const vf first = nth_byte(quads, n), second = nth_byte(quads, n + 1);
        if constexpr (std::is_same_v<W, bf16>) {
          const vu pairs = ((vu)first >> 16) | ((vu)second & 0xffff0000u);
          std::memcpy(out + ((k + n) * kBlock + v * kWidth * 2), &pairs, sizeof pairs);
        } else {
          store(out + (k + n) * kBlock + v * kWidth, first);
          store(out + (k + n + 1) * kBlock + v * kWidth, second);
        }
      }
    }
  }
}

// A thread's part of a GEMM with int8 weights, multiplied as W. The inputs of a group share a scale, so a group is
// summed without it and the sum is scaled once, before the groups are added up.
template <class W, class Rows, class Finish>
void quantised_part(Team& team, int thread, const Linear& linear, const Rows& rows, ThreadScratch& scratch,
                    Finish&& finish) {
  constexpr bool kWidens = !std::is_same_v<W, int8_t>;
  const int64_t padded = padded_depth<int8_t>(linear.inputs), groups = (padded + linear.group - 1) / linear.group;
  const int64_t sums = rows.padded() * kBlock, pass = kWidens ? kDepth : padded;
  float* acc = scratch.sums.get<float>(2 * sums);
  float* of_group = groups == 1 ? acc : acc + sums;
  const Reading reading = team.reading();
  W* slice = scratch.slice.get<W>(kWidens ? kDepth * kBlock : 0);
  team.deal(blocks_of(linear.outputs), thread, [&](int64_t block) {
    const int8_t* w = static_cast<const int8_t*>(linear.weight) + block * padded * kBlock;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t begin = group * linear.group, after = begin + linear.group, end = after < padded ? after : padded;
      for (int64_t k = begin; k < end; k += pass) {
        const int64_t depth = end - k < pass ? end - k : pass;
        if constexpr (kWidens) {
          widen(reading, w + k * kBlock, depth, slice);
          rows.multiply(nullptr, slice, k, depth, k > begin, of_group);
        } else {
          rows.multiply(&reading, w + k * kBlock, k, depth, k > begin, of_group);
        }
      }
      const float* scales = linear.scales + (block * groups + group) * kBlock;
      for (int64_t m = 0; m < sums; m += kBlock)
        for (int v = 0; v < kBlock; v += kWidth) {
          const vf scaled = load(of_group + m + v) * load(scales + v);
          store(acc + m + v, group ? load(acc + m + v) + scaled : scaled);
        }
    }
    finish(block, acc);
  });
}

// This thread's part of out = x * weight^T. `finish(block, acc)` gets the sums of one block for all rows,
// acc[rows][32], while they are in the cache: bias, activation and argmax are applied there, without another pass over
// memory.
template <class T, class Finish>
void gemm_part(Team& team, int thread, const Linear& linear, const Activation<T>* x, int64_t ldx, int64_t rows,
               ThreadScratch& scratch, Finish&& finish) {
  if constexpr (std::is_same_v<T, int8_t>) {
    using Pairs = std::conditional_t<std::is_same_v<Activation<bf16>, bf16>, bf16, float>;
    if (!linear.scales) return gemm_part<bf16>(team, thread, linear, x, ldx, rows, scratch, finish);
#if defined(LABKIT_HAS_VNNI)
    if (rows <= kMostVnniRows) return vnni_part(team, thread, linear, x, ldx, rows, scratch, finish);
#else  // then there are no bf16 products either, and the activations are floats
    if (rows <= kMaxRows)
      return quantised_part<T>(team, thread, linear, RegisterRows<T>(x, ldx, rows, scratch), scratch, finish);
#endif
#if defined(LABKIT_HAS_AMX)
    return quantised_part<Pairs>(team, thread, linear, AmxRows(x, ldx, rows, scratch), scratch, finish);
#else
    return quantised_part<Pairs>(team, thread, linear, RegisterRows<Pairs>(x, ldx, rows, scratch), scratch, finish);
#endif
  } else {
#if defined(LABKIT_HAS_AMX)
    if constexpr (std::is_same_v<T, bf16>)
      if (rows > kFewRows) return stored_part<T>(team, thread, linear, AmxRows(x, ldx, rows, scratch), scratch, finish);
#endif
    stored_part<T>(team, thread, linear, RegisterRows<T>(x, ldx, rows, scratch), scratch, finish);
  }
}

// One weight of a matrix, as a float.
template <class T>
float weight_of(const Linear& linear, int64_t n, int64_t k) {
  if constexpr (std::is_same_v<T, int8_t>) {
    if (!linear.scales) return weight_of<bf16>(linear, n, k);
    const int64_t groups = (padded_depth<T>(linear.inputs) + linear.group - 1) / linear.group;
    const float scale = linear.scales[(n / kBlock * groups + k / linear.group) * kBlock + n % kBlock];
    return weight_at(static_cast<const T*>(linear.weight), linear.inputs, n, k) * scale;
  } else {
    return weight_at(static_cast<const T*>(linear.weight), linear.inputs, n, k);
  }
}

}  // namespace labkit
