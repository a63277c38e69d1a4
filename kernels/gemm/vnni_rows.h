// Activations as bytes, for the VNNI instruction.
//
// One byte would be too coarse for an activation, so there are two: x = s (256 high + low), with a scale s for 128
// inputs. The error is 2^-16 of the largest input, a 128th of bfloat16's error. If activations may be quantised, x = s
// high, which saves half of the instructions.
#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define LABKIT_HAS_VNNI 1

#include <limits>

#include "quantised.h"

namespace labkit {

constexpr int64_t kSegment = 128;  // inputs that share a scale of the activations; their products fit in 32 bits
constexpr int64_t kSlice =
    1024;                     // inputs that all tiles of rows multiply before the next slice: 16 or 32 KB of a block
constexpr int kVnniRows = 6;  // of a register tile: 24 sums and the weights fill the 32 registers

// Inputs that share a scale of the activations and a scale of the weights (a group's). With 4 bits, inputs in the
// higher nibbles count 16 times as much.
struct Segment {
  int64_t begin, end, group;
  bool low, high;  // the nibbles of its codes; both false for 8-bit codes

  Segment(const Quantised& matrix, int64_t begin, int64_t group) : begin(begin), group(group), low(false), high(false) {
    const int64_t group_end = (group + 1) * matrix.group();
    end = group_end - begin < kSegment ? group_end : begin + kSegment;
    if (end > matrix.depth()) end = matrix.depth();
    if (!matrix.nibbles()) return;
    low = !matrix.high(begin) || end > (begin / kSpan + 1) * kSpan;
    high = matrix.high(begin) || end > begin / kSpan * kSpan + kHalf;
  }

  // The group of the next segment.
  int64_t next_group(const Quantised& matrix) const { return group + (end == (group + 1) * matrix.group()); }
};

// A segment of one row in a tile. One operand of the instruction is unsigned, so codes are counted from 0 on. This
// offset adds a constant to the sums. Unless the group has a minimum, they start at minus this constant.
struct Portion {
  float scale, total;  // total: the sum of the segment's activations
  int32_t starts[2];   // of the sums of high and of low terms
};

// Rows of activations as bytes, one register tile of rows after the other: [K/4][rows of the tile][kTerms][4], so that
// a tile reads them as one stream.
template <int kTerms>
class VnniRows {
 public:
  template <class X>
  VnniRows(const Quantised& matrix, const X* x, int64_t ldx, int64_t inputs, int64_t rows, ThreadScratch& scratch)
      : rows_(rows), depth_(matrix.depth()), tiles_(ceil_div(rows, kVnniRows)) {
    const int64_t most = matrix.groups() + ceil_div(depth_, kSegment) + 1;
    const int64_t bytes = round_up(kTerms * rows * depth_, kLine);
    char* memory = scratch.bytes.get<char>(size_t(bytes + (rows + 1) * most * int64_t(sizeof(Segment))));
    static_assert(sizeof(Portion) <= sizeof(Segment));
    terms_ = reinterpret_cast<int8_t*>(memory);
    segments_ = reinterpret_cast<Segment*>(memory + bytes);
    for (int64_t begin = 0, group = 0; begin < depth_; ++count_) {
      const Segment* made = new (segments_ + count_) Segment(matrix, begin, group);
      begin = made->end;
      group = made->next_group(matrix);
    }
    portions_ = reinterpret_cast<Portion*>(segments_ + count_);
    for (int64_t t = 0; t < tiles_; ++t)
      for (int64_t r = 0; r < size(t); ++r)
        for (int64_t n = 0; n < count_; ++n) store_segment(matrix, x + (first(t) + r) * ldx, inputs, t, r, n);
  }

  int64_t tiles() const { return tiles_; }
  int64_t first(int64_t t) const { return rows_ * t / tiles_; }
  int64_t size(int64_t t) const { return first(t + 1) - first(t); }
  const int8_t* terms(int64_t t, int64_t k) const { return terms_ + kTerms * (first(t) * depth_ + k * size(t)); }
  int64_t segments() const { return count_; }
  const Segment& segment(int64_t n) const { return segments_[n]; }
  const Portion& portion(int64_t m, int64_t n) const { return portions_[m * count_ + n]; }

