// The exchange between the ranks of a model, which add up their parts. Each rank writes its part into its own slot,
// they meet, and then each reads the slots of all ranks in rank order, so that all get the same bits. If the ranks
// share memory, the slots are in it and nothing is copied. Else a callback brings every slot to every rank.
#pragma once

#include <signal.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "../team.h"

namespace labkit {

constexpr int kMostRanks = 64;
constexpr int64_t kLookEvery = 200'000'000;  // nanoseconds between two checks whether a rank still runs
constexpr int kLooksStopped = 15;            // consecutive checks before a stopped rank counts as lost

// One rank's line in shared memory: how often it has met the other ranks, and how many calls it has left by an error
// (other_ranks.py).
struct alignas(64) Arrival {
  std::atomic<uint64_t> rounds;
  int32_t pid;
  std::atomic<int32_t> failed_calls;
  int32_t ready;
};

enum Failure : int32_t {
  kFine = 0,
  kRankEnded = 1,
  kTimedOut = 2,
  kCallbackFailed = 3,
  kRankStopped = 4,
  kRankFailed = 5
};

// One rank's end of the exchange, created by Python (all_reduce/exchange.py).
struct Exchange {
  int32_t rank, ranks;
  Arrival* arrivals;  // [ranks], shared; null: ranks meet in `bring`
  char* slots;        // [2][ranks][slot_bytes]
  char* spare;        // [slot_bytes], used by this rank only
  int64_t slot_bytes;
  int32_t (*bring)(int32_t turn, int64_t bytes);  // fills the other ranks' slots; not 0: it failed
  double timeout_s;
  uint64_t round;   // meetings so far
  int32_t failure;  // a Failure; after one no thread waits
  int32_t failed_rank;
  int32_t failed_calls;  // so far, on this rank
};

// The state letter of /proc: 'T' for a stopped process, 'Z' or 'X' for an ended one.
inline char state_of(int32_t pid) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return 'X';
  char path[32], stat[512];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "r");
  if (!file) return '?';
  const size_t read = std::fread(stat, 1, sizeof stat - 1, file);
  std::fclose(file);
  stat[read] = 0;
  const char* after_name = std::strrchr(stat, ')');
  return after_name ? after_name[2] : '?';
}

// Waits until every rank has come to `round` meetings.
inline void wait_for_ranks(Exchange& exchange, uint64_t round) {
  const int64_t begin = now_ns();
  int64_t looked = begin;
  for (int r = 0; r < exchange.ranks; ++r) {
    const Arrival& other = exchange.arrivals[r];
    int looks_stopped = 0;
    for (int spins = 0; other.rounds.load(std::memory_order_acquire) < round; ++spins) {
      if (spins < kRankSpins) {
        pause();
        continue;
      }
      nap();
      Failure failure = kFine;
      const int64_t now = now_ns();
      if (other.failed_calls.load(std::memory_order_acquire) > exchange.failed_calls) {
        failure = kRankFailed;
      } else if (now - looked >= kLookEvery) {
        looked = now;
        const char state = state_of(other.pid);
        looks_stopped = state == 'T' ? looks_stopped + 1 : 0;
        if (state == 'Z' || state == 'X')
          failure = kRankEnded;
        else if (looks_stopped >= kLooksStopped)
          failure = kRankStopped;
        else if (double(now - begin) > exchange.timeout_s * 1e9)
          failure = kTimedOut;
      }
      if (failure == kFine) continue;
      if (other.rounds.load(std::memory_order_acquire) >= round) break;
      exchange.failure = failure;
      exchange.failed_rank = r;
      return;
    }
  }
}

// A thread's view of the exchange during one call. A rank has two slots and uses them in turn. A rank that writes for
// the next meeting does not disturb a rank that still reads the parts of the last meeting, because no rank is two
// meetings ahead of another. So one meeting per sum is enough, and none is needed after reading.
class Ranks {
 public:
  explicit Ranks(Exchange* exchange) : exchange_(exchange), round_(exchange ? exchange->round : 0) {}

  bool alone() const { return !exchange_; }
  int count() const { return exchange_ ? exchange_->ranks : 1; }
  int64_t room() const { return exchange_->slot_bytes; }
  // After a meeting: whether it or an earlier one has failed. The contents of other ranks' slots are then undefined.
  bool failed() const { return exchange_->failure != kFine; }

  // The memory that this rank writes before the next meeting. After a failure it is `spare`, because the rank goes on
  // without meetings and another rank may still read both its slots.
  template <class V>
  V* own() const {
    return reinterpret_cast<V*>(failed() ? exchange_->spare : slot(round_, exchange_->rank));
  }
  // The part of rank r in the latest meeting.
  template <class V>
  const V* of(int r) const {
    return reinterpret_cast<const V*>(slot(round_ - 1, r));
  }

  // Called by every thread of the team once its part of `own` is written; ends after a barrier.
  void meet(Team& team, int thread, int64_t bytes) {
    team.barrier();
    ++round_;
    if (thread == 0 && exchange_->failure == kFine) {
      exchange_->round = round_;
      if (exchange_->arrivals) {
        exchange_->arrivals[exchange_->rank].rounds.store(round_, std::memory_order_release);
        wait_for_ranks(*exchange_, round_);
      } else if (exchange_->bring(int32_t((round_ - 1) & 1), bytes)) {
        exchange_->failure = kCallbackFailed;
      }
    }
    team.barrier();
  }

 private:
  char* slot(uint64_t round, int r) const {
    return exchange_->slots + (int64_t(round & 1) * exchange_->ranks + r) * exchange_->slot_bytes;
  }

  Exchange* exchange_;
  uint64_t round_;
};

// The parts of a sum, one from each rank.
struct Parts {
  const float* rows[kMostRanks];
  int count;
  int64_t stride;

  Parts() : count(0), stride(0) {}
  Parts(const float* only, int64_t stride) : rows{only}, count(only ? 1 : 0), stride(stride) {}
  Parts(const Ranks& ranks, int64_t stride) : count(ranks.count()), stride(stride) {
    for (int r = 0; r < count; ++r) rows[r] = ranks.of<float>(r);
  }
};

// Calls use(i, sum of the parts' row m at i). The parts are added in rank order.
template <class Use>
void add_parts(const Parts& parts, int64_t m, int64_t begin, int64_t end, Use&& use) {
  const float* first = parts.rows[0] + m * parts.stride;
  if (parts.count == 1) {
    for (int64_t i = begin; i < end; ++i) use(i, first[i]);
  } else if (parts.count == 2) {
    const float* second = parts.rows[1] + m * parts.stride;
    for (int64_t i = begin; i < end; ++i) use(i, first[i] + second[i]);
  } else {
    for (int64_t i = begin; i < end; ++i) {
      float total = first[i];
      for (int r = 1; r < parts.count; ++r) total += parts.rows[r][m * parts.stride + i];
      use(i, total);
    }
  }
}

}  // namespace labkit
