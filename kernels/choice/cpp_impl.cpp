// Choice of the next token of each sequence from its logits, as Hugging Face's `generate` makes it: rules change scores
// or remove tokens, and then the largest score, or a draw, is the choice.
//
// transformers chooses the same tokens for the same state of torch's generator. Scores are exact, because a rule rounds
// where torch rounds. Exponentials and their sums are rounded in another way than torch's. If this could change the
// choice, the call says so, and the caller lets transformers choose.
#pragma once

#include <cmath>
#include <vector>

#include "../team.h"
#include "candidates.h"
#include "twister.h"

namespace labkit {

// The candidate with the largest weight / draw, the draws being exponentially distributed; -1: unsure. A draw
// -log1p(-u) is no smaller than u, so most candidates need no logarithm.
template <class Uniform>
int64_t drawn(const Candidates& of, Uniform&& uniform) {
  constexpr double kNear = 1 - 1e-5;
  double best = 0, second = 0;
  int64_t chosen = -1;
  for (int64_t i = 0; i < of.count; ++i) {
    const double u = uniform(of.ids[i]), weight = double(of.weights[i]);
    if (u == 0) return -1;
    if (weight <= best * kNear * u) continue;
    const double race = weight / -std::log1p(-u);
    if (race > best)
      second = best, best = race, chosen = of.ids[i];
    else
      second = std::max(second, race);
  }
  return second >= best * kNear ? -1 : chosen;
}

struct ChoiceScratch {
  Scratch scores, ids, weights, order, seen;
};

// One call of `labkit_choose`.
struct ChoiceCall {
  const float* logits;
  int64_t batch, vocab;
  const int64_t* text;
  int64_t length, text_stride;
  const ScoreRule* rules;
  int64_t rule_count;
  const float* draws;

  // The candidates of one sequence after all rules. False: unsure.
  bool candidates(int64_t row, uint8_t* seen, Candidates& of) const {
    const int64_t* own_text = text + row * text_stride;
    std::copy(logits + row * vocab, logits + (row + 1) * vocab, of.scores);
    int64_t n = 0;
    for (; n < rule_count && rules[n].kind < kTopK; ++n)
      change(rules[n], of.scores, vocab, row, own_text, length, seen);
    if (!leave_removed(vocab, of)) return false;
    for (; n < rule_count; ++n)
      if (!remove_by(rules[n], of)) return false;
    return true;
  }

  // The token of one sequence; -1: unsure. `twister`: at the first draw of this sequence; null: no draws.
  int64_t token(int64_t row, Twister* twister, ChoiceScratch& scratch) const {
    const size_t size = size_t(vocab);
    uint8_t* seen = scratch.seen.get<uint8_t>(size);
    std::memset(seen, 0, size);
    Candidates of{scratch.scores.get<float>(size),
                  scratch.ids.get<int32_t>(size),
                  scratch.weights.get<float>(size),
                  scratch.order.get<int32_t>(size),
                  0,
                  0,
                  0};
    if (!candidates(row, seen, of)) return -1;
    if (!twister && !draws) return of.ids[std::max_element(of.scores, of.scores + of.count) - of.scores];
    weigh(of);
    if (draws) return drawn(of, [&](int64_t id) { return -std::expm1(-double(draws[row * vocab + id])); });
    int64_t read = 0;
    return drawn(of, [&](int64_t id) {
      if (id > read) twister->skip(2 * (id - read));
      read = id + 1;
      return twister->uniform();
    });
  }
};

static ChoiceScratch& choice_scratch() {
  static thread_local ChoiceScratch scratch;
  return scratch;
}

}  // namespace labkit

// Chooses a token for each of `batch` sequences whose `chosen` is negative, from logits [batch][vocab] and its text
// [batch][length], with a stride. In `rules`, changes of scores come first. `state`: torch's generator, which is
// advanced as by `torch.multinomial`; null: no draw, the largest score is chosen. `draws`: [batch][vocab], made by
// torch instead of the generator; may be null. Returns the number of sequences in which torch's rounding would decide.
// Their `chosen` stays negative, and then the generator does not change.
extern "C" int64_t labkit_choose(const float* logits, int64_t batch, int64_t vocab, const int64_t* text, int64_t length,
                                 int64_t text_stride, const labkit::ScoreRule* rules, int64_t rule_count,
                                 labkit::TwisterState* state, const float* draws, int64_t* chosen, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    const ChoiceCall call{logits, batch, vocab, text, length, text_stride, rules, rule_count, draws};
    std::vector<Twister> begins;  // the generator at each sequence, and at the end
    if (state) {
      begins.assign(1, Twister(*state));
      for (int64_t row = 0; row < batch; ++row) {
        begins.push_back(begins.back());
        begins.back().skip(2 * vocab);
      }
    }
    threads = int32_t(std::min(int64_t(threads), batch));
    Team team(threads);
    run_team(team, threads, [&](int thread) {
      team.deal(batch, thread, [&](int64_t row) {
        Twister* twister = state ? &begins[size_t(row)] : nullptr;
        if (chosen[row] < 0) chosen[row] = call.token(row, twister, choice_scratch());
      });
    });
    const int64_t unsure = std::count_if(chosen, chosen + batch, [](int64_t token) { return token < 0; });
    if (state && !unsure) begins.back().save(*state);
    return unsure;
  });
}
