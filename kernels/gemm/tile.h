// The packed layout of weights and the register tile that multiplies it.
//
// The weight's rows are cut into blocks of 32 outputs, and each block is stored k by k: [N/32][K][32]. bf16 is stored
// in pairs of k, [N/32][K/2][32][2], and 8-bit codes in quads, [N/32][K/4][32][4], as the dot product instructions read
// them. 4-bit codes are in the nibbles of such quads (quantised.h). A thread owns consecutive blocks, so it reads
// memory as one forward stream at any batch size. At batch 1 that runs at the machine's read bandwidth. For many rows
// the same layout feeds register tiles of kMaxRows x 32.
//
// A vector holds different outputs at one k, never different k of one output. So an activation is broadcast once and
// multiplies all vectors of the block, and no sum across the lanes of a vector is needed at the end.
#pragma once

#include <type_traits>

#include "../rounding.h"
#include "../simd.h"
#include "../team.h"

namespace labkit {

constexpr int kVectors = kBlock / kWidth;

// Rows of a register tile. Their sums take kMaxRows * kVectors registers: 24 of 32 with AVX-512, 12 of 16 with AVX2, 16
// of 32 on ARM. The other registers are for weights and activations. More rows would spill sums to memory, fewer rows
// would load the same weights more often.
constexpr int kMaxRows = kWidth == 16 ? 12 : kWidth == 8 ? 3 : 2;

// Up to this number of rows AMX gains nothing, because reading the weights takes longer than multiplying them.
constexpr int64_t kFewRows = 4;

// k per pass if several tiles use the same weights: a block's slice (32 KB in fp32) stays in the first-level cache from
// one tile to the next, so each weight is read from memory once.
constexpr int64_t kDepth = 256;

// The stored type of activations, by the type of the weights: bf16 if the machine multiplies bf16 pairs, else floats.
// In a model with int8 matrices all unquantised weights are bf16, so its activations are as for bf16.
template <class T>
struct ActivationOf {
  using type = float;
};
#if defined(__AVX512BF16__)
template <>
struct ActivationOf<bf16> {
  using type = bf16;
};
template <>
struct ActivationOf<int8_t> {
  using type = bf16;
};
#endif
template <class T>
using Activation = typename ActivationOf<T>::type;

template <class T>
constexpr bool kIsQuad = false;

// The type of the activations that one tile multiplies. A tile turns codes into floats, so it multiplies floats.
template <class T>
using Operand = typename std::conditional_t<kIsQuad<T>, ActivationOf<float>, ActivationOf<T>>::type;

// The stored type of the KV cache, the embeddings and unquantised matrices, by the type of a model's weights.
template <class T>
using Unquantised = std::conditional_t<std::is_same_v<T, int8_t>, bf16, T>;

template <class T>
constexpr int kLanesPerK = 1;  // how many k share a lane of a vector
template <>
inline constexpr int kLanesPerK<bf16> = 2;
template <>
inline constexpr int kLanesPerK<int8_t> = 4;

// K of activations and of stored floating weights: padded to whole lanes.
template <class T>
int64_t padded_depth(int64_t k) {
  return round_up(k, kLanesPerK<T>);
}

inline int64_t blocks_of(int64_t outputs) { return ceil_div(outputs, kBlock); }

// Row stride of activation buffers in elements: whole blocks and a half. With a power of two as stride, the rows of a
// tile would compete for the same few sets of the cache.
constexpr int64_t row_stride(int64_t columns) { return round_up(columns, kBlock) + kBlock / 2; }

template <class T>
float weight_at(const T* packed, int64_t depth, int64_t n, int64_t k) {
  constexpr int lanes = kLanesPerK<T>;
  const T* block = packed + (n / kBlock) * padded_depth<T>(depth) * kBlock;
  return to_float(block[(k / lanes) * kBlock * lanes + (n % kBlock) * lanes + k % lanes]);
}

// Rows of a tile; `at` is the address of a row. A core has too few registers for pointers to 12 rows, but an
// instruction adds a distance, or twice the distance, to a pointer. So there is a pointer to every third row.
template <class X, int R>
struct RowPointers {
  const X *row0, *row3, *row6, *row9;
  int64_t ldx;

  RowPointers(const X* x, int64_t ldx) : row0(x), row3(x + 3 * ldx), row6(x + 6 * ldx), row9(x + 9 * ldx), ldx(ldx) {}

  [[gnu::always_inline]] const X* at(int r) const {
    return (r < 3 ? row0 : r < 6 ? row3 : r < 9 ? row6 : row9) + r % 3 * ldx;
  }

  [[gnu::always_inline]] void advance(int64_t k) {
    row0 += k, row3 += k, row6 += k, row9 += k;
    // Without these the compiler would still make a pointer for each row.
    if constexpr (R > 3) asm("" : "+r"(row0), "+r"(row3));
    if constexpr (R > 6) asm("" : "+r"(row6));
    if constexpr (R > 9) asm("" : "+r"(row9));
  }
};

// One k (fp32, fp16) or one pair of k (bf16) of a block, times one or two activations of each row. Loops over
// registers are unrolled by pragma: with a variable index the sums would be in memory.
template <class T>
struct Step {
  static constexpr int kAdvance = 1;
  template <int R>
  [[gnu::always_inline]] static void run(const T* w, const RowPointers<float, R>& x, vf (&acc)[R][kVectors]) {
    vf wide[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) wide[v] = load(w + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf xr = broadcast(x.at(r)[0]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] += wide[v] * xr;
    }
  }
};

template <>
struct Step<bf16> {
  static constexpr int kAdvance = 2;
  template <int R>
  [[gnu::always_inline]] static void run(const bf16* w, const RowPointers<Activation<bf16>, R>& x,
                                         vf (&acc)[R][kVectors]) {
#if defined(__AVX512BF16__)
    __m512i wide[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) wide[v] = _mm512_loadu_si512(w + v * kWidth * 2);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x.at(r), 4);
      const __m512i xr = _mm512_set1_epi32(pair);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        acc[r][v] = (vf)_mm512_dpbf16_ps((__m512)acc[r][v], (__m512bh)wide[v], (__m512bh)xr);
    }
#else
    vf even[kVectors], odd[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      vu both;
      std::memcpy(&both, w + v * kWidth * 2, sizeof both);
      even[v] = (vf)(both << 16);
      odd[v] = (vf)(both & 0xffff0000u);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf x0 = broadcast(x.at(r)[0]), x1 = broadcast(x.at(r)[1]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] += even[v] * x0 + odd[v] * x1;
    }
#endif
  }
};

