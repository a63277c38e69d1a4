// The experts of all layers that have any, in a file. The layers count from 0 here. The most used ones stay in slots of
// memory.
//
// A step passes the layers in order. In each it says which experts its rows chose (`want`) and takes them in waves
// (`next_wave`): those in memory, then others as they arrive. The experts of a wave keep their slots until the next one
// is asked for. Before that it may say which experts a layer will probably choose (`guess`).
//
// Two threads read, each a whole expert at a time, so that the disk has a next request while the bytes of one are
// copied and compared. Wanted experts come first, then guessed ones, whose reading ends once they prove wrong. An
// expert is read into a free slot, or into that of the expert with the lowest score: the number of its uses, of which
// older ones count less.
//
// After a failure `next_wave` gives all experts at once, with invalid contents. The caller asks `failed` when the step
// is over. The next step tries again.
#pragma once

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "../team.h"
#include "expert_file.h"

namespace labkit {

constexpr double kHalfLife = 256;  // passes after which a use counts half
constexpr int kExpertReaders = 2;

// Counters since the beginning; Python gets a copy. An expert counts once for each layer and pass that wants it.
struct ExpertCounts {
  int64_t wanted;        // experts that a layer wanted
  int64_t hits;          // of these, in memory
  int64_t guessed_hits;  // of these, read because of a guess
  int64_t reads, bytes_read, read_ns;
  int64_t wasted_bytes;    // of these, for guesses that proved wrong
  int64_t guesses, right;  // experts that were guessed, and the right ones among them
  int64_t wait_ns;         // in which a step waited for experts
  int64_t direct;          // whether the page cache is bypassed
  int64_t failure, error_number, failed_layer, failed_expert;
};

class ExpertStore {
 public:
  // experts: [layers][per_layer]. bytes: of each part, 0 for a part that experts lack. slots: [slot_count][slot_bytes],
  // at a multiple of kPage, each with room for the pages that an expert's parts touch.
  ExpertStore(int fd, const StoredExpert* experts, int64_t layers, int64_t per_layer, const int64_t* bytes, char* slots,
              int64_t slot_bytes, int64_t slot_count)
      : file_(fd, experts, layers * per_layer, bytes),
        per_layer_(per_layer),
        slots_(slots),
        slot_bytes_(slot_bytes),
        states_(size_t(layers * per_layer)),
        owners_(size_t(slot_count), -1) {
    try {
      for (std::thread& reader : readers_) reader = std::thread([this] { read_on(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~ExpertStore() { stop(); }
  ExpertStore(const ExpertStore&) = delete;
  ExpertStore& operator=(const ExpertStore&) = delete;

  // A new pass over the layers.
  void begin_pass() {
    std::lock_guard lock(mutex_);
    ++pass_;
    counts_.failure = kWhole;
    let_go(wave_);
    let_go(wants_);  // of a step that was abandoned
    guessed_.clear();
    changed_.notify_all();
  }

  // The experts that the rows of a layer chose, in ascending order. in_order: waves keep this order.
  void want(int64_t layer, const int64_t* experts, int64_t count, bool in_order) {
    std::lock_guard lock(mutex_);
    in_order_ = in_order;
    wants_.clear();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t expert = layer * per_layer_ + experts[i];
      State& state = states_[size_t(expert)];
      ++counts_.wanted;
      if (state.place == kInSlot) {
        ++counts_.hits;
        counts_.guessed_hits += state.unused;
      }
      state.unused = false;
      state.wanted = true;
      state.score = score(state) + 1;
      state.scored_in = pass_;
      wants_.push_back(expert);
    }
    for (int64_t expert : guessed_) counts_.right += states_[size_t(expert)].wanted;
    guessed_.clear();
    changed_.notify_all();
  }

  // The experts that a layer will probably choose, in place of an earlier guess.
  void guess(int64_t layer, const int64_t* experts, int64_t count) {
    std::lock_guard lock(mutex_);
    guessed_.clear();
    for (int64_t i = 0; i < count; ++i)
      if (const int64_t expert = layer * per_layer_ + experts[i]; !is_guessed(expert)) guessed_.push_back(expert);
    counts_.guesses += int64_t(guessed_.size());
    changed_.notify_all();
  }

  // Ends the wave before, and waits for experts of the layer that were in no wave yet. Returns the number of experts in
  // the new wave; 0: the layer has had them all. rest: the experts that were in no wave yet, by their numbers in the
  // layer. The new wave comes first.
  int64_t next_wave(int64_t* rest) {
    std::unique_lock lock(mutex_);
    let_go(wave_);
    changed_.notify_all();
    if (wants_.empty()) return 0;
    const int64_t begin = now_ns();
    changed_.wait(lock, [&] { return counts_.failure != kWhole || ready() > 0; });
    counts_.wait_ns += now_ns() - begin;
    const bool all = counts_.failure != kWhole;
    const auto here = [&](int64_t expert) { return all || states_[size_t(expert)].place == kInSlot; };
    const auto end = in_order_ ? std::find_if_not(wants_.begin(), wants_.end(), here)
                               : std::stable_partition(wants_.begin(), wants_.end(), here);
    wave_.assign(wants_.begin(), end);
    wants_.erase(wants_.begin(), end);
    int64_t at = 0;
    for (const auto* list : {&wave_, &wants_})
      for (int64_t expert : *list) rest[at++] = expert % per_layer_;
    return int64_t(wave_.size());
  }

  // The place of a part of an expert in a wave. After a failure its contents are invalid.
  const char* part(int64_t layer, int64_t expert, int64_t part) const {
    const int64_t number = layer * per_layer_ + expert;
    const int64_t slot = std::max<int64_t>(0, states_[size_t(number)].slot);
    return slots_ + slot * slot_bytes_ + file_.place_in_slot(number, part);
  }

  bool failed() const {
    std::lock_guard lock(mutex_);
    return counts_.failure != kWhole;
  }

  ExpertCounts counts() const {
    std::lock_guard lock(mutex_);
    ExpertCounts counts = counts_;
    counts.direct = file_.direct();
    return counts;
  }

 private:
  enum Place : uint8_t { kInFile, kOnTheWay, kInSlot };

  // wanted: until its wave is over. unused: read because of a guess, and not wanted since.
  struct State {
    Place place = kInFile;
    bool wanted = false, unused = false;
    int64_t slot = -1, scored_in = 0;
    double score = 0;
  };

  double score(const State& state) const {
    return state.score * std::exp2(double(state.scored_in - pass_) / kHalfLife);
  }

  // Nobody needs these experts any more.
  void let_go(std::vector<int64_t>& experts) {
    for (int64_t expert : experts) states_[size_t(expert)].wanted = false;
    experts.clear();
  }

  // The number of experts that the next wave would have.
  int64_t ready() const {
    const auto here = [&](int64_t expert) { return states_[size_t(expert)].place == kInSlot; };
    if (in_order_) return here(wants_.front());
    return std::count_if(wants_.begin(), wants_.end(), here);
  }

  // The next expert to read: the first wanted one, else the first guessed one; -1: none.
  int64_t next_read() const {
    for (const auto* list : {&wants_, &guessed_})
      for (int64_t expert : *list)
        if (states_[size_t(expert)].place == kInFile) return expert;
    return -1;
  }

  // Whether to read the next piece of an expert. A guess that proved wrong is given up.
  bool goes_on(int64_t expert) const {
    std::lock_guard lock(mutex_);
    return !stop_ && (states_[size_t(expert)].wanted || is_guessed(expert));
  }

  // A slot for an expert: a free one, else that of the expert with the lowest score that nobody needs now. A guess
  // counts as a use, and no guessed expert takes the slot of another. If all are needed, the first wanted expert may
  // take the slot of the last wanted one: in order, that one is needed later. -1: none.
  int64_t slot_for(int64_t expert) const {
    int64_t best = -1;
    double lowest = INFINITY;
    for (size_t slot = 0; slot < owners_.size(); ++slot) {
      if (owners_[slot] < 0) return int64_t(slot);
      const State& state = states_[size_t(owners_[slot])];
      const bool guessed = is_guessed(owners_[slot]);
      if (state.place != kInSlot || state.wanted || (guessed && is_guessed(expert))) continue;
      if (const double score = this->score(state) + guessed; score < lowest) {
        lowest = score;
        best = int64_t(slot);
      }
    }
    if (best >= 0 || wants_.empty() || expert != wants_.front()) return best;
    const auto last = std::find_if(wants_.rbegin(), wants_.rend(), [&](int64_t other) {
      return other != expert && states_[size_t(other)].place == kInSlot;
    });
    return last == wants_.rend() ? -1 : states_[size_t(*last)].slot;
  }

  bool is_guessed(int64_t expert) const { return std::count(guessed_.begin(), guessed_.end(), expert) > 0; }

  void read_on() {
    std::unique_lock lock(mutex_);
    for (;;) {
      int64_t expert = -1, slot = -1;
      changed_.wait(lock, [&] {
        if (stop_) return true;
        if (counts_.failure != kWhole || (expert = next_read()) < 0) return false;
        return (slot = slot_for(expert)) >= 0;
      });
      if (stop_) return;
      State& state = states_[size_t(expert)];
      if (int64_t& owner = owners_[size_t(slot)]; owner >= 0) {
        State& before = states_[size_t(owner)];
        if (before.unused) counts_.wasted_bytes += file_.bytes();
        before.place = kInFile;
        before.unused = false;
        before.slot = -1;
      }
      owners_[size_t(slot)] = expert;
      state.place = kOnTheWay;
      state.slot = slot;
      state.unused = !state.wanted;
      lock.unlock();
      const int64_t begin = now_ns();
      const Outcome outcome = file_.read(expert, slots_ + slot * slot_bytes_, [&] { return goes_on(expert); });
      const int64_t end = now_ns();
      lock.lock();
      if (stop_) return;
      counts_.read_ns += end - begin;
      counts_.bytes_read += outcome.bytes;
      if (outcome.failure == kWhole) {
        state.place = kInSlot;
        ++counts_.reads;
      } else {
        state.place = kInFile;
        state.unused = false;
        state.slot = -1;
        owners_[size_t(slot)] = -1;
        if (outcome.failure == kGivenUp)
          counts_.wasted_bytes += outcome.bytes;
        else
          fail(expert, outcome);
      }
      changed_.notify_all();
    }
  }

  // A guessed expert that can't be read is not guessed any more: it fails if it is wanted.
  void fail(int64_t expert, const Outcome& outcome) {
    if (!states_[size_t(expert)].wanted) {
      guessed_.erase(std::remove(guessed_.begin(), guessed_.end(), expert), guessed_.end());
      return;
    }
    counts_.failure = outcome.failure;
    counts_.error_number = outcome.error_number;
    counts_.failed_layer = expert / per_layer_;
    counts_.failed_expert = expert % per_layer_;
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& reader : readers_)
      if (reader.joinable()) reader.join();
  }

  ExpertFile file_;
  const int64_t per_layer_;
  char* const slots_;
  const int64_t slot_bytes_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<State> states_;     // [experts]
  std::vector<int64_t> owners_;   // [slots]: the expert in each slot; -1: none
  std::vector<int64_t> wants_;    // of the layer, not in a wave yet
  std::vector<int64_t> guessed_;  // of the layer that comes next
  std::vector<int64_t> wave_;
  bool in_order_ = false, stop_ = false;
  int64_t pass_ = 0;
  ExpertCounts counts_{};
  std::thread readers_[kExpertReaders];
};

}  // namespace labkit
