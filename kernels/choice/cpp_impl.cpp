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
#include "continuations.h"
#include "twister.h"

namespace labkit {

// Uniform numbers of [0, 1) for consecutive ids from `begin` on.
struct Uniforms {
  int64_t begin = 0, count = 0;
  double numbers[Twister::kAtOnce];
};

// The candidate with the largest weight / draw, the draws being exponentially distributed; -1: unsure. A draw
// -log1p(-u) is no smaller than u, so most candidates need no logarithm. fill(id, uniforms) writes the numbers from
// this id on.
template <class Fill>
int64_t drawn(const Candidates& of, Fill&& fill) {
  constexpr double kNear = 1 - 1e-5;
  double best = 0, second = 0;
  int64_t chosen = -1;
  Uniforms uniforms;
  for (int64_t i = 0; i < of.count; ++i) {
    if (of.ids[i] >= uniforms.begin + uniforms.count) fill(of.ids[i], uniforms);
    const double u = uniforms.numbers[of.ids[i] - uniforms.begin], weight = double(of.weights[i]);
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
    const int64_t begin = twister ? twister->words_read() : 0;
    return drawn(of, [&](int64_t id, Uniforms& uniforms) {
      uniforms.begin = id;
      if (twister) {
        twister->skip(begin + 2 * id - twister->words_read());
        uniforms.count = twister->uniforms(vocab - id, uniforms.numbers);
        return;
      }
      uniforms.count = std::min<int64_t>(vocab - id, Twister::kAtOnce);
      for (int64_t n = 0; n < uniforms.count; ++n)
        uniforms.numbers[n] = -std::expm1(-double(draws[row * vocab + id + n]));
    });
  }
};

static ChoiceScratch& choice_scratch() {
  static thread_local ChoiceScratch scratch;
  return scratch;
}

// Chooses the tokens of sequences whose `chosen` is negative. Returns the number of sequences that stay so. If it is 0,
// the generator is advanced past the draws of all sequences; null: no draws.
inline int64_t choose(const ChoiceCall& call, TwisterState* state, int64_t* chosen, int threads) {
  std::vector<Twister> twisters;  // of each sequence, at its first draw
  if (state) {
    twisters.reserve(size_t(call.batch));
    twisters.emplace_back(*state);
    for (int64_t row = 1; row < call.batch; ++row) {
      twisters.push_back(twisters.back());
      twisters.back().skip(2 * call.vocab);
    }
  }
  threads = int(std::min(int64_t(threads), call.batch));
  Team team(threads);
  run_team(team, threads, [&](int thread) {
    team.deal(call.batch, thread, [&](int64_t row) {
      Twister* twister = state ? &twisters[size_t(row)] : nullptr;
      if (chosen[row] < 0) chosen[row] = call.token(row, twister, choice_scratch());
    });
  });
  const int64_t unsure = std::count_if(chosen, chosen + call.batch, [](int64_t token) { return token < 0; });
  if (state && !unsure) {
    Twister& last = twisters.back();
    last.skip(2 * call.vocab * call.batch - last.words_read());
    last.save(*state);
  }
  return unsure;
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
  return guarded([&] {
    return choose({logits, batch, vocab, text, length, text_stride, rules, rule_count, draws}, state, chosen, threads);
  });
}

// Writes the best continuations of each text. Returns the number of texts whose choice is left to torch.
extern "C" int64_t labkit_continue_beams(const labkit::BeamCall* call, int64_t texts, int64_t count, float* sums,
                                         int64_t* places, int32_t threads) {
  using namespace labkit;
  return guarded([&]() -> int64_t {
    std::atomic<int64_t> unsure{0};
    threads = int32_t(std::min(int64_t(threads), texts));
    Team team(threads);
    run_team(team, threads, [&](int thread) {
      ChoiceScratch& scratch = choice_scratch();
      team.deal(texts, thread, [&](int64_t text) {
        const bool sure = call->best(text, count, sums + text * count, places + text * count, scratch.order,
                                     scratch.scores, scratch.seen);
        if (!sure) ++unsure;
      });
    });
    return unsure;
  });
}
