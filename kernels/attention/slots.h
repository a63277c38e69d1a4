// The slots of one KV head, for attention.
#pragma once

#include <type_traits>

#include "../int8_cache.h"

namespace labkit {

// Keys and values, [slots][padded_dim] each, and their scales, [slots], if they are int8.
template <class T>
struct HeadSlots {
  static constexpr bool kScaled = std::is_same_v<T, int8_t>;
  const T *keys, *values;
  const bf16 *key_scales, *value_scales;
  int padded_dim;

  // id: number of the head among the heads of all sequences.
  HeadSlots(const Cache& cache, int64_t id, int padded_dim)
      : keys(static_cast<const T*>(cache.keys) + id * cache.capacity * padded_dim),
        values(static_cast<const T*>(cache.values) + id * cache.capacity * padded_dim),
        key_scales(kScaled ? cache.key_scales + id * cache.capacity : nullptr),
        value_scales(kScaled ? cache.value_scales + id * cache.capacity : nullptr),
        padded_dim(padded_dim) {}
};

// row[j] *= scales[j] for `count` slots.
inline void multiply_by_scales(const bf16* scales, int64_t count, float* row) {
  int64_t j = 0;
  for (; j + kWidth <= count; j += kWidth) store(row + j, load(row + j) * load(scales + j));
  for (; j < count; ++j) row[j] *= to_float(scales[j]);
}

}  // namespace labkit
