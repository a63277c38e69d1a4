// One vector type for every build. `vf` holds kWidth floats: 16 with AVX-512, 8 with AVX2, 4 otherwise. The arithmetic
// uses the compiler's vector extensions, so the same source serves all three and ARM.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace labkit {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float vf __attribute__((vector_size(kWidth * 4)));
typedef int32_t vi __attribute__((vector_size(kWidth * 4)));
typedef uint32_t vu __attribute__((vector_size(kWidth * 4)));
typedef uint16_t vh __attribute__((vector_size(kWidth * 2)));
typedef int8_t vb __attribute__((vector_size(kWidth)));

// Storage types of weights and KV cache, in addition to float and int8_t. Arithmetic is always in float.
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// `x - 0` is `x` for every x, so the compiler makes it a broadcast. `x + 0` turns -0 into 0, so it would have to be
// computed, which took half of the multiply ports on Intel.
inline vf broadcast(float x) { return x - vf{}; }

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

inline vu load_u16(const uint16_t* p) {
  vh h;
  std::memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, vu);
}

inline vf load(const bf16* p) { return (vf)(load_u16(&p->bits) << 16); }

inline vf load(const fp16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const vu h = load_u16(&p->bits);
  const vu magnitude = (h & 0x7fff) << 13;
  const vu infinite = (vu)((h & 0x7c00) == 0x7c00) & 0x7f800000u;
  const vf scaled = (vf)magnitude * 0x1p112f;
  return (vf)((vu)scaled | infinite | ((h & 0x8000) << 16));
#endif
}

inline vf load(const int8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  vb bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, vi), vf);
#endif
}

inline float to_float(float x) { return x; }

inline float to_float(int8_t x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline float to_float(fp16 x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  float f;
  std::memcpy(&f, &magnitude, 4);
  f *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((x.bits & 0x7c00) == 0x7c00) bits |= 0x7f800000u;
  bits |= uint32_t(x.bits & 0x8000) << 16;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline void from_float(float x, float* out) { *out = x; }

// Rounds to nearest even; NaN stays NaN.
inline void from_float(float x, bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  out->bits = x != x ? uint16_t((bits >> 16) | 0x40) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void from_float(float x, fp16* out) {
#if defined(__F16C__)
  out->bits = uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) {
    out->bits = sign | 0x7e00;
  } else if (bits >= 0x477ff000) {
    out->bits = sign | 0x7c00;
  } else if (bits < 0x38800000) {  // subnormal half: let the float adder round at the right bit
    float f;
    std::memcpy(&f, &bits, 4);
    f += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &f, 4);
    out->bits = sign | uint16_t(rounded - 0x3f000000);
  } else {
    out->bits = sign | uint16_t((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13);
  }
#endif
}

inline float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0;
  for (int i = 0; i < kWidth; ++i) s += v[i];
  return s;
#endif
}

// out[i] = factor * sum(v[i]). A sum across a vector is a chain of shuffles; four vectors share most of the chain.
inline void sums(const vf (&v)[4], float factor, float* out) {
#if defined(__AVX512F__)
  const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
  const __m512d cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
  const __m512d all =
      (__m512d)(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)) + _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  const __m256 half = _mm256_castpd_ps(_mm512_castpd512_pd256(all)) + _mm256_castpd_ps(_mm512_extractf64x4_pd(all, 1));
#elif defined(__AVX2__)
  const __m256 a = (__m256)v[0], b = (__m256)v[1], c = (__m256)v[2], d = (__m256)v[3];
  const __m256 half = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
#endif
#if defined(__AVX2__)
  _mm_storeu_ps(out, (_mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1)) * _mm_set1_ps(factor));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(v[i]) * factor;
#endif
}

inline float maximum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < kWidth; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

inline vf max(vf a, vf b) { return a > b ? a : b; }

// exp(x) to about 2 ulp: x = n ln2 + r, a polynomial for exp(r), n added to the exponent. Below -87 the result is 0.
inline vf exp(vf x) {
  const vf magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const vf clamped = x > 88.0f ? broadcast(88.0f) : (x < -87.0f ? broadcast(-87.0f) : x);
  const vf shifted = clamped * 1.44269504088896341f + magic;
  const vf n = shifted - magic;
  const vf r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  vf p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vi exponent = ((vi)shifted - (vi)magic) << 23;
  const vf result = (vf)((vi)p + exponent);
  return x < -87.0f ? vf{} : (x != x ? x : result);
}

inline vf magnitude(vf x) { return (vf)((vu)x & 0x7fffffffu); }
inline vf with_sign_of(vf x, vf sign) { return (vf)((vu)x | ((vu)sign & 0x80000000u)); }

// erf(x), absolute error below 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
inline vf erf(vf x) {
  const vf a = magnitude(x);
  const vf t = 1.0f / (1.0f + 0.3275911f * a);
  const vf p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return with_sign_of(1.0f - p * exp(-a * a), x);
}

// cap * tanh(x / cap), absolute error below 1e-7 * cap; cap * -1 for -inf.
inline vf soft_capped(vf x, float cap) {
  const vf t = exp(magnitude(x) * (-2.0f / cap));
  return with_sign_of(cap * (1.0f - t) / (1.0f + t), x);
}

}  // namespace labkit
