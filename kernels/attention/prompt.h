// Attention of many new tokens. All of them read the keys and values of a head, so a thread packs these once, in the
// layout and the type of weights and activations, and the tiles of the GEMM multiply queries with keys, then
// probabilities with values: with the dot products of bf16 pairs, or AMX, where a bf16 GEMM has them.
//
// Some dozens of queries take a block of slots at a time, whose scores and probabilities stay in the second-level
// cache.
#pragma once

#include "../gemm/cpp_impl.cpp"
#include "slots.h"
#include "softmax.h"

namespace labkit {

constexpr int64_t kPromptRows = 48;    // queries of a unit of work: whole tiles of registers and of AMX
constexpr int64_t kPromptSlots = 128;  // of a block

// The keys and values of one head, slots [begin, end), as operands of type X: float, or bf16 in pairs.
template <class X>
class PackedHead {
 public:
  static constexpr int kLanes = kLanesPerK<X>;

  PackedHead(Scratch& scratch, int padded_dim, int64_t most) : dim_(padded_dim), slots_(round_up(most, kBlock)) {
    keys_ = scratch.get<X>(size_t(slots_ * (dim_ + round_up(dim_, kBlock))));
    values_ = keys_ + slots_ * dim_;
  }

  // Packs slots of the head `id`, without the scales of int8 numbers, unless they are packed already.
  template <class T>
  void pack(int64_t id, const HeadSlots<T>& head, int64_t begin, int64_t end) {
    if (id == id_) return;
    id_ = id, begin_ = begin, end_ = end;
    for (int64_t slot = begin; slot < begin + round_up(end - begin, kBlock); slot += kLanes) {
      const int64_t at = slot - begin;
      const T* const keys = head.keys + slot * dim_;
      for (int lane = 0; lane < kLanes; ++lane)  // [slots/32][dim/lanes][32][lanes]
        pack_key(slot + lane < end ? keys + lane * dim_ : nullptr,
                 keys_ + at / kBlock * dim_ * kBlock + (at % kBlock + lane) * kLanes);
      pack_values(head.values + slot * dim_, end - slot, values_ + at * kBlock);  // [dim/32][slots/lanes][32][lanes]
    }
  }

  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }
  const X* keys(int64_t slot) const { return keys_ + (slot - begin_) * dim_; }  // of the block that begins with a slot
  const X* values(int64_t slot, int64_t d) const { return values_ + d * slots_ + (slot - begin_) * kBlock; }

 private:
  template <class T>
  void pack_key(const T* key, X* to) {
    for (int d = 0; d < dim_; d += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) to[d * kBlock + lane] = key ? operand(key[d + lane]) : X{};
  }

  template <class T>
  void pack_values(const T* values, int64_t there, X* to) {
    for (int d = 0; d < dim_; ++d) {
      X* const at = to + d / kBlock * slots_ * kBlock + d % kBlock * kLanes;
      for (int lane = 0; lane < kLanes; ++lane) at[lane] = lane < there ? operand(values[lane * dim_ + d]) : X{};
    }
  }

  template <class T>
  static X operand(T x) {
    if constexpr (std::is_same_v<T, X>) return x;
    X out;
    from_float(to_float(x), &out);
    return out;
  }

  int64_t dim_, slots_, begin_ = 0, end_ = 0, id_ = -1;
  X *keys_, *values_;
};

// The rows of a product with packed keys or values.
#if defined(LABKIT_HAS_AMX)
template <class X>
using PromptTile = std::conditional_t<std::is_same_v<X, bf16>, AmxRows, RegisterRows<X>>;
#else
template <class X>
using PromptTile = RegisterRows<X>;
#endif

// Some queries of a prompt, their scores, and their contexts.
template <class X>
class PromptQueries {
 public:
  static constexpr int64_t kMost = round_up(kPromptRows, 16);  // a tile of AMX is whole

  Sight sights[kPromptRows];

