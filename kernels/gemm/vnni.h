// The int8 GEMM with the VNNI instruction, which multiplies 64 pairs of bytes and adds them up by fours in a cycle. To
// turn the weights into floats instead takes four times as long, which is all the time that memory leaves a Zen 4 core.
//
// The instruction takes the activations as bytes too. One byte would quantise them, so an activation is two: x = s (256
// high + low), with a scale s for 128 inputs. Its error is 2^-16 of the largest of them, a 128th of bfloat16's.
#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define LABKIT_HAS_VNNI 1

#include "amx.h"
#include "tile.h"

namespace labkit {

constexpr int64_t kSegment = 128;  // inputs that share a scale of the activations; their products fit in 32 bits
constexpr int64_t kSlice = 1024;   // inputs that all tiles of rows multiply before the next: 32 KB of a block
constexpr int64_t kQuad = 4;       // inputs in a lane
constexpr int kVnniRows = 6;       // of a register tile: 24 sums and the weights fill the 32 registers
// With more rows, converting the weights once for all of them takes no longer (Zen 4), or AMX serves them.
#if defined(LABKIT_HAS_AMX)
constexpr int64_t kMostVnniRows = 12;
#else
constexpr int64_t kMostVnniRows = 48;
#endif

// What a tile reads of a row's segment. The instruction takes one side without a sign, so the weights come with 128
// added, and the sums begin with what that adds to them, taken away.
struct Segment {
  float scale;
  int32_t high_start, low_start;
};

// Rows of activations as bytes, a register tile of rows after the other: [K/4][rows of the tile][high, low][4], so that
// a tile reads them as one stream.
class VnniRows {
 public:
  template <class X>
  VnniRows(const X* x, int64_t ldx, int64_t rows, int64_t depth, int64_t group, ThreadScratch& scratch)
      : rows_(rows), depth_(depth), group_(group), tiles_((rows + kVnniRows - 1) / kVnniRows) {
    const int64_t bytes = (2 * rows * depth + kLine - 1) / kLine * kLine;
    segments_ = number(depth - 1) + 1;
    char* memory = scratch.bytes.get<char>(size_t(bytes + rows * segments_ * int64_t(sizeof(Segment))));
    terms_ = reinterpret_cast<int8_t*>(memory);
    info_ = reinterpret_cast<Segment*>(memory + bytes);
    for (int64_t t = 0; t < tiles_; ++t)
      for (int64_t r = 0; r < size(t); ++r)
        for (int64_t begin = 0, end; begin < depth; begin = end) {
          end = part_end(begin, kSegment);
          store_segment(x + (first(t) + r) * ldx, t, r, begin, end);
        }
  }

  int64_t tiles() const { return tiles_; }
  int64_t first(int64_t t) const { return rows_ * t / tiles_; }
  int64_t size(int64_t t) const { return first(t + 1) - first(t); }
  const int8_t* terms(int64_t t, int64_t k) const { return terms_ + 2 * (first(t) * depth_ + k * size(t)); }
  const Segment& segment(int64_t m, int64_t number) const { return info_[m * segments_ + number]; }

  // Where a part of at most `most` inputs ends that begins at `begin`: all inputs of a part share their weights'
  // scales.
  int64_t part_end(int64_t begin, int64_t most) const {
    const int64_t last = (begin / group_ + 1) * group_, after = last < depth_ ? last : depth_;
    return after - begin < most ? after : begin + most;
  }

  // The number of the segment that input k is in. No group shares one with the next.
  int64_t number(int64_t k) const { return k / group_ * ((group_ + kSegment - 1) / kSegment) + k % group_ / kSegment; }

 private:
  // Inputs [begin, end) of the r-th row of tile t, which are one segment of the row `x`.
  template <class X>
  void store_segment(const X* x, int64_t t, int64_t r, int64_t begin, int64_t end) {
    alignas(64) float floats[kSegment] = {};
    for (int64_t k = begin; k < end; ++k) floats[k - begin] = to_float(x[k]);
    alignas(64) int8_t high[kSegment], low[kSegment];
    info_[(first(t) + r) * segments_ + number(begin)] = split(floats, end - begin, high, low);
    int8_t* to = terms_ + 2 * (first(t) * depth_ + begin * size(t) + r * kQuad);
    for (int64_t k = 0; k < end - begin; k += kQuad, to += 2 * kQuad * size(t)) {
      std::memcpy(to, high + k, kQuad);
      std::memcpy(to + kQuad, low + k, kQuad);
    }
  }

  // `count` floats, with zeros behind them, as two terms each. Where one is not finite, the scale is no number.
  static Segment split(const float* x, int64_t count, int8_t* high_terms, int8_t* low_terms) {
    constexpr float kMost = 127 * 256;
    vf top = {}, spoiled = {};
    for (int64_t k = 0; k < count; k += kWidth) {
      const vf values = load(x + k);
      top = max(magnitude(values), top);
      spoiled += values - values;
    }
    const float peak = maximum(top), inverse = peak > 0 ? kMost / peak : 0.0f;
    __m512i highs = {}, lows = {};
    for (int64_t k = 0; k < count; k += kWidth) {
      const __m512i whole = _mm512_cvtps_epi32((__m512)(load(x + k) * inverse));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
      const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
      highs = _mm512_add_epi32(highs, high);
      lows = _mm512_add_epi32(lows, low);
      _mm_store_si128(reinterpret_cast<__m128i*>(high_terms + k), _mm512_cvtepi32_epi8(high));
      _mm_store_si128(reinterpret_cast<__m128i*>(low_terms + k), _mm512_cvtepi32_epi8(low));
    }
    return {peak / kMost + sum(spoiled), -128 * _mm512_reduce_add_epi32(highs), -128 * _mm512_reduce_add_epi32(lows)};
  }

