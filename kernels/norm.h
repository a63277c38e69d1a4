// LayerNorm and RMSNorm of one row, and the conversion of a row to the GEMM's activation type.
#pragma once

#include <cmath>

#include "abi.h"
#include "simd.h"

namespace labkit {

// The mean of (x - mean)^2. With four independent sums an addition need not wait for the previous one.
inline float mean_square(const float* x, int64_t n, float mean) {
  vf total[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth)
    for (int u = 0; u < 4; ++u) {
      const vf d = load(x + i + u * kWidth) - mean;
      total[u] += d * d;
    }
  float s = sum((total[0] + total[1]) + (total[2] + total[3]));
  for (; i < n; ++i) s += (x[i] - mean) * (x[i] - mean);
  return s / float(n);
}

inline float mean_of(const float* x, int64_t n) {
  vf total[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth)
    for (int u = 0; u < 4; ++u) total[u] += load(x + i + u * kWidth);
  float s = sum((total[0] + total[1]) + (total[2] + total[3]));
  for (; i < n; ++i) s += x[i];
  return s / float(n);
}

// y = norm(x) as floats; y may be x.
inline void normalise(const Norm& norm, const float* x, int64_t n, float* y) {
  if (norm.kind == kNoNorm) {
    if (y != x) std::memcpy(y, x, size_t(n) * 4);
    return;
  }
  const float mean = norm.kind == kLayerNorm ? mean_of(x, n) : 0.0f;
  const float inverse = 1.0f / std::sqrt(mean_square(x, n, mean) + norm.eps);
  for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * inverse * norm.weight[i];
  if (norm.bias)
    for (int64_t i = 0; i < n; ++i) y[i] += norm.bias[i];
}

// Converts n values to the GEMM's activation type and zeroes the padding up to `padded`.
inline void to_activation(const float* x, int64_t n, int64_t padded, float* out) {
  if (out != x) std::memcpy(out, x, size_t(n) * 4);
  for (int64_t i = n; i < padded; ++i) out[i] = 0.0f;
}

inline void to_activation(const float* x, int64_t n, int64_t padded, bf16* out) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  for (; i + 16 <= n; i += 16) {
    const __m256bh half = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + i));
    std::memcpy(out + i, &half, 32);
  }
#endif
  for (; i < n; ++i) from_float(x[i], out + i);
  for (; i < padded; ++i) out[i].bits = 0;
}

}  // namespace labkit
