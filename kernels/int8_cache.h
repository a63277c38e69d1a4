// Keys and values as int8: the numbers of a head in one slot share a scale in bfloat16, x = scale * q with q =
// -127..127.
//
// The scale is the largest magnitude / 127, rounded up to bfloat16: so q is at most 127, and the error of a number is
// at most half a scale. bfloat16 has the range of float32, so this holds for numbers of every size. For a head with an
// infinity or NaN the scale is not finite and q is 0, so its products are NaN.
#pragma once

#include <cmath>

#include "abi.h"
#include "simd.h"

namespace labkit {

constexpr int kMostDim = 512;  // of a head, padded

inline bf16 rounded_up(float x) {
  bf16 scale;
  from_float(x, &scale);
  if (to_float(scale) < x) ++scale.bits;  // the next bfloat16 of a positive number
  return scale;
}

// slot[padded_dim], *scale = x[dim], followed by zeros.
inline void quantise(const float* x, int dim, int padded_dim, int8_t* slot, bf16* scale) {
  alignas(64) float row[kMostDim];
  std::memcpy(row, x, size_t(dim) * sizeof(float));
  std::memset(row + dim, 0, size_t(padded_dim - dim) * sizeof(float));
  vi top = {};  // bits of magnitudes as integers have the same order, with infinity and NaN at the top
  for (int d = 0; d < padded_dim; d += kWidth) {
    const vi bits = (vi)magnitude(load(row + d));
    top = bits > top ? bits : top;
  }
  int32_t most = 0;
  for (int i = 0; i < kWidth; ++i) most = top[i] > most ? top[i] : most;
  float peak;
  std::memcpy(&peak, &most, sizeof peak);
  *scale = rounded_up(peak / 127.0f);
  const float step = to_float(*scale);
  if (!(step > 0.0f && step < INFINITY)) {
    std::memset(slot, 0, size_t(padded_dim));
    return;
  }
  const vf magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  for (int d = 0; d < padded_dim; d += kWidth) {
    const vb q = __builtin_convertvector((vi)(load(row + d) / step + magic) - (vi)magic, vb);
    std::memcpy(slot + d, &q, sizeof q);
  }
}

}  // namespace labkit
