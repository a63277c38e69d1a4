// The products of attention over the cache with instructions that multiply pairs of 16-bit numbers: twice as many
// products as in floats, and a stored number need not become a float. Queries and probabilities are rounded to the
// same kind of number, as transformers rounds them in bf16.
#pragma once

#include <cfloat>

#include "products.h"

namespace labkit {

// The instruction for keys and values of T, if there is one.
template <class T>
struct Pairs {
  static constexpr bool kExist = false;
};

template <class T>
struct PairProducts;

#if defined(__AVX512BF16__)
template <>
struct Pairs<bf16> {
  static constexpr bool kExist = true;
  using Sum = vf;

  static __m512i load_numbers(const bf16* from) { return _mm512_loadu_si512(from); }

  static vf multiply_add(vf sum, __m512i a, __m512i b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }

  static vf to_floats(vf sum) { return sum; }

  // Rounds count floats, up to the next whole vector, to 16 bits in their own memory. Returns the unit of the numbers.
  static float narrow(float* row, int64_t count) {
    auto* const to = reinterpret_cast<char*>(row);
    for (int64_t i = 0; i < count; i += kWidth) {
      const __m256bh numbers = _mm512_cvtneps_pbh((__m512)load(row + i));
      std::memcpy(to + 2 * i, &numbers, sizeof numbers);
    }
    return 1.0f;
  }
};
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
// The other numbers are integers of 16 bits, whose unit is the largest magnitude / 32767. A sum over 512 products with
// a number of 8 bits is below 2^31.
template <>
struct Pairs<int8_t> {
  static constexpr bool kExist = true;
  using Sum = vi;

  static __m512i load_numbers(const int8_t* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }

  static vi multiply_add(vi sum, __m512i a, __m512i b) { return (vi)_mm512_dpwssd_epi32((__m512i)sum, a, b); }

  static vf to_floats(vi sum) { return __builtin_convertvector(sum, vf); }

  static float narrow(float* row, int64_t count) {
    vi top = {};  // bits of magnitudes as integers have the same order, with infinity and NaN at the top
    for (int64_t i = 0; i < count; i += kWidth) {
      const vi bits = (vi)magnitude(load(row + i));
      top = bits > top ? bits : top;
    }
    const int32_t most = _mm512_reduce_max_epi32((__m512i)top);
    float peak;
    std::memcpy(&peak, &most, sizeof peak);
    const float unit = peak / 32767.0f;
    const float inverse = unit >= FLT_MIN && unit < INFINITY ? 1.0f / unit : 0.0f;
    auto* const to = reinterpret_cast<char*>(row);
    for (int64_t i = 0; i < count; i += kWidth) {
      const __m512i whole = _mm512_cvtps_epi32((__m512)(load(row + i) * inverse));
      const __m256i numbers = _mm512_cvtsepi32_epi16(whole);
      std::memcpy(to + 2 * i, &numbers, sizeof numbers);
    }
    return unit < INFINITY ? unit : NAN;
  }
};
#endif

#if defined(__AVX512F__)
template <class V>
[[gnu::always_inline]] inline V blend(__mmask16 of_second, V first, V second) {
  return (V)_mm512_mask_blend_ps(of_second, (__m512)first, (__m512)second);
}

// In each lane of four numbers: the sum of a's lane, of b's, of c's and of d's.
template <class V>
[[gnu::always_inline]] inline V sums_within_lanes(V a, V b, V c, V d) {
  // A blend runs on more units than a shuffle, so half of the moves are blends.
  const auto halves = [](V x, V y) {
    return blend(0xcccc, x, y) + (V)_mm512_shuffle_ps((__m512)x, (__m512)y, _MM_SHUFFLE(1, 0, 3, 2));
  };
  const V ac = halves(a, c), bd = halves(b, d);
  const V crossed = blend(0x5555, ac, bd);
  return blend(0xaaaa, ac, bd) + (V)_mm512_permute_ps((__m512)crossed, _MM_SHUFFLE(2, 3, 0, 1));
}

// Adds up the four lanes of each argument: four sums of a, then four each of b, c and d.
template <class V>
[[gnu::always_inline]] inline V sums_across_lanes(V a, V b, V c, V d) {
  const auto halves = [](V x, V y) {
    return blend(0xff00, x, y) + (V)_mm512_shuffle_f32x4((__m512)x, (__m512)y, _MM_SHUFFLE(1, 0, 3, 2));
  };
  const V ac = halves(a, c), bd = halves(b, d);
  const __m512 crossed = (__m512)blend(0x0f0f, ac, bd);
  return blend(0xf0f0, ac, bd) + (V)_mm512_shuffle_f32x4(crossed, crossed, _MM_SHUFFLE(2, 3, 0, 1));
}

// As FloatProducts. A query and the probabilities over a block of slots are 16-bit numbers, at the beginning of the
// memory of their floats.
template <class T>
struct PairProducts {
  using P = Pairs<T>;
  using Sum = typename P::Sum;
  static constexpr int kNumbers = 2 * kWidth;  // of a vector

  static bool takes(int64_t padded_dim) { return padded_dim % kNumbers == 0; }

  static float put_query(float* row, int64_t dim) { return P::narrow(row, dim); }
  static float put_weights(float* row, int64_t count) { return P::narrow(row, count); }

