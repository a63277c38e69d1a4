// Ways to read weights from memory: without software prefetches, or with prefetches into the first or the second cache
// level, some distance ahead. A way changes no result. The fastest way depends on the processor and on the current
// state of its memory. The ways differ by a fifth, so an engine times them on its own steps.
#pragma once

#include <cstdint>

namespace labkit {

constexpr int64_t kLine = 64;  // bytes that memory moves at once

enum class Into : int32_t { kNothing, kFirst, kSecond };  // the cache that prefetches fill

// Intel's cores can have about 16 lines in flight to the first level and 48 to the second.
#if defined(LABKIT_AMD)
constexpr Into kUsualCache = Into::kFirst;
#else
constexpr Into kUsualCache = Into::kSecond;
#endif

struct Reading {
  Into into;
  int64_t ahead;  // bytes from the line in use to the line that is prefetched

  // For places where computing interrupts the reading: without a prefetch the memory would be idle meanwhile.
  constexpr Into between() const { return into == Into::kNothing ? kUsualCache : into; }
};

// All ways read one stream per thread. Two or four streams are 2 to 3 % faster without prefetches, but not faster than
// the best of these ways (Zen 5; gpt2 in fp32 and bf16, a LLaMA shape in bf16).
//
// The order is that of READINGS in reading.py. An AMD EPYC (Zen 4) was fastest with the first way while its memory was
// in the slow mode, and with the second way in the fast mode; the fourth way doubled the rate of a Xeon with AMX.
constexpr Reading kReadings[] = {
    {Into::kNothing, 0}, {Into::kFirst, 2048}, {Into::kFirst, 6144}, {Into::kSecond, 2048}, {Into::kSecond, 6144},
};
constexpr int32_t kReadingCount = sizeof(kReadings) / sizeof(kReadings[0]);

constexpr Reading kUsualReading = {kUsualCache, 2048};  // for prompts and single ops, whose ways are not timed

inline Reading reading_of(int32_t index) {
  return index >= 0 && index < kReadingCount ? kReadings[index] : kUsualReading;
}

// `into` is the same for a whole loop, so the compiler moves the branch out of the loop or the processor predicts it.
// Always inlined, because GCC 12 finds that the function has no effect and drops calls that it has not inlined.
[[gnu::always_inline]] inline void prefetch(Into into, const char* line) {
  if (into == Into::kFirst)
    __builtin_prefetch(line, 0, 0);
  else if (into == Into::kSecond)
    __builtin_prefetch(line, 0, 2);
}

// For kernels that compute too much to wait for the second level: prefetches a line that is used soon into the first
// level if `into` is the second. On a Xeon that took 6 to 10 % off a 4-bit matrix, both 256 and 2,048 bytes ahead, and
// nothing off an 8-bit matrix.
constexpr int64_t kNear = 1024;
[[gnu::always_inline]] inline void prefetch_near(Into into, const char* line) {
  if (into == Into::kSecond) __builtin_prefetch(line, 0, 3);
}

}  // namespace labkit
