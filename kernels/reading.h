// Ways to read weights from memory: without software prefetches, or with prefetches into the first or the second level
// of the caches, some way ahead. A way changes no result. Which is the fastest depends on the processor and on what
// its memory does at the moment, and they differ by a fifth, so an engine times them on its own steps.
#pragma once

#include <cstdint>

namespace labkit {

constexpr int64_t kLine = 64;  // bytes that memory moves at once

enum class Into : int32_t { kNothing, kFirst, kSecond };  // the cache that prefetches fill

// Intel's cores can have some 16 lines on the way to the first level and 48 to the second.
#if defined(LABKIT_AMD)
constexpr Into kUsualCache = Into::kFirst;
#else
constexpr Into kUsualCache = Into::kSecond;
#endif

struct Reading {
  Into into;
  int64_t ahead;  // bytes from a line's use to the line that is prefetched then

  // Where computing interrupts the reading: without a prefetch the memory would rest meanwhile.
  constexpr Into between() const { return into == Into::kNothing ? kUsualCache : into; }
};

// All read one stream for each thread: two or four, which are 2 to 3 % faster without prefetches, gain nothing beside
// the best of these (Zen 5; gpt2 in fp32 and bf16, a LLaMA shape in bf16).
//
// In the order of READINGS in reading.py. An AMD EPYC (Zen 4) was fastest with the first while its memory was in the
// slow mode, and with the second in the fast one; the fourth doubled the rate of a Xeon with AMX.
constexpr Reading kReadings[] = {
    {Into::kNothing, 0}, {Into::kFirst, 2048}, {Into::kFirst, 6144}, {Into::kSecond, 2048}, {Into::kSecond, 6144},
};
constexpr int32_t kReadingCount = sizeof(kReadings) / sizeof(kReadings[0]);

constexpr Reading kUsualReading = {kUsualCache, 2048};  // for steps that nobody times: prompts and single ops

inline Reading reading_of(int32_t index) {
  return index >= 0 && index < kReadingCount ? kReadings[index] : kUsualReading;
}

// `into` is the same for a whole loop, so the compiler takes the question out of it or the processor predicts it. It is
// inlined at once because GCC 12 finds that the function has no effect and drops calls that are still there later.
[[gnu::always_inline]] inline void prefetch(Into into, const char* line) {
  if (into == Into::kFirst)
    __builtin_prefetch(line, 0, 0);
  else if (into == Into::kSecond)
    __builtin_prefetch(line, 0, 2);
}

// For kernels that compute too much to wait for the second level: a line that is used soon, into the first level where
// `into` is the second. On a Xeon that took 6 to 10 % off a matrix of 4 bits, 256 bytes ahead as well as 2,048, and
// nothing off one of 8 bits.
constexpr int64_t kNear = 1024;
[[gnu::always_inline]] inline void prefetch_near(Into into, const char* line) {
  if (into == Into::kSecond) __builtin_prefetch(line, 0, 3);
}

}  // namespace labkit
