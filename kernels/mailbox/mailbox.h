// A queue of bytes in memory that two processes share: one writes, the other reads, in order. Both go piece by piece,
// so that the reader copies a piece while the writer writes the next, and a message may be longer than the queue.
#pragma once

#include <cstring>

#include "../team.h"

namespace labkit {

constexpr int64_t kPiece = 16 << 10;  // bytes that are published at once: two pieces fit into the first-level cache

// Counts since the beginning, each on the cache line of the process that advances it. The bytes follow, beginning with
// the byte of count `base`. When the queue is empty, the writer sets `base` anew and begins at the first byte, so that
// it finds the same lines in its caches.
struct Mailbox {
  alignas(64) std::atomic<int64_t> written;
  std::atomic<int64_t> base;
  alignas(64) std::atomic<int64_t> read;

  char* bytes() { return reinterpret_cast<char*>(this + 1); }
};

// Moves `count` bytes with copy(place in the queue, offset, number). available(): number of bytes that can be moved
// now. Stops after `patience_ns` without any. Returns the number of moved bytes.
template <class Available, class Copy>
int64_t move_bytes(std::atomic<int64_t>& mine, const std::atomic<int64_t>& base, int64_t capacity, int64_t count,
                   int64_t patience_ns, Available&& available, Copy&& copy) {
  int64_t at = mine.load(std::memory_order_relaxed), moved = 0, since = 0;
  for (int spins = 0; moved < count;) {
    int64_t now = available(at);
    if (now <= 0) {
      if (++spins < kSpins) {
        pause();
        continue;
      }
      nap();
      if (!since) since = now_ns();
      if (now_ns() - since > patience_ns) break;
      continue;
    }
    spins = 0;
    since = 0;
    const int64_t place = (at - base.load(std::memory_order_relaxed)) % capacity;
    for (int64_t most : {count - moved, kPiece, capacity - place})
      if (now > most) now = most;
    copy(place, moved, now);
    moved += now;
    at += now;
    mine.store(at, std::memory_order_release);
  }
  return moved;
}

}  // namespace labkit