  // The segment after the slice that begins with segment `first`.
  int64_t slice_end(int64_t first) const {
    int64_t n = first;
    while (n < count_ && segments_[n].end - segments_[first].begin <= kSlice) ++n;
    return n > first ? n : first + 1;
  }

 private:
  // Segment n of the r-th row of tile t; `x` is the row.
  template <class X>
  void store_segment(const Quantised& matrix, const X* x, int64_t inputs, int64_t t, int64_t r, int64_t n) {
    const Segment& segment = segments_[n];
    const int64_t count = segment.end - segment.begin, left = inputs - segment.begin;
    const int64_t held = left < count ? left : count;
    alignas(64) float floats[kSegment];
    int64_t k = 0;
    for (; k + kWidth <= held; k += kWidth) store(floats + k, load(x + segment.begin + k));
    for (; k % kWidth || k < count; ++k) floats[k] = k < held ? to_float(x[segment.begin + k]) : 0.0f;
    int8_t* to = terms_ + kTerms * (first(t) * depth_ + segment.begin * size(t) + r * kQuad);
    portions_[(first(t) + r) * count_ + n] = portion_of(matrix, segment, floats, to, kTerms * kQuad * size(t));
  }

  // Stores the floats of a segment, padded with zeros to a whole vector, as terms: a quad of k at `to`, the next quad
  // one step later. If a float is not finite, the scale is NaN.
  static Portion portion_of(const Quantised& matrix, const Segment& segment, const float* x, int8_t* to, int64_t step) {
    constexpr float kMost = kTerms == 2 ? 127 * 256 : 127;
    const int64_t count = segment.end - segment.begin;
    vf top = {};
    __mmask16 spoiled = 0;
    for (int64_t k = 0; k < count; k += kWidth) {
      const vf values = load(x + k), nothing = values - values;
      top = max(magnitude(values), top);
      spoiled |= _mm512_cmp_ps_mask((__m512)nothing, (__m512)nothing, _CMP_UNORD_Q);
    }
    const float peak = maximum(top), inverse = peak > 0 ? kMost / peak : 0.0f;
    __m512i sums[2] = {};
    for (int64_t k = 0; k < count; k += kWidth) {
      __m512i high = _mm512_cvtps_epi32((__m512)(load(x + k) * inverse)), low = {};
      if constexpr (kTerms == 2) {
        const __m512i whole = high;
        high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
        low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
      }
      sums[0] = _mm512_add_epi32(sums[0], high);
      sums[1] = _mm512_add_epi32(sums[1], low);
      const __m128i highs = _mm512_cvtepi32_epi8(high), lows = _mm512_cvtepi32_epi8(low);
      alignas(32) int8_t quads[kWidth * kTerms];
      auto* parts = reinterpret_cast<__m128i*>(quads);
      _mm_store_si128(parts, kTerms == 2 ? _mm_unpacklo_epi32(highs, lows) : highs);
      if constexpr (kTerms == 2) _mm_store_si128(parts + 1, _mm_unpackhi_epi32(highs, lows));
      const int64_t end = count - k < kWidth ? count - k : kWidth;
      for (int64_t quad = 0; quad < end; quad += kQuad, to += step)
        std::memcpy(to, quads + quad * kTerms, size_t(kTerms * kQuad));
    }
    const int32_t high = _mm512_reduce_add_epi32(sums[0]), low = _mm512_reduce_add_epi32(sums[1]);
    const float scale = spoiled ? std::numeric_limits<float>::quiet_NaN() : peak / kMost;
    // Sums of the higher nibbles alone are 16 times too large, and so is every sum that includes them.
    const int32_t up = segment.high && !segment.low ? 16 : 1;
    const int32_t taken = matrix.asymmetric() ? 0 : -up * int32_t(matrix.lowest());
    return {segment.high ? scale / 16 : scale,
            scale * float(kTerms == 2 ? 256 * high + low : high),
            {taken * high, taken * low}};
  }

  int8_t* terms_;
  Segment* segments_;
  Portion* portions_;
  int64_t rows_, depth_, tiles_, count_ = 0;
};

}  // namespace labkit
#endif
