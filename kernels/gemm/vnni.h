// The GEMM of quantised weights with the VNNI instruction, which multiplies 64 pairs of bytes and adds them up by fours
// in a cycle. To turn the codes into floats instead takes four times as long, which is all the time that memory leaves
// a Zen 4 core.
//
// The instruction takes the activations as bytes too. One byte would quantise them, so an activation is two: x = s (256
// high + low), with a scale s for 128 inputs. Its error is 2^-16 of the largest of them, a 128th of bfloat16's. Where
// the activations may be quantised, x = s high, and half of the instructions are saved.
#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define LABKIT_HAS_VNNI 1

#include "amx.h"
#include "quantised.h"

namespace labkit {

constexpr int64_t kSegment = 128;  // inputs that share a scale of the activations; their products fit in 32 bits
constexpr int64_t kSlice = 1024;   // inputs that all tiles of rows multiply before the next: 16 or 32 KB of a block
constexpr int kVnniRows = 6;       // of a register tile: 24 sums and the weights fill the 32 registers
// With more rows, converting the weights once for all of them takes no longer (Zen 4), or AMX serves them.
#if defined(LABKIT_HAS_AMX)
constexpr int64_t kMostVnniRows = 12;
#else
constexpr int64_t kMostVnniRows = 48;
#endif

// Inputs that share a scale of the activations and one of the weights. Of 4 bits, those in the lower nibbles are
// multiplied first, then those in the higher ones, which count 16 times as much.
struct Segment {
  int64_t begin, end;
  bool low, high;  // which nibbles there are; codes of 8 bits are in neither

