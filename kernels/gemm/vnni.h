// The GEMM of quantised weights with the VNNI instruction, which multiplies 64 pairs of bytes and adds up each four
// products in a cycle. Turning codes into floats takes four times as long, which is all the time that memory leaves a
// Zen 4 core.
#pragma once

#include "vnni_rows.h"

#if defined(LABKIT_HAS_VNNI)

#include "amx.h"

namespace labkit {

constexpr int kSpanRows = 2;            // up to this number of rows both nibbles have sums of their own
constexpr int64_t kScalesAhead = 2048;  // bytes: the fastest of 0 to 2,048 with a Xeon, by a twentieth
// With more rows, converting the weights once for all rows takes no longer (Zen 4), or AMX multiplies them.
#if defined(LABKIT_HAS_AMX)
constexpr int64_t kMostVnniRows = 12;
#else
constexpr int64_t kMostVnniRows = 48;
#endif

inline __m512i broadcast_quad(const int8_t* from) {
  int32_t quad;
  std::memcpy(&quad, from, sizeof quad);
  return _mm512_set1_epi32(quad);
}

// The codes of 16 outputs x 4 k, with the lowest code as 0.
enum class Taken { kBytes, kLow, kHigh };
template <Taken kTaken>
[[gnu::always_inline]] inline __m512i counted_codes(const char* w) {
  const __m512i bytes = _mm512_loadu_si512(w);
  if constexpr (kTaken == Taken::kBytes) return _mm512_xor_si512(bytes, _mm512_set1_epi8(char(0x80)));
  return _mm512_and_si512(bytes, _mm512_set1_epi8(kTaken == Taken::kLow ? 0x0f : char(0xf0)));
}

// sums[r] += row r's terms of `depth` k from `x` on times the consecutive codes from `w` on.
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
        // Without this the compiler moves the sums of three and more rows between registers, and to memory.
        if constexpr (R > 2) asm("" : "+v"(sums[term][r][0]), "+v"(sums[term][r][1]));
      }
    }
  }
}

// The same for both nibbles of the bytes from `w` on, which are spans of 64 k. Each nibble has its own sums, so twice
// as many sums are independent, which takes up to a fifth off the time of one row in the cache (Xeon).
template <int R, int kTerms>
[[gnu::always_inline]] inline void vnni_spans(const char* w, const int8_t* x, int64_t spans, Ahead ahead,
                                              __m512i (&low)[kTerms][R][2], __m512i (&high)[kTerms][R][2]) {
  for (int64_t span = 0; span < spans; ++span, x += kTerms * kHalf * R)
    for (int64_t k = 0; k < kHalf; k += kQuad, x += kTerms * kQuad * R, w += kQuad * kBlock) {
      const int64_t at = span * kHalf + k;
      prefetch(ahead.into, ahead.from + at * ahead.step);
      prefetch(ahead.into, ahead.from + (at + kQuad / 2) * ahead.step);
      prefetch_near(ahead.into, w + kNear);
      prefetch_near(ahead.into, w + kNear + kLine);
      const __m512i low0 = counted_codes<Taken::kLow>(w), low1 = counted_codes<Taken::kLow>(w + kLine);
      const __m512i high0 = counted_codes<Taken::kHigh>(w), high1 = counted_codes<Taken::kHigh>(w + kLine);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int term = 0; term < kTerms; ++term) {
          const int8_t* of_row = x + kQuad * (kTerms * r + term);
          const __m512i first = broadcast_quad(of_row), second = broadcast_quad(of_row + kTerms * kHalf * R);
          low[term][r][0] = _mm512_dpbusd_epi32(low[term][r][0], low0, first);
          low[term][r][1] = _mm512_dpbusd_epi32(low[term][r][1], low1, first);
          high[term][r][0] = _mm512_dpbusd_epi32(high[term][r][0], high0, second);
          high[term][r][1] = _mm512_dpbusd_epi32(high[term][r][1], high1, second);
        }
      }
    }
}

// A block's sums of R rows as floats, over the segments so far.
template <int kTerms, int R>
struct VnniTotals {
  const Quantised& matrix;
  const VnniRows<kTerms>& rows;
  int64_t t, block;
  Into into;  // the cache for prefetched scales
  vf of[R][2] = {};

  [[gnu::always_inline]] void start(int64_t n, __m512i (&sums)[kTerms][R][2]) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int term = 0; term < kTerms; ++term)
        sums[term][r][0] = sums[term][r][1] = _mm512_set1_epi32(rows.portion(rows.first(t) + r, n).starts[term]);
  }

  // Adds the sums of segment n.
  [[gnu::always_inline]] void add(int64_t n, const __m512i (&sums)[kTerms][R][2]) {
    const fp16* scales = matrix.scales(block, rows.segment(n).group);
    const char* later = reinterpret_cast<const char*>(scales) + kScalesAhead;
    prefetch(into, later);
    if (matrix.asymmetric()) prefetch(into, later + kLine);
    vf scale[2], minimum[2] = {};
    for (int v = 0; v < 2; ++v) {
      scale[v] = load(scales + v * kWidth);
      if (matrix.asymmetric()) minimum[v] = load(scales + kBlock + v * kWidth);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Portion& of_row = rows.portion(rows.first(t) + r, n);
      const vf unit = broadcast(of_row.scale);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        __m512i sum = sums[0][r][v];
        if constexpr (kTerms == 2) sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), sums[1][r][v]);
        of[r][v] += (vf)_mm512_cvtepi32_ps(sum) * (unit * scale[v]);
        if (matrix.asymmetric()) of[r][v] += minimum[v] * broadcast(of_row.total);
      }
    }
  }
};