  int8_t* terms_;
  Segment* info_;
  int64_t rows_, depth_, group_, tiles_, segments_ = 0;
};

inline __m512i broadcast_quad(const int8_t* from) {
  int32_t quad;
  std::memcpy(&quad, from, sizeof quad);
  return _mm512_set1_epi32(quad);
}

// sums[r] += row r's inputs [begin, end) of tile t, which are one segment, times w[.][32], which begin there.
template <int R>
inline void vnni_segment(const VnniRows& rows, int64_t t, const int8_t* w, int64_t begin, int64_t end, int64_t number,
                         Ahead ahead, vf (&sums)[R][2]) {
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  __m512i high[R][2], low[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Segment& segment = rows.segment(rows.first(t) + r, number);
    high[r][0] = high[r][1] = _mm512_set1_epi32(segment.high_start);
    low[r][0] = low[r][1] = _mm512_set1_epi32(segment.low_start);
  }
  const int8_t* x = rows.terms(t, begin);
  for (int64_t k = 0; k < end - begin; k += kQuad) {
    prefetch(ahead.into, ahead.from + k * ahead.step);
    prefetch(ahead.into, ahead.from + (k + kQuad / 2) * ahead.step);
    const __m512i w0 = _mm512_xor_si512(_mm512_loadu_si512(w + k * kBlock), sign);
    const __m512i w1 = _mm512_xor_si512(_mm512_loadu_si512(w + k * kBlock + kLine), sign);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512i top = broadcast_quad(x + 2 * k * R + 2 * kQuad * r);
      const __m512i bottom = broadcast_quad(x + 2 * k * R + 2 * kQuad * r + kQuad);
      high[r][0] = _mm512_dpbusd_epi32(high[r][0], w0, top);
      high[r][1] = _mm512_dpbusd_epi32(high[r][1], w1, top);
      low[r][0] = _mm512_dpbusd_epi32(low[r][0], w0, bottom);
      low[r][1] = _mm512_dpbusd_epi32(low[r][1], w1, bottom);
      // Without this the compiler moves the sums of three rows and more from register to register, and to memory.
      if constexpr (R > 2) asm("" : "+v"(high[r][0]), "+v"(high[r][1]), "+v"(low[r][0]), "+v"(low[r][1]));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const vf scale = broadcast(rows.segment(rows.first(t) + r, number).scale);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v)
      sums[r][v] += (vf)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r][v], 8), low[r][v])) * scale;
  }
}

// out[R][32] (+)= the inputs [begin, end), all of one group, of tile t's rows, times w[.][32] and the group's scales.
template <int R = kVnniRows>
void vnni_tile(const VnniRows& rows, int64_t t, const int8_t* w, int64_t begin, int64_t end, Ahead ahead,
               const float* scales, bool accumulate, float* out) {
  if constexpr (R > 1)
    if (rows.size(t) < R) return vnni_tile<R - 1>(rows, t, w, begin, end, ahead, scales, accumulate, out);
  vf sums[R][2] = {};
  for (int64_t k = begin, number = rows.number(begin); k < end; k += kSegment, ++number) {
    const int64_t after = end - k < kSegment ? end : k + kSegment;
    vnni_segment<R>(rows, t, w + (k - begin) * kBlock, k, after, number,
                    {ahead.into, ahead.from + (k - begin) * ahead.step, ahead.step}, sums);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) {
      float* to = out + r * kBlock + v * kWidth;
      const vf scaled = sums[r][v] * load(scales + v * kWidth);
      store(to, accumulate ? load(to) + scaled : scaled);
    }
}

// A thread's part of a GEMM with int8 weights, for up to kMostVnniRows rows.
template <class X, class Finish>
void vnni_part(Team& team, int thread, const Linear& linear, const X* x, int64_t ldx, int64_t count,
               ThreadScratch& scratch, Finish&& finish) {
  const int64_t depth = padded_depth<int8_t>(linear.inputs), groups = (depth + linear.group - 1) / linear.group;
  const VnniRows rows(x, ldx, count, depth, linear.group, scratch);
  const Reading reading = team.reading();
  float* acc = scratch.sums.get<float>(count * kBlock);
  team.deal(blocks_of(linear.outputs), thread, [&](int64_t block) {
    const int8_t* w = static_cast<const int8_t*>(linear.weight) + block * depth * kBlock;
    const float* scales = linear.scales + block * groups * kBlock;
    for (int64_t begin = 0, end; begin < depth; begin = end) {
      end = rows.part_end(begin, kSlice);
      const int8_t* here = w + begin * kBlock;
      for (int64_t t = 0; t < rows.tiles(); ++t)
        vnni_tile(rows, t, here, begin, end, ahead_of(reading, here, end - begin, t, rows.tiles()),
                  scales + begin / linear.group * kBlock, begin > 0, acc + rows.first(t) * kBlock);
    }
    finish(block, acc);
  });
}

}  // namespace labkit
#endif