  Segment(const Quantised& matrix, int64_t begin) : begin(begin), low(false), high(false) {
    const int64_t group_end = (begin / matrix.group() + 1) * matrix.group();
    end = group_end - begin < kSegment ? group_end : begin + kSegment;
    if (end > matrix.depth()) end = matrix.depth();
    if (!matrix.nibbles()) return;
    low = !matrix.high(begin) || end > (begin / kSpan + 1) * kSpan;
    high = matrix.high(begin) || end > begin / kSpan * kSpan + kHalf;
  }
};

// What a tile reads of a row's segment. The instruction takes one side without a sign, so it gets codes that are
// counted from 0 on. Unless the group has a minimum, the sums begin with what that adds to them, taken away.
struct Portion {
  float scale, total;  // total: the sum of the segment's activations
  int32_t starts[2];   // of the sums of high and of low terms
};

// Rows of activations as bytes, a register tile of rows after the other: [K/4][rows of the tile][kTerms][4], so that a
// tile reads them as one stream.
template <int kTerms>
class VnniRows {
 public:
  template <class X>
  VnniRows(const Quantised& matrix, const X* x, int64_t ldx, int64_t inputs, int64_t rows, ThreadScratch& scratch)
      : rows_(rows), depth_(matrix.depth()), tiles_((rows + kVnniRows - 1) / kVnniRows) {
    const int64_t most = matrix.groups() + (depth_ + kSegment - 1) / kSegment + 1;
    const int64_t bytes = (kTerms * rows * depth_ + kLine - 1) / kLine * kLine;
    char* memory = scratch.bytes.get<char>(size_t(bytes + (rows + 1) * most * int64_t(sizeof(Segment))));
    static_assert(sizeof(Portion) <= sizeof(Segment));
    terms_ = reinterpret_cast<int8_t*>(memory);
    segments_ = reinterpret_cast<Segment*>(memory + bytes);
    for (int64_t begin = 0; begin < depth_; begin = segments_[count_++].end)
      new (segments_ + count_) Segment(matrix, begin);
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

  // The segment behind those from `first` on that make up a slice.
  int64_t slice_end(int64_t first) const {
    int64_t n = first;
    while (n < count_ && segments_[n].end - segments_[first].begin <= kSlice) ++n;
    return n > first ? n : first + 1;
  }

 private:
  // Segment n of the r-th row of tile t, which is `x`.
  template <class X>
  void store_segment(const Quantised& matrix, const X* x, int64_t inputs, int64_t t, int64_t r, int64_t n) {
    const Segment& segment = segments_[n];
    alignas(64) float floats[kSegment] = {};
    const int64_t end = segment.end < inputs ? segment.end : inputs;
    for (int64_t k = segment.begin; k < end; ++k) floats[k - segment.begin] = to_float(x[k]);
    alignas(64) int8_t split[kTerms][kSegment];
    portions_[(first(t) + r) * count_ + n] = portion_of(matrix, segment, floats, split);
    int8_t* to = terms_ + kTerms * (first(t) * depth_ + segment.begin * size(t) + r * kQuad);
    for (int64_t k = 0; k < segment.end - segment.begin; k += kQuad, to += kTerms * kQuad * size(t))
      for (int term = 0; term < kTerms; ++term) std::memcpy(to + term * kQuad, split[term] + k, kQuad);
  }

  // The floats of a segment, with zeros behind them, as terms. Where one is not finite, the scale is no number.
  static Portion portion_of(const Quantised& matrix, const Segment& segment, const float* x,
                            int8_t (&terms)[kTerms][kSegment]) {
    constexpr float kMost = kTerms == 2 ? 127 * 256 : 127;
    const int64_t count = segment.end - segment.begin;
    vf top = {}, spoiled = {};
    for (int64_t k = 0; k < count; k += kWidth) {
      const vf values = load(x + k);
      top = max(magnitude(values), top);
      spoiled += values - values;
    }
    const float peak = maximum(top), inverse = peak > 0 ? kMost / peak : 0.0f;
    __m512i sums[2] = {};
    for (int64_t k = 0; k < count; k += kWidth) {
      __m512i high = _mm512_cvtps_epi32((__m512)(load(x + k) * inverse));
      if constexpr (kTerms == 2) {
        const __m512i whole = high;
        high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
        const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
        sums[1] = _mm512_add_epi32(sums[1], low);
        _mm_store_si128(reinterpret_cast<__m128i*>(terms[1] + k), _mm512_cvtepi32_epi8(low));
      }
      sums[0] = _mm512_add_epi32(sums[0], high);
      _mm_store_si128(reinterpret_cast<__m128i*>(terms[0] + k), _mm512_cvtepi32_epi8(high));
    }
    const int32_t high = _mm512_reduce_add_epi32(sums[0]), low = _mm512_reduce_add_epi32(sums[1]);
    const float scale = peak / kMost + sum(spoiled);
    // What the higher nibbles alone make is 16 times too large, and so is everything once they have joined in.
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

inline __m512i broadcast_quad(const int8_t* from) {
  int32_t quad;
  std::memcpy(&quad, from, sizeof quad);
  return _mm512_set1_epi32(quad);
}

// The codes of 16 outputs x 4 k as numbers from 0 on.
enum class Taken { kBytes, kLow, kHigh };
template <Taken kTaken>
[[gnu::always_inline]] inline __m512i counted_codes(const char* w) {
  const __m512i bytes = _mm512_loadu_si512(w);
  if constexpr (kTaken == Taken::kBytes) return _mm512_xor_si512(bytes, _mm512_set1_epi8(char(0x80)));
  return _mm512_and_si512(bytes, _mm512_set1_epi8(kTaken == Taken::kLow ? 0x0f : char(0xf0)));
}

// sums[r] += row r's terms of `depth` k from `x` on times the codes from `w` on, which follow each other.
template <Taken kTaken, int R, int kTerms>
[[gnu::always_inline]] inline void vnni_run(const char* w, const int8_t* x, int64_t depth, Ahead ahead,
                                            __m512i (&sums)[kTerms][R][2]) {
  for (int64_t k = 0; k < depth; k += kQuad) {
    prefetch(ahead.into, ahead.from + k * ahead.step);
    prefetch(ahead.into, ahead.from + (k + kQuad / 2) * ahead.step);
    const __m512i w0 = counted_codes<kTaken>(w + k * kBlock), w1 = counted_codes<kTaken>(w + k * kBlock + kLine);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int term = 0; term < kTerms; ++term) {
        const __m512i xr = broadcast_quad(x + kTerms * k * R + kQuad * (kTerms * r + term));
        sums[term][r][0] = _mm512_dpbusd_epi32(sums[term][r][0], w0, xr);
        sums[term][r][1] = _mm512_dpbusd_epi32(sums[term][r][1], w1, xr);
        // Without this the compiler moves the sums of three rows and more from register to register, and to memory.
        if constexpr (R > 2) asm("" : "+v"(sums[term][r][0]), "+v"(sums[term][r][1]));
      }
    }
  }
}

// out[R][32] (+)= the segments [first, last) of tile t's rows times a block's weights.
template <int kTerms, int R = kVnniRows>
void vnni_tile(const Quantised& matrix, const VnniRows<kTerms>& rows, int64_t t, int64_t block, int64_t first,
               int64_t last, Ahead ahead, float* out) {
  if constexpr (R > 1)
    if (rows.size(t) < R) return vnni_tile<kTerms, R - 1>(matrix, rows, t, block, first, last, ahead, out);
  vf totals[R][2] = {};
  if (first > 0)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2; ++v) totals[r][v] = load(out + r * kBlock + v * kWidth);
  const char* origin = matrix.lane(block, rows.segment(first).begin);
  for (int64_t n = first; n < last; ++n) {
    const Segment& segment = rows.segment(n);
    const Portion* portion = &rows.portion(rows.first(t), n);
    const int64_t next_row = rows.segments();
    __m512i sums[kTerms][R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int term = 0; term < kTerms; ++term)
        sums[term][r][0] = sums[term][r][1] = _mm512_set1_epi32(portion[r * next_row].starts[term]);
    const auto ahead_at = [&](const char* w) {
      return Ahead{ahead.into, ahead.from + (w - origin) / kBlock * ahead.step, ahead.step};
    };
    if (!matrix.nibbles()) {
      const char* w = matrix.lane(block, segment.begin);
      vnni_run<Taken::kBytes>(w, rows.terms(t, segment.begin), segment.end - segment.begin, ahead_at(w), sums);
    } else {
      const int64_t span = segment.begin / kSpan * kSpan;
      if (segment.low)
        for (int64_t k = matrix.high(segment.begin) ? span + kSpan : span; k < segment.end; k += kSpan) {
          const int64_t depth = segment.end - k < kHalf ? segment.end - k : kHalf;
          const char* w = matrix.lane(block, k);
          vnni_run<Taken::kLow>(w, rows.terms(t, k), depth, ahead_at(w), sums);
        }
      if (segment.low && segment.high)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
          for (int term = 0; term < kTerms; ++term)
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) sums[term][r][v] = _mm512_slli_epi32(sums[term][r][v], 4);
      if (segment.high)
        for (int64_t k = span + kHalf; k < segment.end; k += kSpan) {
          const int64_t depth = segment.end - k < kHalf ? segment.end - k : kHalf;
          vnni_run<Taken::kHigh>(matrix.lane(block, k), rows.terms(t, k), depth, kNothingAhead, sums);
        }
    }
    const fp16* scales = matrix.scales(block, segment.begin / matrix.group());
    vf scale[2], minimum[2] = {};
    for (int v = 0; v < 2; ++v) {
      scale[v] = load(scales + v * kWidth);
      if (matrix.asymmetric()) minimum[v] = load(scales + kBlock + v * kWidth);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Portion& of_row = portion[r * next_row];
      const vf unit = broadcast(of_row.scale);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        __m512i sum = sums[0][r][v];
        if constexpr (kTerms == 2) sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), sums[1][r][v]);
        totals[r][v] += (vf)_mm512_cvtepi32_ps(sum) * (unit * scale[v]);
        if (matrix.asymmetric()) totals[r][v] += minimum[v] * broadcast(of_row.total);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) store(out + r * kBlock + v * kWidth, totals[r][v]);
}

