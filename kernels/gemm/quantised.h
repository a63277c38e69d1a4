// The packed layout of a quantised matrix, and its GEMM that turns codes into floating numbers.
//
// Codes of 8 bits are [N/32][K/4][32][4] bytes. Codes of 4 bits are [N/32][K/64][8][32][4]: the bytes of a span of 64 k
// hold the quads of its first half in their lower nibbles and the quads of its second half in the higher nibbles, each
// as code + 8. So half a span is read as the bytes of 32 k, with another mask. Scales are fp16 [N/32][groups][1 or
// 2][32]. The second number is the minimum, and the weight is then scale * (code + lowest()) + minimum.
#pragma once

#include "../abi.h"
#include "tile.h"

namespace labkit {

constexpr int64_t kQuad = 4;               // k in a lane
constexpr int64_t kSpan = 64, kHalf = 32;  // k whose 4-bit codes share bytes, and k in one nibble of these bytes

class Quantised {
 public:
  explicit Quantised(const Linear& linear)
      : codes_(static_cast<const char*>(linear.weight)),
        scales_(static_cast<const fp16*>(linear.scales)),
        depth_(padded_depth<int8_t>(linear.inputs)),
        stored_(linear.bits == 4 ? round_up(linear.inputs, kSpan) / 2 : depth_),
        group_(linear.group),
        groups_(ceil_div(linear.inputs, group_)),
        terms_(linear.asymmetric ? 2 : 1),
        nibbles_(linear.bits == 4) {}

  int64_t depth() const { return depth_; }
  int64_t group() const { return group_; }
  int64_t groups() const { return groups_; }
  bool nibbles() const { return nibbles_; }
  bool asymmetric() const { return terms_ == 2; }
  float lowest() const { return nibbles_ ? 8 : 128; }  // added to a code, so that the lowest code becomes 0

  // The lane of input k of a block, for output 0. With 4 bits the other half of the span shares it.
  const char* lane(int64_t block, int64_t k) const {
    const int64_t row = nibbles_ ? k / kSpan * kHalf + k % kHalf / kQuad * kQuad : k / kQuad * kQuad;
    return codes_ + (block * stored_ + row) * kBlock;
  }
  bool high(int64_t k) const { return nibbles_ && k % kSpan >= kHalf; }
  const fp16* scales(int64_t block, int64_t group) const {
    return scales_ + (block * groups_ + group) * terms_ * kBlock;
  }

  // Bytes of `depth` inputs of a block.
  int64_t bytes(int64_t depth) const { return (nibbles_ ? depth / 2 : depth) * kBlock; }

  // The end of the run of k that begins at `begin`. The codes of a run are consecutive and share a scale.
  int64_t run_end(int64_t begin, int64_t end) const {
    const int64_t group_end = (begin / group_ + 1) * group_, half_end = (begin / kHalf + 1) * kHalf;
    const int64_t after = nibbles_ && half_end < group_end ? half_end : group_end;
    return after < end ? after : end;
  }

  // One weight, as a float.
  float weight(int64_t n, int64_t k) const {
    const int64_t block = n / kBlock, at = n % kBlock;
    const auto byte = uint8_t(lane(block, k)[at * kQuad + k % kQuad]);
    const int code = !nibbles_ ? int8_t(byte) : (high(k) ? byte >> 4 : byte & 15) - 8;
    const fp16* scales = this->scales(block, k / group_);
    const float scale = to_float(scales[at]);
    return terms_ == 2 ? scale * (float(code) + lowest()) + to_float(scales[kBlock + at]) : scale * float(code);
  }

 private:
  const char* codes_;
  const fp16* scales_;
  int64_t depth_, stored_, group_, groups_, terms_;
  bool nibbles_;
};

// Calls use(codes) with the type of the codes of input k.
template <class Use>
void with_codes(const Quantised& matrix, int64_t k, Use&& use) {
  if (!matrix.nibbles())
    use(Bytes());
  else if (matrix.high(k))
    use(Nibbles<4>());
  else
    use(Nibbles<0>());
}

// Scale and addend of the codes of a group: a weight is code * scale + addend.
struct Affine {
  vf scale[kVectors], addend[kVectors];

