// The bf16 GEMM for many rows on Intel's AMX, where one instruction multiplies tiles of 16 rows x 32 k x 16 outputs.
// The packed layout of weights fits: a pair of k of a block is 64 bytes for outputs 0 to 15 and 64 bytes for outputs 16
// to 31, and 16 such pairs are two tiles.
//
// An instruction takes the same time for 1 and for 16 rows. So AMX is for prompts and batches. RegisterRows (panels.h)
// is for up to kFewRows.
#pragma once

#if defined(LABKIT_AMX) && defined(__AMX_BF16__)
#define LABKIT_HAS_AMX 1

#include "tile.h"

namespace labkit {

constexpr int64_t kTileRows = 16, kTileDepth = 32;  // rows and k of a bf16 tile: 16 rows of 64 bytes

// Every tile is whole: 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// acc[16 or 32][32] (+)= x * block[depth][32]: 16 rows from `x` and, when Pair, 16 more from `below`.
//
// Tile registers 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights. With a pair of row tiles each loaded tile is
// used twice, because tile loads limit AMX, and not products.
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
  // Prefetches half a step's lines. All lines of a step at once would fill the queue of outstanding reads, and the tile
  // loads would wait for them. So each half goes before one of the two weight tiles.
  const auto ask = [&](const char* from) {
#pragma GCC unroll 16
    for (int k = 0; k < int(kTileRows); ++k) prefetch(ahead.into, from + k * step);
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

// All rows of a GEMM, in tiles of AMX, with the interface of RegisterRows (panels.h). The rows of an incomplete last
// tile are copied to a buffer of a whole tile, because AMX would read past the end of `x`. A thread has one at a time:
// it owns the thread's tile configuration and its buffer.
class AmxRows {
 public:
  AmxRows(const bf16* x, int64_t ldx, int64_t rows, ThreadScratch& scratch)
      : x_(x), ldx_(ldx), rows_(rows), tiles_(ceil_div(rows, kTileRows)) {
    static constexpr TileConfig config;
    const int64_t whole = rows / kTileRows * kTileRows;
    last_ = scratch.last_tile.get<bf16>(kTileRows * ldx);
    std::memcpy(last_, x + whole * ldx, size_t((rows - whole) * ldx) * sizeof(bf16));
    _tile_loadconfig(&config);
  }
  ~AmxRows() { _tile_release(); }
  AmxRows(const AmxRows&) = delete;

  bool one_tile() const { return tiles_ <= 2; }  // a pair is multiplied at once, and uses the weights once
  int64_t padded() const { return tiles_ * kTileRows; }

  // As RegisterRows::multiply. The end of a depth that is no multiple of kTileDepth uses the dot product instruction.
  void multiply(const Reading* reading, const bf16* w, int64_t k, int64_t depth, bool accumulate, float* out) const {
    const int64_t whole = depth / kTileDepth * kTileDepth, pairs = ceil_div(tiles_, 2);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t above = 2 * pair, below = above + 1;
      float* to = out + above * kTileRows * kBlock;
      const Ahead ahead = reading ? ahead_of(*reading, w, depth, pair, pairs) : kNothingAhead;
      if (below == tiles_)
        amx_tiles<false>(w, tile_of(above) + k, nullptr, ldx_, whole, accumulate, to, ahead);
      else
        amx_tiles<true>(w, tile_of(above) + k, tile_of(below) + k, ldx_, whole, accumulate, to, ahead);
    }
    if (whole == depth) return;
    const bf16* rest = w + whole * kBlock;
    for (int64_t row = 0; row < rows_; row += kMaxRows)
      tile_rows<bf16>(int(rows_ - row < kMaxRows ? rows_ - row : kMaxRows), rest, x_ + row * ldx_ + k + whole, ldx_,
                      depth - whole, true, out + row * kBlock, kNothingAhead);
  }

 private:
  const bf16* tile_of(int64_t t) const { return (t + 1) * kTileRows <= rows_ ? x_ + t * kTileRows * ldx_ : last_; }

  const bf16* x_;
  bf16* last_;
  int64_t ldx_, rows_, tiles_;
};

}  // namespace labkit
#endif
