// Attention of few queries, of one new token or some, which reads keys and values from the cache where they are.
//
// A block of slots at a time: scores, softmax, weighted values. While keys are multiplied the values of the block are
// prefetched, and while values are multiplied the keys of the next block. Only softmax leaves the memory idle.
#pragma once

#include "pair_products.h"
#include "products.h"
#include "softmax.h"

namespace labkit {

// The most queries of a unit of work. All of them use a block of keys and values while it is in a cache.
constexpr int kMostQueries = 16;

// Queries that read the same keys and values: of one or several tokens, and of the heads that share a KV head.
struct Queries {
  int count;
  float* rows;  // [count][padded_dim]
  Sight sights[kMostQueries];

  Range seen() const { return seen_by(sights, count); }
};

// Bytes of a block's keys; its values take as many. Measured on a Zen 4: each is 1.03 to 1.1 times as fast as the other
// for its number of queries, and 16 KiB are slower for all.
inline int64_t block_bytes(int queries) { return queries == 1 ? 4 << 10 : 8 << 10; }

// Calls use(rows, first) for tiles of up to kQueries of `count` queries; rows: an integral constant.
template <int R = kQueries, class Use>
void by_tiles(int count, Use&& use) {
  int first = 0;
  for (; first + R <= count; first += R) use(std::integral_constant<int, R>(), first);
  if constexpr (R > 1)
    if (first < count) by_tiles<R - 1>(count - first, [&](auto rows, int at) { use(rows, first + at); });
}

// The context of the queries over some slots, by the products of P. Changes the rows of the queries. sums: [count],
// context: [count][padded_dim], not yet divided by the sums. next: the keys that the thread reads afterwards. A value's
// scale is applied to its probability, so that the values are multiplied in their stored type.
template <class P, class T>
void attend_by(const Queries& queries, const HeadSlots<T>& head, const AttentionParams& params, const SlotFacts& facts,
               Range slots, const T* next, Softmax* sums, float* context) {
  const int64_t dim = head.padded_dim;
  const int64_t whole = block_bytes(queries.count) / (dim * int64_t(sizeof(T))) / kWidth * kWidth;
  const int64_t step = whole < kWidth ? kWidth : whole < kMostBlockSlots ? whole : kMostBlockSlots;
  alignas(64) float scores[kMostQueries * kMostBlockSlots];
  float scales[kMostQueries], factors[kMostQueries], units[kMostQueries];
  std::memset(context, 0, size_t(queries.count * dim) * sizeof(float));
  for (int r = 0; r < queries.count; ++r) {
    scales[r] = params.scale * P::put_query(queries.rows + r * dim, dim);
    sums[r] = Softmax();
  }
  for (int64_t begin = slots.begin; begin < slots.end; begin += step) {
    const int64_t count = slots.end - begin < step ? slots.end - begin : step;
    const T *keys = head.keys + begin * dim, *values = head.values + begin * dim;
    const T* next_keys = begin + count < slots.end ? keys + count * dim : next;
    by_tiles(queries.count, [&](auto rows, int first) {
      P::template score<rows.value>(queries.rows + first * dim, keys, int(dim), count, scales + first,
                                    first == 0 ? values : nullptr, scores + first * kMostBlockSlots);
    });
    for (int r = 0; r < queries.count; ++r) {
      float* row = scores + r * kMostBlockSlots;
      if constexpr (HeadSlots<T>::kScaled) multiply_by_scales(head.key_scales + begin, count, row);
      factors[r] = sums[r].add(queries.sights[r], facts, params.cap, begin, count, row);
      if constexpr (HeadSlots<T>::kScaled) multiply_by_scales(head.value_scales + begin, count, row);
      units[r] = P::put_weights(row, count);
    }
    by_tiles(queries.count, [&](auto rows, int first) {
      P::template add<rows.value>(values, int(dim), count, scores + first * kMostBlockSlots, units + first,
                                  factors + first, first == 0 ? next_keys : nullptr, context + first * dim);
    });
  }
  for (int r = 0; r < queries.count; ++r) P::put_in_order(context + r * dim, dim);
}

// As `attend_by`, with the fastest products that this processor has for T.
template <class T>
void attend(const Queries& queries, const HeadSlots<T>& head, const AttentionParams& params, const SlotFacts& facts,
            Range slots, const T* next, Softmax* sums, float* context) {
  if constexpr (Pairs<T>::kExist)
    if (PairProducts<T>::takes(head.padded_dim))
      return attend_by<PairProducts<T>>(queries, head, params, facts, slots, next, sums, context);
  attend_by<FloatProducts<T>>(queries, head, params, facts, slots, next, sums, context);
}

}  // namespace labkit
