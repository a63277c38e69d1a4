// The packed layout of weights and the register tile that multiplies it.
//
// The weight's rows are cut into blocks of 32 outputs, and each block is stored k by k: [N/32][K][32]. For bf16 it is
// stored in pairs of k, [N/32][K/2][32][2], which is what the bf16 dot product instruction reads. A thread owns
// consecutive blocks, so it reads memory as one forward stream, whatever the batch. At batch 1 that runs at the
// machine's read bandwidth; for many rows the same layout feeds register tiles of kMaxRows x 32.
//
// A vector holds different outputs at one k, never different k of one output. So an activation is broadcast once and
// multiplies all vectors of the block, and no sum across the lanes of a vector is needed at the end.
#pragma once

#include <type_traits>

#include "../simd.h"
#include "../team.h"

namespace labkit {

constexpr int kBlock = 32;
constexpr int kVectors = kBlock / kWidth;

// Rows of a register tile. Their sums take kMaxRows * kVectors registers: 24 of the 32 of AVX-512, 12 of the 16 of
// AVX2, 16 of the 32 of ARM. The rest is for weights and activations. More rows would spill sums to memory,
// fewer would load the same weights more often.
constexpr int kMaxRows = kWidth == 16 ? 12 : kWidth == 8 ? 3 : 2;

// Rows up to which AMX gains nothing, because reading the weights takes longer than multiplying them either way.
constexpr int64_t kFewRows = 4;

// k per pass where several tiles use the same weights: a block's slice (32 KB in fp32) stays in the first-level cache
// from one tile to the next, so each weight is read from memory once.
constexpr int64_t kDepth = 256;

// How activations are stored beside weights of a type: as bf16 where the machine multiplies bf16 pairs, else as floats.
// In a model with int8 matrices whatever is not quantised is bf16, so its activations are those of bf16.
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

// The type of the activations that one tile multiplies. A tile turns int8 weights into floats, so it takes floats.
template <class T>
using Operand = std::conditional_t<std::is_same_v<T, int8_t>, float, Activation<T>>;

// How the KV cache, the embeddings and unquantised matrices are stored in a model with weights of a type.
template <class T>
using Unquantised = std::conditional_t<std::is_same_v<T, int8_t>, bf16, T>;

template <class T>
constexpr int kLanesPerK = 1;  // how many k share one 32-bit lane
template <>
inline constexpr int kLanesPerK<bf16> = 2;

template <class T>
constexpr int kDepthMultiple = sizeof(T) == 4 || std::is_same_v<T, fp16> ? 1 : 2;  // what K is padded to

template <class T>
int64_t padded_depth(int64_t k) {
  return (k + kDepthMultiple<T> - 1) / kDepthMultiple<T> * kDepthMultiple<T>;
}

inline int64_t blocks_of(int64_t outputs) { return (outputs + kBlock - 1) / kBlock; }

// Row stride of activation buffers in elements: half a block past a whole number of blocks. With a stride that is a
// power of two, the rows of a tile would compete for the same few sets of the cache.
inline int64_t row_stride(int64_t columns) { return blocks_of(columns) * kBlock + 16; }

template <class T>
float weight_at(const T* packed, int64_t depth, int64_t n, int64_t k) {
  constexpr int lanes = kLanesPerK<T>;
  const T* block = packed + (n / kBlock) * padded_depth<T>(depth) * kBlock;
  return to_float(block[(k / lanes) * kBlock * lanes + (n % kBlock) * lanes + k % lanes]);
}

// One k (fp32, fp16) or one pair of k (bf16) of a block, times one or two activations of each row. Loops over
// registers are unrolled by pragma: with a variable index the sums would live in memory.
template <class T>
struct Step {
  static constexpr int kAdvance = 1;
  template <int R>
  static void run(const T* w, const float* x, int64_t ldx, vf (&acc)[R][kVectors]) {
    vf wide[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) wide[v] = load(w + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf xr = broadcast(x[r * ldx]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] += wide[v] * xr;
    }
  }
};

template <>
struct Step<bf16> {
  static constexpr int kAdvance = 2;
  template <int R>
  static void run(const bf16* w, const Activation<bf16>* x, int64_t ldx, vf (&acc)[R][kVectors]) {
#if defined(__AVX512BF16__)
    __m512i wide[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) wide[v] = _mm512_loadu_si512(w + v * kWidth * 2);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * ldx, 4);
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
      const vf x0 = broadcast(x[r * ldx]), x1 = broadcast(x[r * ldx + 1]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] += even[v] * x0 + odd[v] * x1;
    }
#endif
  }
};

