// Rounding up, and the block of a matrix, to which rows are rounded. Python has the same in labkit/system/rounding.py.
#pragma once

#include <cstdint>

namespace labkit {

constexpr int kBlock = 32;  // rows of a block of a packed matrix

// The number of pieces of `size` that hold `count`.
constexpr int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

// The least multiple of `multiple` that is no smaller than `count`.
constexpr int64_t round_up(int64_t count, int64_t multiple) { return ceil_div(count, multiple) * multiple; }

}  // namespace labkit
