// Quantises rows of a matrix on all threads. codes.py defines the scales and codes, and has the same in torch for other
// devices.
#pragma once

#include <cmath>

#include "simd.h"
#include "team.h"

namespace labkit {

// Rows of floats, bf16 or fp16, whose groups of `group` inputs share a scale; the last group may be shorter.
struct Quantising {
  const void* rows;
  int64_t outputs, inputs, row_stride, group;
  int32_t bits, asymmetric;
  fp16* scales;   // [outputs][groups][1 or 2]: scales, and minima if asymmetric
  int8_t* codes;  // [outputs][inputs]

  int64_t groups() const { return ceil_div(inputs, group); }
  int64_t numbers() const { return asymmetric ? 2 : 1; }
};

inline bool is_subnormal(fp16 x) { return (x.bits & 0x7c00) == 0; }

// The nearest half, but away from zero among the subnormal numbers (`_half` of codes.py).
inline fp16 half_scale(float x) {
  fp16 out;
  from_float(x, &out);
  if (is_subnormal(out) && std::fabs(to_float(out)) < std::fabs(x)) ++out.bits;
  return out;
}

// The nearest half that is no larger.
inline fp16 half_below(float x) {
  fp16 out;
  from_float(x, &out);
  if (!(to_float(out) > x)) return out;
  if ((out.bits & 0x7fff) == 0)
    out.bits = 0x8001;  // the smallest negative number
  else
    out.bits += out.bits & 0x8000 ? 1 : -1;
  return out;
}

// The scale of a group of `count` numbers, and its minimum if asymmetric.
template <class T>
void scale_group(const Quantising& call, const T* x, int64_t count, fp16* scale) {
  float low = to_float(x[0]), high = low;
  int64_t i = 0;
  if (count >= kWidth) {
    vf lows = load(x), highs = lows;
    for (i = kWidth; i + kWidth <= count; i += kWidth) {
      const vf next = load(x + i);
      lows = next < lows ? next : lows;
      highs = next > highs ? next : highs;
    }
    low = -maximum(-lows), high = maximum(highs);
  }
  for (; i < count; ++i) {
    const float next = to_float(x[i]);
    low = next < low ? next : low;
    high = next > high ? next : high;
  }
  if (call.asymmetric) {
    scale[1] = half_below(low);
    scale[0] = half_scale((high - to_float(scale[1])) / float((1 << call.bits) - 1));
  } else if (call.bits == 8) {
    scale[0] = half_scale((high > -low ? high : -low) / 127.0f);
  } else {  // of the number of largest magnitude; of the first one, where a number and its negative are the largest
    float largest = high > -low ? high : low;
    if (high == -low)
      for (int64_t at = 0;; ++at)
        if (std::fabs(to_float(x[at])) == high) {
          largest = to_float(x[at]);
          break;
        }
    scale[0] = half_scale(largest / -8.0f);
  }
}

// The nearest codes of a group.
template <class T>
void code_group(const Quantising& call, const T* x, int64_t count, const fp16* scale, int8_t* codes) {
  const float lowest = -float(1 << (call.bits - 1)), steps = float((1 << call.bits) - 1);
  const float step = to_float(scale[0]) != 0.0f ? to_float(scale[0]) : 1.0f;
  const float minimum = call.asymmetric ? to_float(scale[1]) : 0.0f;
  const vf least = broadcast(call.asymmetric ? 0.0f : lowest), most = least + steps;
  const vf shift = broadcast(call.asymmetric ? lowest : 0.0f), magic = broadcast(12582912.0f);  // simd.h explains it
  const auto coded = [&](vf numbers) {
    const vf quotients = (numbers - minimum) / step;
    // Clamped first, so that the rounding by `magic` is exact; the bounds are integers, so the order does not matter.
    const vf bounded = max(quotients < most ? quotients : most, least);
    return __builtin_convertvector((vi)(bounded + magic) - (vi)magic + __builtin_convertvector(shift, vi), vb);
  };
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const vb q = coded(load(x + i));
    std::memcpy(codes + i, &q, sizeof q);
  }
  if (i == count) return;
  alignas(64) float rest[kWidth] = {};
  for (int64_t j = 0; i + j < count; ++j) rest[j] = to_float(x[i + j]);
  const vb q = coded(load(rest));
  std::memcpy(codes + i, &q, size_t(count - i));
}

template <class T>
void quantise_rows(const Quantising& call, int32_t threads) {
  const T* rows = static_cast<const T*>(call.rows);
  const int64_t groups = call.groups();
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < call.outputs; ++row)
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * call.group, left = call.inputs - begin, count = left < call.group ? left : call.group;
      const T* x = rows + row * call.row_stride + begin;
      fp16* scale = call.scales + (row * groups + g) * call.numbers();
      if (call.codes)
        code_group(call, x, count, scale, call.codes + row * call.inputs + begin);
      else
        scale_group(call, x, count, scale);
    }
}

}  // namespace labkit

// Writes the codes, by the given scales; without memory for codes the scales. size: bytes of a number; a number of two
// bytes is bf16, or with `half` fp16.
extern "C" void labkit_quantise(const labkit::Quantising* call, int32_t size, int32_t half, int32_t threads) {
  using namespace labkit;
  if (size == 4)
    quantise_rows<float>(*call, threads);
  else if (half)
    quantise_rows<fp16>(*call, threads);
  else
    quantise_rows<bf16>(*call, threads);
}