  template <int R>
  static void score(const float* q, const T* keys, int padded_dim, int64_t count, const float* scales, const T* next,
                    float* scores) {
    const auto some = [&](const T* from, const T* after, int64_t j) {
      padded_dim == 64    ? score_some<R, 64>(q, from, 64, scales, after, scores + j)
      : padded_dim == 128 ? score_some<R, 128>(q, from, 128, scales, after, scores + j)
                          : score_some<R, 0>(q, from, padded_dim, scales, after, scores + j);
    };
    if (count < kWidth) {
      alignas(64) T copy[kWidth * kMostDim];  // after the last key there may be no memory
      std::memcpy(copy, keys, size_t(count * padded_dim) * sizeof(T));
      std::memset(copy + count * padded_dim, 0, size_t((kWidth - count) * padded_dim) * sizeof(T));
      return some(copy, next, 0);
    }
    for (int64_t j = 0; j < count; j += kWidth) {
      const int64_t at = j + kWidth <= count ? j : count - kWidth;  // at the end some keys a second time
      some(keys + at * padded_dim, next ? next + at * padded_dim : nullptr, at);
    }
  }

  template <int R>
  static void add(const T* values, int padded_dim, int64_t count, const float* weights, const float* units,
                  const float* factors, const T* next, float* context) {
    int d = 0;
    const auto add_some = [&](auto vectors) {
      add_vectors<R, vectors.value>(values + d, padded_dim, count, weights, units, factors, next ? next + d : nullptr,
                                    context + d);
      d += vectors.value * kNumbers;
    };
    constexpr int kMost = R > 2 ? 2 : 4;  // 16 sums at most
    while (d + kMost * kNumbers <= padded_dim) add_some(std::integral_constant<int, kMost>());
    while (d + 2 * kNumbers <= padded_dim) add_some(std::integral_constant<int, 2>());
    if (d < padded_dim) add_some(std::integral_constant<int, 1>());
  }

  // The unpack instructions leave 32 numbers out of order: the first of two vectors has every other four of them.
  static void put_in_order(float* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += kNumbers) {
      float copy[kNumbers];
      std::memcpy(copy, row + d, sizeof copy);
      for (int four = 0; four < 8; ++four)
        std::memcpy(row + d + 4 * four, copy + four % 2 * kWidth + four / 2 * 4, 4 * sizeof(float));
    }
  }

 private:
  static const char* numbers(const float* row) { return reinterpret_cast<const char*>(row); }

  // The scores of kWidth keys. Prefetches as many bytes from `next`. kDim: padded_dim, or 0 if only the caller knows
  // it.
  template <int R, int kDim>
  [[gnu::always_inline]] static void score_some(const float* q, const T* keys, int padded_dim, const float* scales,
                                                const T* next, float* scores) {
    const int dim = kDim ? kDim : padded_dim;
    Sum lanes[R][4];
#pragma GCC unroll 4
    for (int four = 0; four < 4; ++four) {
      const T* const k = keys + 4 * four * dim;
      prefetch_bytes(next ? next + 4 * four * dim : nullptr, 4 * dim * int64_t(sizeof(T)));
      Sum acc[R][4] = {};
#pragma GCC unroll 4
      for (int d = 0; d < dim; d += kNumbers) {
        __m512i key[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) key[i] = P::load_numbers(k + i * dim + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m512i query = _mm512_loadu_si512(numbers(q + r * dim) + 2 * d);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) acc[r][i] = P::multiply_add(acc[r][i], query, key[i]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) lanes[r][four] = sums_within_lanes(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Sum all = sums_across_lanes(lanes[r][0], lanes[r][1], lanes[r][2], lanes[r][3]);
      store(scores + r * kMostBlockSlots, P::to_floats(all) * scales[r]);
    }
  }

  // kCount vectors of the head. Two slots are multiplied at once: their numbers in pairs.
  template <int R, int kCount>
  static void add_vectors(const T* values, int padded_dim, int64_t count, const float* weights, const float* units,
                          const float* factors, const T* next, float* out) {
    Sum acc[R][2 * kCount] = {};
    for (int64_t j = 0; j < count; j += 2) {
      const T* const first = values + j * padded_dim;
      const T* const second = j + 1 < count ? first + padded_dim : first;  // at the end its weight is 0
      if (next) {
        prefetch_bytes(next + j * padded_dim, kCount * kNumbers * int64_t(sizeof(T)));
        prefetch_bytes(next + (j + 1) * padded_dim, kCount * kNumbers * int64_t(sizeof(T)));
      }
      __m512i pairs[2 * kCount];
#pragma GCC unroll 4
      for (int c = 0; c < kCount; ++c) {
        const __m512i a = P::load_numbers(first + c * kNumbers), b = P::load_numbers(second + c * kNumbers);
        pairs[2 * c] = _mm512_unpacklo_epi16(a, b);
        pairs[2 * c + 1] = _mm512_unpackhi_epi16(a, b);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        int32_t both;
        std::memcpy(&both, numbers(weights + r * kMostBlockSlots) + 2 * j, sizeof both);
        const __m512i weight = _mm512_set1_epi32(both);
#pragma GCC unroll 8
        for (int c = 0; c < 2 * kCount; ++c) acc[r][c] = P::multiply_add(acc[r][c], pairs[c], weight);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 2 * kCount; ++c) {
        float* const at = out + r * padded_dim + c * kWidth;
        store(at, load(at) * factors[r] + P::to_floats(acc[r][c]) * units[r]);
      }
  }
};
#endif

}  // namespace labkit
