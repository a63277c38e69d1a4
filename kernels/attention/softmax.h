// The softmax of a query's scores, over slots that come block by block. Sums of earlier blocks are relative to the
// largest score so far, so a block with a larger one multiplies them by a factor (online softmax: Milakov and
// Gimelshein, arXiv 1805.02867). A context needs no memory for the scores of all slots, and parts of the slots can be
// attended to by several threads.
#pragma once

#include <cmath>

#include "../simd.h"
#include "../team.h"

namespace labkit {

// What a query sees, and how the position of a slot changes its score.
struct Sight {
  int64_t low, high;  // slots [low, high) are seen
  float slope;        // of ALiBi; 0: none
};

// The range from the first to the last slot that any of some queries sees.
inline Range seen_by(const Sight* sights, int64_t count) {
  Range slots{sights[0].low, sights[0].high};
  for (int64_t r = 1; r < count; ++r) {
    slots.begin = sights[r].low < slots.begin ? sights[r].low : slots.begin;
    slots.end = sights[r].high > slots.end ? sights[r].high : slots.end;
  }
  return {slots.begin, slots.end < slots.begin ? slots.begin : slots.end};
}

// Facts about the slots of a sequence.
struct SlotFacts {
  const uint8_t* visible;    // 0 hides a slot; null: none is hidden
  const int32_t* positions;  // for ALiBi
};

struct Softmax {
  float top = -INFINITY;  // the largest score so far
  float total = 0.0f;     // the sum of exp(score - top)

  // Adds the scores s of the slots [begin, begin + count). Turns them into exp(score - top), 0 for slots that the query
  // does not see, and up to the next whole vector. Returns the factor for sums of earlier blocks.
  float add(const Sight& sight, const SlotFacts& slots, float cap, int64_t begin, int64_t count, float* s) {
    const int64_t padded = round_up(count, kWidth);
    const int64_t low = within(sight.low - begin, count), high = within(sight.high - begin, count);
    if (cap != 0.0f)
      for (int64_t j = 0; j < padded; j += kWidth) store(s + j, soft_capped(load(s + j), cap));
    if (sight.slope != 0.0f)
      for (int64_t j = low; j < high; ++j) s[j] += sight.slope * float(slots.positions[begin + j]);
    if (slots.visible)
      for (int64_t j = low; j < high; ++j)
        if (!slots.visible[begin + j]) s[j] = -INFINITY;
    for (int64_t j = 0; j < low; ++j) s[j] = -INFINITY;
    for (int64_t j = high; j < padded; ++j) s[j] = -INFINITY;
    vf peaks = broadcast(top);
    for (int64_t j = 0; j < padded; j += kWidth) peaks = max(load(s + j), peaks);
    const float peak = maximum(peaks), shift = peak == -INFINITY ? 0.0f : peak;  // no slot is seen so far, or NaN
    const float factor = peak == top ? 1.0f : exp(broadcast(top - peak))[0];
    vf sums = {};
    for (int64_t j = 0; j < padded; j += kWidth) {
      const vf e = exp(load(s + j) - shift);
      store(s + j, e);
      sums += e;
    }
    top = peak;
    total = total * factor + sum(sums);
    return factor;
  }

  // Divides the weighted values, out[dim], by the sum with the score `sink` in it; zeros for a query that sees no slot
  // (padding).
  void divide(float* out, int64_t dim, float sink) const {
    float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    if (sink != -INFINITY && total != 0.0f) {
      const float most = sink > top ? sink : top;
      const float own = exp(broadcast(top - most))[0];
      inverse = own / (total * own + exp(broadcast(sink - most))[0]);
    }
    for (int64_t d = 0; d < dim; d += kWidth) store(out + d, load(out + d) * inverse);
  }

 private:
  static int64_t within(int64_t slot, int64_t count) { return slot < 0 ? 0 : slot < count ? slot : count; }
};

}  // namespace labkit
