// Lays out the rows of a matrix as the kernels read them (gemm/tile.h, quantised.h), on all threads.
//
// A word of 32 bits of a panel holds one float, two bf16, four 8-bit or eight 4-bit codes of one row, and the words of
// a block's 32 rows are neighbours; a word of fp16 panels holds one number in 16 bits. So packing is the transposition
// of 32 rows of words. A thread reads a few cache lines of each row, and writes whole lines of the panel.
#pragma once

#include <type_traits>
#include <utility>

#include "rounding.h"
#include "simd.h"
#include "team.h"

namespace labkit {

// A matrix of any strides, counted in elements. With `second` each block has 16 rows of the first matrix, then 16 rows
// of the second one (gate and up rows of a gated MLP).
struct PackedFrom {
  const char *first, *second;
  int64_t outputs, inputs;  // of each
  int64_t row_stride, column_stride;
  int32_t size, lanes;  // bytes of an element, and elements of a word
};

// Word `index` of a row of elements. Elements past the last input are 0.
template <class Word>
[[gnu::always_inline]] inline Word word_at(const char* row, const PackedFrom& from, int64_t index) {
  const int64_t size = from.size, begin = index * from.lanes, left = from.inputs - begin;
  Word word = 0;
  char* bytes = reinterpret_cast<char*>(&word);
  for (int64_t lane = 0; lane < from.lanes && lane < left; ++lane)
    std::memcpy(bytes + lane * size, row + (begin + lane) * from.column_stride * size, size_t(size));
  return word;
}

// The row that a lane of a block holds; null: padding.
inline const char* row_of(const PackedFrom& from, int64_t block, int lane) {
  constexpr int kHalfBlock = kBlock / 2;
  const bool upper = from.second && lane >= kHalfBlock;
  const int64_t row = from.second ? block * kHalfBlock + lane % kHalfBlock : block * kBlock + lane;
  return row < from.outputs ? (upper ? from.second : from.first) + row * from.row_stride * from.size : nullptr;
}

// A vector of kWidth words. A shuffle takes its indices in the same type.
template <class Word>
using Words = std::conditional_t<sizeof(Word) == 4, vu, vh>;

// a[0], b[0], a[1], b[1] and so on, from the elements of a's and b's halves that begin at kFrom.
template <int kFrom, class V, size_t... kLane>
[[gnu::always_inline]] inline V interleaved(V a, V b, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, int(kFrom + kLane / 2 + kLane % 2 * kWidth)...);
#else
  return __builtin_shuffle(a, b, V{(kFrom + kLane / 2 + kLane % 2 * kWidth)...});
#endif
}

// Transposes kWidth rows of kWidth words: interleaving each row with the row half a matrix below moves the highest bit
// of a row's number to the lowest bit of a column's number.
template <class V>
[[gnu::always_inline]] inline void transpose(V (&rows)[kWidth]) {
  constexpr auto lanes = std::make_index_sequence<kWidth>();
#pragma GCC unroll 4
  for (int bits = 1; bits < kWidth; bits *= 2) {
    V next[kWidth];
#pragma GCC unroll 8
    for (int i = 0; i < kWidth / 2; ++i) {
      next[2 * i] = interleaved<0>(rows[i], rows[i + kWidth / 2], lanes);
      next[2 * i + 1] = interleaved<kWidth / 2>(rows[i], rows[i + kWidth / 2], lanes);
    }
    std::memcpy(rows, next, sizeof rows);
  }
}

// The rows of kWidth lanes of a block; null: padding.
struct LaneRows {
  const char* at[kWidth];

  LaneRows(const PackedFrom& from, int64_t block, int lane) {
    for (int i = 0; i < kWidth; ++i) at[i] = row_of(from, block, lane + i);
  }

  // columns[i] = word `begin` + i of all rows, for words that are whole in memory.
  template <class Word>
  [[gnu::always_inline]] void read(int64_t begin, Words<Word> (&columns)[kWidth]) const {
    constexpr int64_t kAhead = 512;  // bytes
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      columns[i] = Words<Word>{};
      if (!at[i]) continue;
      const char* const words = at[i] + begin * int64_t(sizeof(Word));
      __builtin_prefetch(words + kAhead);
      std::memcpy(columns + i, words, sizeof columns[i]);
    }
    transpose(columns);
  }
};

