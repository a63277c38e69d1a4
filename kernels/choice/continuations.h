// The best continuations of the beams of a text.
#pragma once

#include "candidates.h"

namespace labkit {

// The largest sums so far, in a heap whose first element is the smallest of them.
class LargestSums {
 public:
  struct Sum {
    float value;
    int64_t place;
    bool operator>(const Sum& other) const { return value > other.value; }
  };

  LargestSums(Sum* room, int64_t most) : sums_(room), most_(most) {}

  // Offers log_probs[i] + score, with the places from `first` on.
  void offer_row(const float* log_probs, int64_t vocab, float score, int64_t first) {
    const auto is_taken = [&](float log_prob) { return count_ < most_ || log_prob + score > sums_[0].value; };
    for_each_large(log_probs, 0, vocab, is_taken, [&](int64_t i) {
      if (count_ == most_) std::pop_heap(sums_, sums_ + count_--, std::greater<Sum>());
      sums_[count_++] = {log_probs[i] + score, first + i};
      std::push_heap(sums_, sums_ + count_, std::greater<Sum>());
    });
  }

  // Sorts the sums, and returns how many there are.
  int64_t sort() {
    std::sort_heap(sums_, sums_ + count_, std::greater<Sum>());
    return count_;
  }

 private:
  Sum* sums_;
  int64_t most_, count_ = 0;
};

// Beams of several texts, each with the log probabilities of its next tokens.
struct BeamCall {
  const float* log_probs;  // [texts * beams][vocab]
  const float* scores;     // [texts * beams]
  int64_t beams, vocab;
  const int64_t* tokens;  // [texts * beams][stride], of which `length` are the text so far
  int64_t length, stride;
  const ScoreRule* rules;  // change log probabilities
  int64_t rule_count;

  // Writes the `count` largest sums of a text and their places beam * vocab + token, the largest first. False: equal
  // sums, or sums that are no numbers, leave the choice to torch.
  bool best(int64_t text, int64_t count, float* sums, int64_t* places, Scratch& heap, Scratch& changed,
            Scratch& seen) const {
    auto* const room = heap.get<LargestSums::Sum>(size_t(count) + 2);
    LargestSums largest(room, count + 1);
    for (int64_t beam = 0; beam < beams; ++beam) {
      const int64_t row = text * beams + beam;
      const float* own = log_probs + row * vocab;
      if (!(own[0] == own[0])) return false;  // log_softmax gives a row that is NaN or has none
      if (rule_count) {
        uint8_t* const flags = seen.get<uint8_t>(size_t(vocab));
        std::memset(flags, 0, size_t(vocab));
        float* const copy = changed.get<float>(size_t(vocab));
        std::copy(own, own + vocab, copy);
        for (int64_t n = 0; n < rule_count; ++n)
          change(rules[n], copy, vocab, row, tokens + row * stride, length, flags);
        own = copy;
      }
      largest.offer_row(own, vocab, scores[row], beam * vocab);
    }
    const int64_t found = largest.sort();
    if (found < count) return false;
    for (int64_t n = 0; n < count; ++n) {
      if (n + 1 < found && room[n].value == room[n + 1].value) return false;
      sums[n] = room[n].value, places[n] = room[n].place;
    }
    return true;
  }
};

}  // namespace labkit
