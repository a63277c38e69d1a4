// The bf16 GEMM for many rows on Intel's AMX, where one instruction multiplies tiles of 16 rows x 32 k x 16 outputs.
// The packed weights need no other layout: a pair of k of a block is two rows of a tile, side by side.
#pragma once

#if defined(LABKIT_AMX) && defined(__AMX_BF16__)
#define LABKIT_HAS_AMX 1

#include "tile.h"

namespace labkit {

constexpr int64_t kTileRows = 16, kTileDepth = 32;
constexpr int64_t kFewRows = 4;  // up to here the dot product instruction keeps up with the memory, without copies

// Every tile is whole: 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// acc[16 or 32][32] (+)= x * block[depth][32]: 16 rows from `x` and, when Pair, 16 more from `below`.
template <bool Pair>
void amx_tiles(const bf16* w, const bf16* x, const bf16* below, int64_t ldx, int64_t depth, bool accumulate, float* acc,
               Ahead ahead) {
  constexpr int64_t kAccBytes = kBlock * sizeof(float), kPairBytes = kBlock * 2 * sizeof(bf16);
  const int64_t x_bytes = ldx * sizeof(bf16);
  float* acc_below = acc + kTileRows * kBlock;
  if (accumulate) {
    _tile_loadd(0, acc, kAccBytes);
    _tile_loadd(1, acc + 16, kAccBytes);
    if (Pair) _tile_loadd(2, acc_below, kAccBytes);
    if (Pair) _tile_loadd(3, acc_below + 16, kAccBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (Pair) _tile_zero(2);
    if (Pair) _tile_zero(3);
  }
  const int64_t step = ahead.step;
  const auto ask = [&](const char* from) {  // for half a step: a whole one at a time would keep the tile loads waiting
#pragma GCC unroll 16
    for (int k = 0; k < int(kTileRows); ++k) prefetch_once(from + k * step);
  };
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    const bf16* block = w + k * kBlock;
    ask(ahead.from + k * step);
    _tile_loadd(6, block, kPairBytes);
    _tile_loadd(4, x + k, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    ask(ahead.from + (k + kTileRows) * step);
    _tile_loadd(7, block + kBlock, kPairBytes);
    _tile_dpbf16ps(1, 4, 7);
    if (Pair) {
      _tile_loadd(5, below + k, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, acc, kAccBytes);
  _tile_stored(1, acc + 16, kAccBytes);
  if (Pair) _tile_stored(2, acc_below, kAccBytes);
  if (Pair) _tile_stored(3, acc_below + 16, kAccBytes);
}

// gemm_part with AMX: the rows of the last tile are copied so that it can be whole, what is left of the depth goes
// through the dot product instruction.
template <class Finish>
void amx_part(Team& team, int thread, int64_t blocks, const bf16* x, int64_t ldx, int64_t rows, const bf16* weight,
              int64_t padded, ThreadScratch& scratch, Finish&& finish) {
  static constexpr TileConfig config;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows, pairs = (tiles + 1) / 2;
  const int64_t whole_rows = rows / kTileRows * kTileRows;
  const int64_t whole_depth = padded / kTileDepth * kTileDepth, pass = pairs == 1 ? whole_depth : kDepth;
  float* acc = scratch.sums.get<float>(tiles * kTileRows * kBlock);
  bf16* last = scratch.last_tile.get<bf16>(kTileRows * ldx);
  std::memcpy(last, x + whole_rows * ldx, size_t((rows - whole_rows) * ldx) * sizeof(bf16));
  const auto rows_of = [&](int64_t t) { return t * kTileRows < whole_rows ? x + t * kTileRows * ldx : last; };
  _tile_loadconfig(&config);
  team.deal(blocks, thread, [&](int64_t block) {
    const bf16* w = weight + block * padded * kBlock;
    for (int64_t k = 0; k < whole_depth; k += pass) {
      const int64_t depth = whole_depth - k < pass ? whole_depth - k : pass;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t above = 2 * pair, below = above + 1;
        float* out = acc + above * kTileRows * kBlock;
        const Ahead ahead = ahead_of(w + k * kBlock, depth, pair, pairs);
        if (below == tiles)
          amx_tiles<false>(w + k * kBlock, rows_of(above) + k, nullptr, ldx, depth, k > 0, out, ahead);
        else
          amx_tiles<true>(w + k * kBlock, rows_of(above) + k, rows_of(below) + k, ldx, depth, k > 0, out, ahead);
      }
    }
    if (const bf16* rest = w + whole_depth * kBlock; whole_depth < padded)
      for (int64_t row = 0; row < rows; row += kMaxRows)
        tile_rows<bf16>(int(rows - row < kMaxRows ? rows - row : kMaxRows), rest, x + row * ldx + whole_depth, ldx,
                        padded - whole_depth, true, acc + row * kBlock, ahead_of(rest, padded - whole_depth, 0, 1));
    finish(block, acc);
  });
  _tile_release();
}

}  // namespace labkit
#endif