  Affine(const Quantised& matrix, int64_t block, int64_t group) {
    const fp16* from = matrix.scales(block, group);
    for (int v = 0; v < kVectors; ++v) {
      scale[v] = load(from + v * kWidth);
      addend[v] = matrix.asymmetric() ? scale[v] * matrix.lowest() + load(from + kBlock + v * kWidth) : vf{};
    }
  }
};

// A pair of k as bf16, rounded to nearest.
inline vu rounded_pair(vf first, vf second) {
  return (((vu)first + 0x8000) >> 16) | (((vu)second + 0x8000) & 0xffff0000u);
}

// Widens a run of codes to weights in bf16 pairs or floats, `out` [k][32]. Without scales (null) `out` gets the codes,
// which both types hold exactly. Prefetches the following codes.
template <class Codes, class W>
void widen_run(const char* from, int64_t depth, const Affine* affine, Reading reading, W* out) {
  for (int64_t k = 0; k < depth; k += kQuad, from += kQuad * kBlock) {
    for (int line = 0; line < 2; ++line) prefetch(reading.between(), from + reading.ahead + line * kLine);
    for (int v = 0; v < kVectors; ++v) {
      vi quads;
      std::memcpy(&quads, from + v * sizeof quads, sizeof quads);
      quads = Codes::prepared(quads);
      for (int n = 0; n < 4; n += 2) {
        vf first = Codes::nth(quads, n), second = Codes::nth(quads, n + 1);
        if (affine) {
          first = first * affine->scale[v] + affine->addend[v];
          second = second * affine->scale[v] + affine->addend[v];
        }
        if constexpr (std::is_same_v<W, bf16>) {
          const vu pairs = rounded_pair(first, second);
          std::memcpy(out + ((k + n) * kBlock + v * kWidth * 2), &pairs, sizeof pairs);
        } else {
          store(out + (k + n) * kBlock + v * kWidth, first);
          store(out + (k + n + 1) * kBlock + v * kWidth, second);
        }
      }
    }
  }
}

// A thread's part of a GEMM with many rows: the weights are widened once for all rows, a slice at a time.
//
// If a whole row of the matrix shares a scale, it is applied to the sum, and nothing is rounded. Else the weights are
// scaled as they are widened, because scaling the sums of each group took longer.
template <class W, class Deal, class Rows, class Finish>
void widened_part(Deal&& deal, const Quantised& matrix, int64_t blocks, const Rows& rows, ThreadScratch& scratch,
                  Finish&& finish) {
  const bool whole = matrix.groups() == 1 && !matrix.asymmetric();
  const int64_t depth = padded_depth<W>(matrix.depth()), sums = rows.padded() * kBlock;
  float* acc = scratch.sums.get<float>(sums);
  W* slice = scratch.slice.get<W>(kDepth * kBlock);
  deal(blocks, [&](int64_t block) {
    for (int64_t begin = 0; begin < depth; begin += kDepth) {
      const int64_t end = begin + kDepth < depth ? begin + kDepth : depth;
      for (int64_t k = begin, after; k < end; k = after) {
        after = matrix.run_end(k, end);
        const Affine affine(matrix, block, k / matrix.group());
        with_codes(matrix, k, [&](auto codes) {
          widen_run<decltype(codes)>(matrix.lane(block, k), after - k, whole ? nullptr : &affine, deal.reading(),
                                     slice + (k - begin) * kBlock);
        });
      }
      rows.multiply(nullptr, slice, begin, end - begin, begin > 0, acc);
    }
    if (whole) {
      const fp16* scales = matrix.scales(block, 0);
      for (int64_t m = 0; m < sums; m += kBlock)
        for (int v = 0; v < kBlock; v += kWidth) store(acc + m + v, load(acc + m + v) * load(scales + v));
    }
    finish(block, acc);
  });
}

// A thread's part of a GEMM with few rows: codes are multiplied as floats, and the sum of a run is scaled. A minimum is
// multiplied with the sum of the activations of its run.
template <class Deal, class X, class Finish>
void run_by_run(Deal&& deal, const Quantised& matrix, int64_t blocks, const X* x, int64_t ldx, int64_t count,
                ThreadScratch& scratch, Finish&& finish) {
  float* acc = scratch.sums.get<float>(2 * count * kBlock);
  float* of_run = acc + count * kBlock;
  deal(blocks, [&](int64_t block) {
    std::memset(acc, 0, size_t(count * kBlock) * sizeof(float));
    for (int64_t k = 0, after; k < matrix.depth(); k = after) {
      after = matrix.run_end(k, matrix.depth());
      with_codes(matrix, k, [&](auto codes) {
        using T = Quad<decltype(codes)>;
        const T* w = reinterpret_cast<const T*>(matrix.lane(block, k));
        tile_rows<T>(int(count), w, x + k, ldx, after - k, false, of_run, ahead_of(deal.reading(), w, after - k, 0, 1));
      });
      const Affine affine(matrix, block, k / matrix.group());
      for (int64_t m = 0; m < count; ++m) {
        float total = 0;
        if (matrix.asymmetric())
          for (int64_t i = k; i < after; ++i) total += to_float(x[m * ldx + i]);
        for (int v = 0; v < kVectors; ++v) {
          float* to = acc + m * kBlock + v * kWidth;
          const vf sums = load(of_run + m * kBlock + v * kWidth);
          store(to, load(to) + sums * affine.scale[v] + affine.addend[v] * total);
        }
      }
    }
    finish(block, acc);
  });
}

}  // namespace labkit
