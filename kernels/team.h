// The threads of one call: their barrier, the sharing of work, and the clock of the stage times.
#pragma once

#include <omp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "reading.h"
#include "rounding.h"
#include "waiting.h"

namespace labkit {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Range {
  int64_t begin, end;
};

class Team {
 public:
  explicit Team(int most, Reading reading = kUsualReading) : reading_(reading), hands_(new Hand[size_t(most)]) {}

  Reading reading() const { return reading_; }

  // Sets the size to the number of threads that the parallel region really has. Every thread calls it first. All write
  // the same number, so no thread has to wait.
  void join() { size_.store(omp_get_num_threads(), std::memory_order_relaxed); }
  int size() const { return size_.load(std::memory_order_relaxed); }

  // Every thread waits until all have arrived. It spins first, because a stage lasts microseconds, and sleeping and
  // waking take as long. A thread that still waits then sleeps, because another program has the core of a late thread.
  // Spinning on would use up the thread's own share of its core. Yielding would give the core away for a whole time
  // slice, so that every stage would last one. A sleeping thread gets its core back as soon as it is woken. Stages need
  // a barrier between them if one reads results of other threads.
  void wait() {
    const int team = size();
    if (team == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == team - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_seq_cst);
      if (sleeping_.load(std::memory_order_seq_cst)) wake_all(phase_);
      return;
    }
    for (int spins = 0; spins < kSpins; ++spins) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      pause();
    }
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    while (phase_.load(std::memory_order_seq_cst) == phase) sleep_while(phase_, phase);
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
  }

  // As `wait`, between two parts of a call. Throws Abandoned if a thread got no memory since the previous barrier, on
  // all threads that arrive at this barrier.
  void barrier() {
    wait();
    if (failed_.load(std::memory_order_relaxed) < phase_.load(std::memory_order_relaxed)) throw Abandoned();
  }

  // This thread got no memory and ends the call. It arrives at one more barrier, so that no thread waits in vain.
  void fail() {
    failed_.store(phase_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    wait();
  }
  bool failed() const { return failed_.load(std::memory_order_relaxed) != kNever; }

  struct Abandoned {};

  Range share(int64_t items, int thread) const { return {items * thread / size(), items * (thread + 1) / size()}; }

  // A thread's items of a series that all threads share: `next` gives each item to one of them, and -1 when there are
  // none left. Every thread makes one, with a barrier before the next series.
  //
  // A thread takes the items of its own share in order, so that it reads memory as one forward stream. Then it takes
  // items that no thread has begun from the far ends of the other shares. With a fixed split every stage would wait for
  // the slowest thread, and on a shared machine one is always slow: dealing took 11 and 14 % off a token on two cores.
  // Taking or stealing two or four items at a time changed no step by 1 % (Zen 5; gpt2 in bf16 and int8, SmolLM2's
  // shape).
  class Items {
   public:
    Items(Team& team, int64_t items, int thread)
        : team_(team), items_(items), thread_(thread), round_(++team.hands_[thread].rounds & 0xffff) {}

    int64_t next() {
      for (; owner_ < team_.size(); ++owner_) {
        const int64_t item = team_.take((thread_ + owner_) % team_.size(), items_, round_, owner_ == 0);
        if (item >= 0) return item;
      }
      return -1;
    }

   private:
    Team& team_;
    const int64_t items_;
    const int thread_;
    const uint64_t round_;
    int owner_ = 0;  // whose share is taken from, counted from this thread
  };

  // Calls use(item) once for each item, on some thread.
  template <class Use>
  void deal(int64_t items, int thread, Use&& use) {
    Items mine(*this, items, thread);
    for (int64_t item; (item = mine.next()) >= 0;) use(item);
  }

 private:
  // The rest of a thread's share, in one word that can be exchanged atomically: 16 bits for its round, 24 bits each for
  // its begin and its end. A word of an earlier round means an untouched share, so a round need not begin with writing
  // all shares. Each hand has its own cache line.
  struct alignas(64) Hand {
    std::atomic<uint64_t> left{0};
    uint64_t rounds = 0;  // only the owner uses it
  };

  int64_t take(int owner, int64_t items, uint64_t round, bool from_front) {
    std::atomic<uint64_t>& left = hands_[owner].left;
    uint64_t seen = left.load(std::memory_order_relaxed);
    for (;;) {
      Range range = share(items, owner);
      if (seen >> 48 == round) range = {int64_t(seen >> 24 & 0xffffff), int64_t(seen & 0xffffff)};
      if (range.begin == range.end) return -1;
      const int64_t item = from_front ? range.begin++ : --range.end;
      if (left.compare_exchange_weak(seen, round << 48 | uint64_t(range.begin) << 24 | uint64_t(range.end),
                                     std::memory_order_relaxed))
        return item;
    }
  }

  static constexpr uint32_t kNever = UINT32_MAX;

  const Reading reading_;
  alignas(64) std::atomic<int> size_{1};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<uint32_t> failed_{kNever};  // the phase in which a thread got no memory
  std::unique_ptr<Hand[]> hands_;
};

// Runs use(thread) on every thread of a team. If a thread got no memory, throws bad_alloc after the parallel region: an
// exception that leaves the region would end the process.
template <class Use>
void run_team(Team& team, int threads, Use&& use) {
#pragma omp parallel num_threads(threads)
  {
    team.join();
    try {
      use(omp_get_thread_num());
      team.barrier();
    } catch (const std::bad_alloc&) {
      team.fail();
    } catch (const Team::Abandoned&) {
    }
  }
  if (team.failed()) throw std::bad_alloc();
}

// The blocks of one matrix, dealt to a team. `deal(blocks, use)` calls use(block) for the blocks of this thread.
struct TeamDeal {
  Team& team;
  int thread;

  Reading reading() const { return team.reading(); }
  template <class Use>
  void operator()(int64_t blocks, Use&& use) {
    team.deal(blocks, thread, use);
  }
};

constexpr int64_t kNoMemory = -1;  // build.py makes it a MemoryError

// The result of call(), or kNoMemory: no exception passes through C.
template <class Call>
int64_t guarded(Call&& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

// Memory of one thread that is kept between calls and grows on demand.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  template <class V>
  V* get(size_t count) {
    const size_t bytes = size_t(round_up(int64_t(count * sizeof(V)), kLine));
    if (bytes > bytes_) {
      std::free(data_);
      bytes_ = 0;
      data_ = std::aligned_alloc(kLine, bytes);
      if (!data_) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return static_cast<V*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

struct ThreadScratch {
  Scratch rows;       // normalised row and residual, used for a whole region
  Scratch sums;       // GEMM accumulators
  Scratch last_tile;  // rows of a GEMM that don't fill a tile
  Scratch bytes;      // activations of a GEMM with int8 weights
  Scratch slice;      // a slice of int8 weights, widened
  Scratch scores;     // attention
  Scratch head;       // keys and values of a head, packed
};

// The calling thread's scratch memory, kept between calls. The function is static so that each library has its own
// memory: libraries would share the object of an inline function, also with a later library of an edited source.
static ThreadScratch& thread_scratch() {
  static thread_local ThreadScratch scratch;
  return scratch;
}

}  // namespace labkit