// Sums of lower nibbles, ready for adding sums of higher nibbles.
template <int R, int kTerms>
[[gnu::always_inline]] inline void raise(__m512i (&sums)[kTerms][R][2]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int term = 0; term < kTerms; ++term)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) sums[term][r][v] = _mm512_slli_epi32(sums[term][r][v], 4);
}

// out[R][32] (+)= the segments [first, last) of tile t's rows times a block's weights.
template <int kTerms, int R = kVnniRows>
void vnni_tile(const Quantised& matrix, const VnniRows<kTerms>& rows, int64_t t, int64_t block, int64_t first,
               int64_t last, Ahead ahead, float* out) {
  if constexpr (R > 1)
    if (rows.size(t) < R) return vnni_tile<kTerms, R - 1>(matrix, rows, t, block, first, last, ahead, out);
  VnniTotals<kTerms, R> totals{matrix, rows, t, block, ahead.into};
  if (first > 0)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2; ++v) totals.of[r][v] = load(out + r * kBlock + v * kWidth);
  const char* origin = matrix.lane(block, rows.segment(first).begin);
  const auto ahead_at = [&](const char* w) {
    return Ahead{ahead.into, ahead.from + (w - origin) / kBlock * ahead.step, ahead.step};
  };
  for (int64_t n = first; n < last; ++n) {
    const Segment& segment = rows.segment(n);
    __m512i sums[kTerms][R][2];
    totals.start(n, sums);
    if (!matrix.nibbles()) {
      const char* w = matrix.lane(block, segment.begin);
      vnni_run<Taken::kBytes>(w, rows.terms(t, segment.begin), segment.end - segment.begin, ahead_at(w), sums);
      totals.add(n, sums);
      continue;
    }
    if constexpr (R <= kSpanRows) {
      // Whole spans of one segment, or one span whose halves are segments of their own.
      const bool halves = segment.end - segment.begin == kHalf && n + 1 < last;
      const int64_t end = halves ? rows.segment(n + 1).end : segment.end;
      if (segment.begin % kSpan == 0 && end % kSpan == 0 && (!halves || end - segment.begin == kSpan)) {
        __m512i high[kTerms][R][2] = {};
        if (halves) totals.start(n + 1, high);
        const char* w = matrix.lane(block, segment.begin);
        vnni_spans(w, rows.terms(t, segment.begin), (end - segment.begin) / kSpan, ahead_at(w), sums, high);
        if (!halves) {
          raise(sums);
          for (int r = 0; r < R; ++r)
            for (int term = 0; term < kTerms; ++term)
              for (int v = 0; v < 2; ++v) sums[term][r][v] = _mm512_add_epi32(sums[term][r][v], high[term][r][v]);
        }
        totals.add(n, sums);
        if (halves) totals.add(++n, high);
        continue;
      }
    }
    const int64_t span = segment.begin / kSpan * kSpan;
    if (segment.low)
      for (int64_t k = matrix.high(segment.begin) ? span + kSpan : span; k < segment.end; k += kSpan) {
        const int64_t depth = segment.end - k < kHalf ? segment.end - k : kHalf;
        const char* w = matrix.lane(block, k);
        vnni_run<Taken::kLow>(w, rows.terms(t, k), depth, ahead_at(w), sums);
      }
    if (segment.low && segment.high) raise(sums);
    if (segment.high)
      for (int64_t k = span + kHalf; k < segment.end; k += kSpan) {
        const int64_t depth = segment.end - k < kHalf ? segment.end - k : kHalf;
        vnni_run<Taken::kHigh>(matrix.lane(block, k), rows.terms(t, k), depth, kNothingAhead, sums);
      }
    totals.add(n, sums);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) store(out + r * kBlock + v * kWidth, totals.of[r][v]);
}

// A thread's part of a GEMM with quantised weights, for up to kMostVnniRows rows.
template <int kTerms, class Deal, class X, class Finish>
void vnni_part(Deal&& deal, const Linear& linear, const X* x, int64_t ldx, int64_t count, ThreadScratch& scratch,
               Finish&& finish) {
  const Quantised matrix(linear);
  const Reading reading = deal.reading();
  const VnniRows<kTerms> rows(matrix, x, ldx, linear.inputs, count, scratch);
  float* acc = scratch.sums.get<float>(count * kBlock);
  deal(blocks_of(linear.outputs), [&](int64_t block) {
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
