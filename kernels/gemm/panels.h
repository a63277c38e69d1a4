// Small-batch GEMM on packed weights: out[M][N] = x[M][K] * weight[N][K]^T.
#pragma once

#include "../abi.h"
#include "amx.h"
#include "quantised.h"
#include "vnni.h"

namespace labkit {

// All rows of a GEMM, in register tiles of nearly equal size. 13 rows are split into 6 and 7. With 12 and 1 the second
// tile would load all weights for a single row and wait for most of them.
template <class T>
class RegisterRows {
 public:
  RegisterRows(const Operand<T>* x, int64_t ldx, int64_t rows, ThreadScratch&)
      : x_(x), ldx_(ldx), rows_(rows), tiles_(ceil_div(rows, kMaxRows)) {}

  bool one_tile() const { return tiles_ == 1; }  // each weight is used once, so a cache need not keep it
  int64_t padded() const { return rows_; }       // rows that `multiply` writes

  // out[padded][32] (+)= columns [k, k + depth) of the rows * w[depth][32]. `reading`: of w; null if it is in a cache.
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

// A thread's part of a GEMM that multiplies weights in their stored type. One tile takes a block's whole depth in one
// pass, and its sums stay in registers. Several tiles take kDepth at a time.
template <class T, class Deal, class Rows, class Finish>
void stored_part(Deal&& deal, const Linear& linear, const Rows& rows, ThreadScratch& scratch, Finish&& finish) {
  const int64_t padded = padded_depth<T>(linear.inputs), pass = rows.one_tile() ? padded : kDepth;
  const Reading reading = deal.reading();
  float* acc = scratch.sums.get<float>(rows.padded() * kBlock);
  deal(blocks_of(linear.outputs), [&](int64_t block) {
    const T* w = static_cast<const T*>(linear.weight) + block * padded * kBlock;
    for (int64_t k = 0; k < padded; k += pass)
      rows.multiply(&reading, w + k * kBlock, k, padded - k < pass ? padded - k : pass, k > 0, acc);
    finish(block, acc);
  });
}

// This thread's part of out = x * weight^T: the blocks that `deal` gives it. `finish(block, acc)` gets the sums of one
// block for all rows, acc[rows][32], while they are in the cache. It applies bias, activation and argmax without
// another pass over memory.
template <class T, class Deal, class Finish>
void gemm_part(Deal&& deal, const Linear& linear, const Activation<T>* x, int64_t ldx, int64_t rows,
               ThreadScratch& scratch, Finish&& finish) {
  if constexpr (std::is_same_v<T, int8_t>) {
    using Pairs = std::conditional_t<std::is_same_v<Activation<bf16>, bf16>, bf16, float>;
    if (!linear.scales) return gemm_part<bf16>(deal, linear, x, ldx, rows, scratch, finish);
    const Quantised matrix(linear);
    const int64_t blocks = blocks_of(linear.outputs);
#if defined(LABKIT_HAS_VNNI)
    if (rows <= kMostVnniRows && linear.activation_bits == 8)
      return vnni_part<1>(deal, linear, x, ldx, rows, scratch, finish);
    if (rows <= kMostVnniRows) return vnni_part<2>(deal, linear, x, ldx, rows, scratch, finish);
#else  // without VNNI there are no bf16 products either, and the activations are floats
    if (rows <= kMaxRows) return run_by_run(deal, matrix, blocks, x, ldx, rows, scratch, finish);
#endif
#if defined(LABKIT_HAS_AMX)
    widened_part<Pairs>(deal, matrix, blocks, AmxRows(x, ldx, rows, scratch), scratch, finish);
#else
    widened_part<Pairs>(deal, matrix, blocks, RegisterRows<Pairs>(x, ldx, rows, scratch), scratch, finish);
#endif
  } else {
#if defined(LABKIT_HAS_AMX)
    if constexpr (std::is_same_v<T, bf16>)
      if (rows > kFewRows) return stored_part<T>(deal, linear, AmxRows(x, ldx, rows, scratch), scratch, finish);
#endif
    stored_part<T>(deal, linear, RegisterRows<T>(x, ldx, rows, scratch), scratch, finish);
  }
}

// One weight of a matrix, as a float.
template <class T>
float weight_of(const Linear& linear, int64_t n, int64_t k) {
  if constexpr (std::is_same_v<T, int8_t>)
    return linear.scales ? Quantised(linear).weight(n, k) : weight_of<bf16>(linear, n, k);
  else
    return weight_at(static_cast<const T*>(linear.weight), linear.inputs, n, k);
}

}  // namespace labkit
