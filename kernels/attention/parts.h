// The slots of a head in parts, to which several threads attend: a model with three KV heads keeps two threads busy,
// and one with a single KV head all of them. Every part gives a context of its own, and these are merged afterwards.
#pragma once

#include <algorithm>

#include "softmax.h"

namespace labkit {

constexpr int64_t kPartSlots = 256;  // at least, of a part: a unit of work lasts microseconds
constexpr int64_t kUnits = 64;       // as many units of work are enough for any team

// How many parts the slots of each of some tiles of queries have, at least one. The number does not depend on the
// number of threads, and so no result does.
inline int64_t parts_of(int64_t tiles, int64_t slots) {
  const int64_t enough = ceil_div(kUnits, tiles), most = ceil_div(slots, kPartSlots);
  return std::max(int64_t(1), std::min(enough, most));
}

// Part `index` of `parts` of some slots; may be empty.
inline Range part_of(Range slots, int64_t index, int64_t parts) {
  const int64_t size = round_up(ceil_div(slots.end - slots.begin, parts), 16);
  return {std::min(slots.begin + index * size, slots.end), std::min(slots.begin + (index + 1) * size, slots.end)};
}

// Memory in which parts leave their contexts, [tiles][parts][queries], each after its sums.
class PartialContexts {
 public:
  PartialContexts(char* memory, int64_t parts, int64_t queries, int padded_dim)
      : memory_(memory), parts_(parts), queries_(queries), dim_(padded_dim) {}

  static int64_t bytes(int64_t tiles, int64_t parts, int64_t queries, int padded_dim) {
    return tiles * parts * queries * row_bytes(padded_dim);
  }

  // Keeps the contexts of a part, context[count][padded_dim].
  void keep(int64_t tile, int64_t part, int64_t count, const Softmax* sums, const float* context) const {
    for (int64_t r = 0; r < count; ++r) {
      std::memcpy(row(tile, part, r), sums + r, sizeof(Softmax));
      std::memcpy(row(tile, part, r) + kLine, context + r * dim_, size_t(dim_) * sizeof(float));
    }
  }

  // The largest score of a query over all parts.
  float top(int64_t tile, int64_t r) const {
    float largest = -INFINITY;
    for (int64_t part = 0; part < parts_; ++part) largest = std::max(largest, sums_of(tile, part, r).top);
    return largest;
  }

  // Adds the contexts of a query over all parts to out[padded_dim], and their sums to `all`, whose top is the largest
  // of all scores.
  void add(int64_t tile, int64_t r, Softmax& all, float* out) const {
    for (int64_t part = 0; part < parts_; ++part) {
      const Softmax sums = sums_of(tile, part, r);
      if (sums.total == 0.0f) continue;
      const float weight = exp(broadcast(sums.top - all.top))[0];
      const float* from = reinterpret_cast<const float*>(row(tile, part, r) + kLine);
      all.total += weight * sums.total;
      for (int64_t d = 0; d < dim_; d += kWidth) store(out + d, load(out + d) + weight * load(from + d));
    }
  }

 private:
  static int64_t row_bytes(int padded_dim) { return kLine + round_up(padded_dim * int64_t(sizeof(float)), kLine); }
  char* row(int64_t tile, int64_t part, int64_t r) const {
    return memory_ + ((tile * parts_ + part) * queries_ + r) * row_bytes(dim_);
  }
  Softmax sums_of(int64_t tile, int64_t part, int64_t r) const {
    Softmax sums;
    std::memcpy(&sums, row(tile, part, r), sizeof sums);
    return sums;
  }

  char* memory_;
  int64_t parts_, queries_;
  int dim_;
};

}  // namespace labkit