  explicit PromptQueries(ThreadScratch& scratch, int padded_dim)
      : dim_(padded_dim), stride_(row_stride(padded_dim)), scratch_(scratch) {
    const int64_t wide = round_up(dim_, kBlock);
    scores_ = scratch.scores.get<float>(size_t(kMost * (kPromptSlots + wide) + kMost * (stride_ + kScoreStride)));
    context_ = scores_ + kMost * kPromptSlots;
    queries_ = reinterpret_cast<X*>(context_ + kMost * wide);
    weights_ = reinterpret_cast<X*>(context_ + kMost * (wide + stride_));
  }

  void put(int64_t r, const float* query, int dim) { to_activation(query, dim, dim_, queries_ + r * stride_); }

  // The contexts of `count` queries.
  template <class T>
  void attend(int64_t count, const PackedHead<X>& packed, const HeadSlots<T>& head, const AttentionParams& params,
              const SlotFacts& facts) {
    const Range seen = seen_by(sights, count);
    const int64_t low = seen.begin < packed.begin() ? packed.begin() : seen.begin;  // a padding row sees no slot
    rows_ = round_up(count, 16);
    std::memset(context_, 0, size_t(rows_ * round_up(dim_, kBlock)) * sizeof(float));
    for (int64_t r = 0; r < count; ++r) sums_[r] = Softmax();
    for (int64_t begin = low - (low - packed.begin()) % kBlock; begin < seen.end; begin += kPromptSlots)
      add(count, packed, head, params, facts, begin, seen.end - begin < kPromptSlots ? seen.end - begin : kPromptSlots);
  }

  // out[dim] of a query, after `attend`. sink: see Softmax::divide.
  void context(int64_t r, float sink, float* out) const {
    for (int64_t d = 0; d < dim_; d += kWidth)
      store(out + d, load(context_ + d / kBlock * rows_ * kBlock + r * kBlock + d % kBlock));
    sums_[r].divide(out, dim_, sink);
  }

 private:
  static constexpr int64_t kScoreStride = row_stride(kPromptSlots);

  template <class T>
  void add(int64_t count, const PackedHead<X>& packed, const HeadSlots<T>& head, const AttentionParams& params,
           const SlotFacts& facts, int64_t begin, int64_t slots) {
    const int64_t blocks = ceil_div(slots, kBlock), block_scores = rows_ * kBlock;
    {
      const PromptTile<X> queries(queries_, stride_, count, scratch_);
      for (int64_t b = 0; b < blocks; ++b)
        queries.multiply(nullptr, packed.keys(begin + b * kBlock), 0, dim_, false, scores_ + b * block_scores);
    }
    alignas(64) float row[kPromptSlots];
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t j = 0; j < blocks * kBlock; j += kWidth)
        store(row + j, load(scores_ + j / kBlock * block_scores + r * kBlock + j % kBlock) * params.scale);
      if constexpr (HeadSlots<T>::kScaled) multiply_by_scales(head.key_scales + begin, slots, row);
      const float factor = sums_[r].add(sights[r], facts, params.cap, begin, slots, row);
      if constexpr (HeadSlots<T>::kScaled) multiply_by_scales(head.value_scales + begin, slots, row);
      to_activation(row, slots, blocks * kBlock, weights_ + r * kScoreStride);
      if (factor == 1.0f) continue;
      for (int64_t d = 0; d < dim_; d += kWidth) {
        float* const sum = context_ + d / kBlock * block_scores + r * kBlock + d % kBlock;
        store(sum, load(sum) * factor);
      }
    }
    const PromptTile<X> weights(weights_, kScoreStride, count, scratch_);
    for (int64_t d = 0; d < dim_; d += kBlock)
      weights.multiply(nullptr, packed.values(begin, d), 0, blocks * kBlock, true,
                       context_ + d / kBlock * block_scores);
  }

  int64_t dim_, stride_, rows_ = 0;
  ThreadScratch& scratch_;
  float *scores_, *context_;
  X *queries_, *weights_;  // [kMost][stride_], [kMost][kScoreStride]
  Softmax sums_[kPromptRows];
};

}  // namespace labkit