// A thread's part of a GEMM with quantised weights, for up to kMostVnniRows rows.
template <int kTerms, class X, class Finish>
void vnni_part(Team& team, int thread, const Linear& linear, const X* x, int64_t ldx, int64_t count,
               ThreadScratch& scratch, Finish&& finish) {
  const Quantised matrix(linear);
  const VnniRows<kTerms> rows(matrix, x, ldx, linear.inputs, count, scratch);
  const Reading reading = team.reading();
  float* acc = scratch.sums.get<float>(count * kBlock);
  team.deal(blocks_of(linear.outputs), thread, [&](int64_t block) {
    for (int64_t first = 0, last; first < rows.segments(); first = last) {
      last = rows.tiles() == 1 ? rows.segments() : rows.slice_end(first);
      const int64_t begin = rows.segment(first).begin,
                    lines = matrix.bytes(rows.segment(last - 1).end - begin) / kBlock;
      const auto* here = reinterpret_cast<const int8_t*>(matrix.lane(block, begin));
      for (int64_t t = 0; t < rows.tiles(); ++t)
        vnni_tile(matrix, rows, t, block, first, last, ahead_of(reading, here, lines, t, rows.tiles()),
                  acc + rows.first(t) * kBlock);
    }
    finish(block, acc);
  });
}

}  // namespace labkit
#endif
