// Attention of many new tokens. Every tile of queries reads all keys and values of its head. So a thread packs them
// once, as floats and in the layout of weights, and the register tiles of the GEMM multiply queries with keys, then
// probabilities with values.
#pragma once

#include "../gemm/tile.h"
#include "slots.h"

namespace labkit {

constexpr int64_t kMostPacked = 8192;  // packed slots of a head: 4 MB of a thread's memory for 64 dimensions

// The keys and values of one head, slots [begin, end).
class PackedHead {
 public:
  PackedHead(Scratch& scratch, int padded_dim, int64_t most) : dim_(padded_dim), slots_(round_up(most, kBlock)) {
    keys_ = scratch.get<float>(size_t(slots_ * (dim_ + round_up(dim_, kBlock))));
    values_ = keys_ + slots_ * dim_;
  }

  // Packs the head `id`, unless it is packed already.
  template <class T>
  void pack(int64_t id, const HeadSlots<T>& slots, int64_t begin, int64_t end) {
    if (id == id_) return;
    id_ = id, begin_ = begin;
    for (int64_t slot = 0; slot < round_up(end - begin, kBlock); ++slot) {
      float* key = keys_ + slot / kBlock * dim_ * kBlock + slot % kBlock;  // [slots/32][dim][32]
      float* value = values_ + slot * kBlock;                              // [dim/32][slots][32]
      const bool there = slot < end - begin;
      for (int d = 0; d < dim_; d += kWidth) {
        alignas(64) float row[kWidth];
        store(row, there ? slots.key(begin + slot, d) : vf{});
        for (int i = 0; i < kWidth; ++i) key[(d + i) * kBlock] = row[i];
        store(value + d / kBlock * slots_ * kBlock + d % kBlock, there ? slots.value(begin + slot, d) : vf{});
      }
    }
  }

  int64_t begin() const { return begin_; }
  int64_t block_of(int64_t slot) const { return (slot - begin_) / kBlock; }
  int64_t first_slot(int64_t block) const { return begin_ + block * kBlock; }

  // scores[r][...] = scale * q_r . k for the slots of the blocks [first, last). queries: [count][dim].
  void score(int count, const float* queries, float scale, int64_t first, int64_t last, float* scores,
             int64_t stride) const {
    alignas(64) float sums[kMaxRows * kBlock];
    for (int64_t block = first; block < last; ++block) {
      tile_rows<float>(count, keys_ + block * dim_ * kBlock, queries, dim_, dim_, false, sums, kNothingAhead);
      for (int r = 0; r < count; ++r)
        for (int i = 0; i < kBlock; i += kWidth)
          store(scores + r * stride + (block - first) * kBlock + i, load(sums + r * kBlock + i) * scale);
    }
  }

  // out_r = sum over the slots [begin, end) of p[r][slot - begin] * v.
  void weigh(int count, const float* p, int64_t stride, int64_t begin, int64_t end, float (*out)[kMostDim]) const {
    alignas(64) float sums[kMaxRows * kBlock];
    for (int d = 0; d < dim_; d += kBlock) {
      const float* values = values_ + d * slots_ + (begin - begin_) * kBlock;
      tile_rows<float>(count, values, p, stride, end - begin, false, sums, kNothingAhead);
      for (int r = 0; r < count; ++r)
        std::memcpy(out[r] + d, sums + r * kBlock, size_t(dim_ - d < kBlock ? dim_ - d : kBlock) * 4);
    }
  }

 private:
  int64_t dim_, slots_, begin_ = 0, id_ = -1;
  float *keys_, *values_;
};

}  // namespace labkit
