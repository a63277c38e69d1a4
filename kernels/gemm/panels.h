// Small-batch GEMM on packed weights: out[M][N] = x[M][K] * weight[N][K]^T.
//
// Layout. The weight's rows are cut into blocks of 32 outputs and each block is stored k by k: [N/32][K][32], for bf16
// in pairs of k, [N/32][K/2][32][2], which is what the bf16 dot product instruction reads. A thread owns consecutive
// blocks, so it reads memory as ONE forward stream, whatever the batch: at batch 1 that runs at the machine's read
// bandwidth, and for many rows the same layout feeds register tiles of kMaxRows x 32.
#pragma once

#include "../simd.h"
#include "../team.h"

namespace labkit {

constexpr int kBlock = 32;
constexpr int kVectors = kBlock / kWidth;
constexpr int kMaxRows = kWidth == 16 ? 12 : kWidth == 8 ? 3 : 2;  // what the registers hold
constexpr int64_t kDepth =
    256;  // k per pass when there are many rows: a block's slice (32 KB) stays in the first-level cache

// What a weight type is multiplied with: bf16 where the machine multiplies bf16 pairs, else float.
template <class T>
struct ActivationOf {
  using type = float;
};
#if defined(__AVX512BF16__)
template <>
struct ActivationOf<bf16> {
  using type = bf16;
};
#endif
template <class T>
using Activation = typename ActivationOf<T>::type;

template <class T>
constexpr int kLanesPerK = 1;  // how many k share one 32-bit lane
template <>
inline constexpr int kLanesPerK<bf16> = 2;

template <class T>
int64_t padded_depth(int64_t k) {
  return (k + kLanesPerK<T> - 1) / kLanesPerK<T> * kLanesPerK<T>;
}

inline int64_t blocks_of(int64_t outputs) { return (outputs + kBlock - 1) / kBlock; }

// Row stride of activation buffers: 64 bytes past a multiple of 128, so that rows don't fall on the same cache sets.
inline int64_t row_stride(int64_t columns) { return blocks_of(columns) * kBlock + 16; }

template <class T>
float weight_at(const T* packed, int64_t depth, int64_t n, int64_t k) {
  constexpr int lanes = kLanesPerK<T>;
  const T* block = packed + (n / kBlock) * padded_depth<T>(depth) * kBlock;
  return to_float(block[(k / lanes) * kBlock * lanes + (n % kBlock) * lanes + k % lanes]);
}

// One k (fp32, fp16) or one pair of k (bf16) of a block, times one or two activations of each row.
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

// acc[R][32] (+)= x[R][depth] * block[depth][32].
template <class T, int R>
void tile(const T* w, const Activation<T>* x, int64_t ldx, int64_t depth, bool accumulate, float* out) {
  constexpr int kAdvance = Step<T>::kAdvance;
  constexpr int kChains =
      R * kVectors >= 8 ? 1 : 8 / (R * kVectors);  // independent sums, to cover the latency of an add
  vf acc[kChains][R][kVectors] = {};
  if (accumulate)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) acc[0][r][v] = load(out + r * kBlock + v * kWidth);
  int64_t k = 0;
  for (; k + kAdvance * kChains <= depth; k += kAdvance * kChains) {
#pragma GCC unroll 8
    for (int c = 0; c < kChains; ++c) {
      const int64_t at = k + c * kAdvance;
#pragma GCC unroll 4
      for (size_t line = 0; line < kBlock * kAdvance * sizeof(T); line += kLine)
        prefetch_once(reinterpret_cast<const char*>(w + at * kBlock) + line);
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

template <class T, int R = kMaxRows>
void tile_rows(int rows, const T* w, const Activation<T>* x, int64_t ldx, int64_t depth, bool accumulate, float* out) {
  if constexpr (R > 1) {
    if (rows < R) return tile_rows<T, R - 1>(rows, w, x, ldx, depth, accumulate, out);
  }
  tile<T, R>(w, x, ldx, depth, accumulate, out);
}

// This thread's share of out = x * weight^T. `finish(block, acc)` gets the sums of one block for all rows,
// acc[rows][32].
template <class T, class Finish>
void gemm_share(const Team& team, int thread, const Activation<T>* x, int64_t ldx, int64_t rows, const T* weight,
                int64_t outputs, int64_t depth, ThreadScratch& scratch, Finish&& finish) {
  const int64_t padded = padded_depth<T>(depth);
  const Range mine = team.share(blocks_of(outputs), thread);
  float* acc = scratch.sums.get<float>(rows * kBlock);
  const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  const int64_t pass = tiles == 1 ? padded : kDepth;
  for (int64_t block = mine.begin; block < mine.end; ++block) {
    const T* w = weight + block * padded * kBlock;
    for (int64_t k = 0; k < padded; k += pass) {
      const int64_t depth_now = padded - k < pass ? padded - k : pass;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
        tile_rows<T>(int(count), w + k * kBlock, x + first * ldx + k, ldx, depth_now, k > 0, acc + first * kBlock);
      }
    }
    finish(block, acc);
  }
}

}  // namespace labkit