// What a tile prefetches while it computes: `step` bytes for each k, from `from` on.
struct Ahead {
  const char* from;
  int64_t step;
};

// What the `t`-th of `tiles` that multiply the same weights prefetches. A single tile prefetches its own weights,
// kPrefetchBytes ahead. Several tiles find the present weights in the cache, so each prefetches a share of the next
// ones: the memory then works all the time and not just while the first tile computes.
template <class T>
Ahead ahead_of(const T* w, int64_t depth, int64_t t, int64_t tiles) {
  constexpr int64_t kStep = kBlock * sizeof(T);
  const char* here = reinterpret_cast<const char*>(w);
  if (tiles == 1) return {here + kPrefetchBytes, kStep};
  const int64_t step = (kStep + tiles - 1) / tiles;
  return {here + depth * kStep + t * depth * step, step};
}

// Two k of int8 weights, which are one line of memory, so that a step prefetches a whole line.
template <>
struct Step<int8_t> {
  static constexpr int kAdvance = 2;
  template <int R>
  static void run(const int8_t* w, const float* x, int64_t ldx, vf (&acc)[R][kVectors]) {
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      vf wide[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) wide[v] = load(w + k * kBlock + v * kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf xr = broadcast(x[r * ldx + k]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) acc[r][v] += wide[v] * xr;
      }
    }
  }
};

// For weights that are in a cache: every prefetch falls on a line that is there already.
template <class T>
Ahead nothing_ahead(const T* w) {
  return {reinterpret_cast<const char*>(w), 0};
}

// out[R][32] (+)= x[R][depth] * block[depth][32].
template <class T, int R>
void tile(const T* w, const Operand<T>* x, int64_t ldx, int64_t depth, bool accumulate, float* out, Ahead ahead) {
  constexpr int kAdvance = Step<T>::kAdvance;
  constexpr int kLines = kBlock * kAdvance * sizeof(T) / kLine;
  // A multiply-add takes 4 cycles and two can begin in each, so 8 independent sums keep the units busy. Tiles of few
  // rows have fewer sums, and split each over several k.
  constexpr int kChains = R * kVectors >= 8 ? 1 : 8 / (R * kVectors);
  vf acc[kChains][R][kVectors] = {};
  if (accumulate)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) acc[0][r][v] = load(out + r * kBlock + v * kWidth);
  int64_t k = 0;
  for (; k + kAdvance * kChains <= depth; k += kAdvance * kChains) {
#pragma GCC unroll 8
    for (int c = 0; c < kChains; ++c) {
      const int64_t at = k + c * kAdvance;
#pragma GCC unroll 2
      for (int line = 0; line < kLines; ++line)
        prefetch_once(ahead.from + at * ahead.step + line * (kAdvance * ahead.step / kLines));
      Step<T>::template run<R>(w + at * kBlock, x + at, ldx, acc[c]);
    }
  }
  for (; k < depth; k += kAdvance) Step<T>::template run<R>(w + k * kBlock, x + k, ldx, acc[0]);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      vf total = acc[0][r][v];
#pragma GCC unroll 8
      for (int c = 1; c < kChains; ++c) total += acc[c][r][v];
      store(out + r * kBlock + v * kWidth, total);
    }
}

// The tile for a number of rows that is known only now; the compiler makes one for each number.
template <class T, int R = kMaxRows>
void tile_rows(int rows, const T* w, const Operand<T>* x, int64_t ldx, int64_t depth, bool accumulate, float* out,
               Ahead ahead) {
  if constexpr (R > 1) {
    if (rows < R) return tile_rows<T, R - 1>(rows, w, x, ldx, depth, accumulate, out, ahead);
  }
  tile<T, R>(w, x, ldx, depth, accumulate, out, ahead);
}

}  // namespace labkit