template <class Word>
void pack_block(const PackedFrom& from, int64_t block, Word* to) {
  const int64_t words = ceil_div(from.inputs, from.lanes);
  const int64_t whole = from.column_stride == 1 ? from.inputs / from.lanes / kWidth * kWidth : 0;
  for (int lane = 0; lane < kBlock; lane += kWidth) {
    const LaneRows rows(from, block, lane);
    for (int64_t begin = 0; begin < whole; begin += kWidth) {
      Words<Word> columns[kWidth];
      rows.read<Word>(begin, columns);
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) std::memcpy(to + (begin + i) * kBlock + lane, columns + i, sizeof columns[i]);
    }
    for (int i = 0; i < kWidth; ++i)
      for (int64_t at = whole; at < words; ++at)
        to[at * kBlock + lane + i] = rows.at[i] ? word_at<Word>(rows.at[i], from, at) : Word(0);
  }
}

constexpr int64_t kQuads = 8;  // words of a packed span of 64 codes

// Four codes of the first half of a span and four of the second half, as the nibbles of a word.
template <class W>
[[gnu::always_inline]] inline W nibbles_of(W low, W high) {
  constexpr uint32_t kEights = 0x08080808, kLow = 0x0f0f0f0f;
  return ((low ^ kEights) & kLow) | ((high ^ kEights) & kLow) << 4;
}

// Codes of 4 bits, see `unpack_nibbles` of codes.py: the low nibbles of a span's words are its first half.
inline void pack_nibbles(const PackedFrom& from, int64_t block, uint32_t* to) {
  const int64_t spans = ceil_div(from.inputs, 8 * kQuads);
  const int64_t whole = from.column_stride == 1 ? from.inputs / (8 * kQuads) : 0;
  for (int lane = 0; lane < kBlock; lane += kWidth) {
    const LaneRows rows(from, block, lane);
    for (int64_t span = 0; span < whole; ++span) {
      vu words[2 * kQuads];
      for (int64_t begin = 0; begin < 2 * kQuads; begin += kWidth) {
        vu columns[kWidth];
        rows.read<uint32_t>(span * 2 * kQuads + begin, columns);
        std::memcpy(words + begin, columns, sizeof columns);
      }
      for (int64_t q = 0; q < kQuads; ++q) {
        const vu packed = nibbles_of(words[q], words[q + kQuads]);
        std::memcpy(to + (span * kQuads + q) * kBlock + lane, &packed, sizeof packed);
      }
    }
    for (int i = 0; i < kWidth; ++i)
      for (int64_t at = whole * kQuads; at < spans * kQuads; ++at) {
        const int64_t low = at / kQuads * 2 * kQuads + at % kQuads;
        const auto word = [&](int64_t n) { return rows.at[i] ? word_at<uint32_t>(rows.at[i], from, n) : 0; };
        to[at * kBlock + lane + i] = nibbles_of(word(low), word(low + kQuads));
      }
  }
}

}  // namespace labkit

// panels: [blocks][words][32]; nibbles: whether the matrix consists of 4-bit codes, one in each byte.
extern "C" void labkit_pack(const labkit::PackedFrom* from, void* panels, int32_t nibbles, int32_t threads) {
  using namespace labkit;
  const int64_t blocks = ceil_div(from->outputs, from->second ? kBlock / 2 : kBlock);
  const int64_t words = ceil_div(from->inputs, nibbles ? 8 : from->lanes), span = nibbles ? 8 : 1;
  const int64_t depth = round_up(words, span);
#pragma omp parallel for num_threads(threads)
  for (int64_t block = 0; block < blocks; ++block) {
    if (nibbles)
      pack_nibbles(*from, block, static_cast<uint32_t*>(panels) + block * depth * kBlock);
    else if (from->size * from->lanes == 2)
      pack_block(*from, block, static_cast<uint16_t*>(panels) + block * depth * kBlock);
    else
      pack_block(*from, block, static_cast<uint32_t*>(panels) + block * depth * kBlock);
  }
}