// The bytes that a tile prefetches while it computes: `step` bytes for each k, from `from` on.
struct Ahead {
  Into into;
  const char* from;
  int64_t step;
};

// The prefetches of the `t`-th of `tiles` that multiply the same weights. A single tile prefetches its own weights.
// Several tiles find the present weights in the cache, so each prefetches a share of the next weights. The memory then
// works all the time and not just while the first tile computes, which halves a step of 16 rows (gpt2 in bf16, Zen 4).
// So several tiles prefetch with every way to read.
template <class T>
Ahead ahead_of(Reading reading, const T* w, int64_t depth, int64_t t, int64_t tiles) {
  constexpr int64_t kStep = kBlock * sizeof(T);
  const char* here = reinterpret_cast<const char*>(w);
  if (tiles == 1) return {reading.into, here + reading.ahead, kStep};
  const int64_t step = ceil_div(kStep, tiles);
  return {reading.between(), here + depth * kStep + t * depth * step, step};
}

// Unpacks the codes of four k, which share a 32-bit lane, to floats: int8, or the lower or the higher nibbles of the
// four bytes, which hold code + 8.
struct Bytes {
  static vi prepared(vi quads) { return quads; }
  static vf nth(vi quads, int n) { return __builtin_convertvector((quads << (24 - 8 * n)) >> 24, vf); }
};
template <int kUp>  // 0: the lower nibbles; 4: the higher nibbles
struct Nibbles {
  static vi prepared(vi quads) { return quads ^ int32_t(0x88888888); }
  static vf nth(vi quads, int n) { return __builtin_convertvector((quads << (28 - 8 * n - kUp)) >> 28, vf); }
};

// The weight type of lanes of four codes. Codes are multiplied as floats, without their scales.
template <class Codes>
struct Quad {
  uint8_t byte;
};
template <class Codes>
inline constexpr bool kIsQuad<Quad<Codes>> = true;

template <class Codes>
struct Step<Quad<Codes>> {
  static constexpr int kAdvance = 4;
  template <int R>
  [[gnu::always_inline]] static void run(const Quad<Codes>* w, const RowPointers<float, R>& x, vf (&acc)[R][kVectors]) {
    vi quads[kVectors];
    std::memcpy(quads, w, sizeof quads);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) quads[v] = Codes::prepared(quads[v]);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      vf wide[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) wide[v] = Codes::nth(quads[v], k);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf xr = broadcast(x.at(r)[k]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) acc[r][v] += wide[v] * xr;
      }
    }
  }
};

constexpr Ahead kNothingAhead = {Into::kNothing, nullptr, 0};  // for weights that are in a cache

// out[R][32] (+)= x[R][depth] * block[depth][32].
template <class T, int R>
void tile(const T* w, const Operand<T>* x, int64_t ldx, int64_t depth, bool accumulate, float* out, Ahead ahead) {
  constexpr int kAdvance = Step<T>::kAdvance;
  constexpr int kLines = kBlock * kAdvance * sizeof(T) / kLine;
  constexpr int kTurns = R * kVectors >= 8 ? 1 : 8 / (R * kVectors);  // of a loop: few rows have few instructions
  // Each sum is made in the order of k for any number of rows, and so a row has the same result whatever rows it is
  // multiplied with. One row has few sums, each of which waits for its latest addition; memory still is slower.
  vf acc[R][kVectors] = {};
  if (accumulate)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) acc[r][v] = load(out + r * kBlock + v * kWidth);
  RowPointers<Operand<T>, R> rows(x, ldx);
  int64_t k = 0;
  for (; k + kAdvance * kTurns <= depth; k += kAdvance * kTurns) {
#pragma GCC unroll 8
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t at = k + turn * kAdvance;
#pragma GCC unroll 2
      for (int line = 0; line < kLines; ++line)
        prefetch(ahead.into, ahead.from + at * ahead.step + line * (kAdvance * ahead.step / kLines));
      Step<T>::template run<R>(w + at * kBlock, rows, acc);
      rows.advance(kAdvance);
    }
  }
  for (; k < depth; k += kAdvance) {
    Step<T>::template run<R>(w + k * kBlock, rows, acc);
    rows.advance(kAdvance);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(out + r * kBlock + v * kWidth, acc[r][v]);
}

// The tile for a number of rows that is known only at run time; the compiler makes one for each number.
template <class T, int R = kMaxRows>
void tile_rows(int rows, const T* w, const Operand<T>* x, int64_t ldx, int64_t depth, bool accumulate, float* out,
               Ahead ahead) {
  if constexpr (R > 1) {
    if (rows < R) return tile_rows<T, R - 1>(rows, w, x, ldx, depth, accumulate, out, ahead);
  }
  tile<T, R>(w, x, ldx, depth, accumulate, out, ahead);
}

}  // namespace labkit
