// Copies between the sequences of a KV cache, in place, as beam search makes them after each step.
#pragma once

#include <cstring>

#include "../abi.h"
#include "../team.h"

namespace labkit {

// Keys, values or scales of one layer: [sequences][heads][capacity] slots.
struct SequenceSlots {
  char* data;
  int64_t heads, capacity;
  int64_t bytes;  // of a slot

  char* at(int64_t sequence, int64_t head, int64_t slot) const {
    return data + ((sequence * heads + head) * capacity + slot) * bytes;
  }
};

// From slot `begin` on, sequence `to` gets the slots of sequence `from`.
struct SlotCopy {
  int64_t to, from, begin;
};

// Makes all copies at once: each reads the slots as they were before. end: slots from here on are not copied.
inline void copy_slots(const SequenceSlots& slots, const SlotCopy* copies, int64_t count, int64_t end,
                       Scratch& scratch) {
  int64_t bytes = 0;
  for (int64_t n = 0; n < count; ++n) bytes += slots.heads * (end - copies[n].begin) * slots.bytes;
  char* const before = scratch.get<char>(size_t(bytes));
  for (const bool reads : {true, false}) {
    char* part = before;
    for (int64_t n = 0; n < count; ++n) {
      const SlotCopy& copy = copies[n];
      const size_t run = size_t((end - copy.begin) * slots.bytes);
      for (int64_t head = 0; head < slots.heads; ++head, part += run)
        if (reads)
          std::memcpy(part, slots.at(copy.from, head, copy.begin), run);
        else
          std::memcpy(slots.at(copy.to, head, copy.begin), part, run);
    }
  }
}

}  // namespace labkit

// caches: [layers]; bytes: of the keys, or the values, of a slot.
extern "C" int64_t labkit_copy_slots(const labkit::Cache* caches, int64_t layers, int64_t heads, int64_t bytes,
                                     const labkit::SlotCopy* copies, int64_t count, int64_t end, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    Team team(threads);
    run_team(team, threads, [&](int thread) {
      static thread_local Scratch scratch;
      team.deal(layers, thread, [&](int64_t layer) {
        const Cache& cache = caches[layer];
        for (void* data : {cache.keys, cache.values})
          copy_slots({static_cast<char*>(data), heads, cache.capacity, bytes}, copies, count, end, scratch);
        for (bf16* scales : {cache.key_scales, cache.value_scales})
          if (scales)
            copy_slots({reinterpret_cast<char*>(scales), heads, cache.capacity, sizeof(bf16)}, copies, count, end,
                       scratch);
      });
    });
    return 0;
  });
}
