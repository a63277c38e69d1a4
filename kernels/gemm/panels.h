// Small-batch GEMM on packed weights: out[M][N] = x[M][K] * weight[N][K]^T.
#pragma once

#include <type_traits>

#include "amx.h"
#include "tile.h"

namespace labkit {

// This thread's part of out = x * weight^T. `finish(block, acc)` gets the sums of one block for all rows,
// acc[rows][32].
template <class T, class Finish>
void gemm_part(Team& team, int thread, const Activation<T>* x, int64_t ldx, int64_t rows, const T* weight,
               int64_t outputs, int64_t depth, ThreadScratch& scratch, Finish&& finish) {
  const int64_t padded = padded_depth<T>(depth);
  const int64_t blocks = blocks_of(outputs);
#if defined(LABKIT_HAS_AMX)
  if constexpr (std::is_same_v<T, bf16>) {
    if (rows > kFewRows && padded >= kTileDepth)
      return amx_part(team, thread, blocks, x, ldx, rows, weight, padded, scratch, finish);
  }
#endif
  float* acc = scratch.sums.get<float>(rows * kBlock);
  const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  const int64_t pass = tiles == 1 ? padded : kDepth;
  team.deal(blocks, thread, [&](int64_t block) {
    const T* w = weight + block * padded * kBlock;
    for (int64_t k = 0; k < padded; k += pass) {
      const int64_t depth_now = padded - k < pass ? padded - k : pass;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
        tile_rows<T>(int(count), w + k * kBlock, x + first * ldx + k, ldx, depth_now, k > 0, acc + first * kBlock,
                     ahead_of(w + k * kBlock, depth_now, t, tiles));
      }
    }
    finish(block, acc);
  });
}

}  // namespace labkit
