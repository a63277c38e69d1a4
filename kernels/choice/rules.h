// The rules of a choice. This file has the rules that change scores.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace labkit {

enum RuleKind : int32_t {
  kPenaltyOfText,  // of the tokens of the sequence, without its first `count`
  kPenaltyOfIds,   // of ids [batch][count]
  kTemperature,
  kSetScores,   // of ids [count] to `value`
  kOnlyTokens,  // ids [count] get 0, all others -inf
  kBias,        // of the last one of ids [count], if the text ends with the others
  kDecay,       // of ids [count]: a score x becomes x + |x| * value
  kNgram,       // no tokens that would end a second equal run of `count` tokens
  kTopK,        // from here on, rules remove tokens
  kTopP,
  kMinP,
  kTypical,
  kEpsilon,
  kEta,
};

struct ScoreRule {
  int32_t kind;
  int32_t keep;  // tokens that stay at least
  double value;
  const int64_t* ids;
  int64_t count;
};

constexpr float kRemoved = -std::numeric_limits<float>::infinity();

inline float penalised(float score, float penalty) { return score < 0 ? score * penalty : score / penalty; }

// The product is rounded before the sum, as torch does it: a fused multiplication would round once.
inline float decayed(float score, float factor) {
  if (!std::isfinite(score)) return score;
  const volatile float more = std::abs(score) * factor;
  return score + more;
}

// Whether the sequence ends with ids [count].
inline bool ends_with(const int64_t* text, int64_t length, const int64_t* ids, int64_t count) {
  return count <= length && std::equal(ids, ids + count, text + length - count);
}

// Calls use(id) once for each different id that is in the vocabulary. `seen` [vocab] is 0 before and after.
template <class Use>
void for_each_id(const int64_t* ids, int64_t count, int64_t vocab, uint8_t* seen, Use&& use) {
  for (int64_t n = 0; n < count; ++n) {
    const int64_t id = ids[n];
    if (id < 0 || id >= vocab || seen[id]) continue;
    seen[id] = 1;
    use(id);
  }
  for (int64_t n = 0; n < count; ++n)
    if (ids[n] >= 0 && ids[n] < vocab) seen[ids[n]] = 0;
}

// Removes tokens that would end a run of `size` tokens that the text has already.
inline void remove_repeated(const int64_t* text, int64_t length, int64_t size, int64_t vocab, float* scores) {
  const int64_t* ending = text + length + 1 - size;
  for (int64_t begin = 0; begin + size <= length; ++begin) {
    const int64_t id = text[begin + size - 1];
    if (id >= 0 && id < vocab && std::equal(ending, ending + size - 1, text + begin)) scores[id] = kRemoved;
  }
}

// Changes the scores [vocab] of sequence `row`. `seen` [vocab] is 0 before and after.
inline void change(const ScoreRule& rule, float* scores, int64_t vocab, int64_t row, const int64_t* text,
                   int64_t length, uint8_t* seen) {
  const float value = float(rule.value);
  switch (rule.kind) {
    case kPenaltyOfText:
      for_each_id(text + rule.count, length - rule.count, vocab, seen,
                  [&](int64_t id) { scores[id] = penalised(scores[id], value); });
      break;
    case kPenaltyOfIds:
      for_each_id(rule.ids + row * rule.count, rule.count, vocab, seen,
                  [&](int64_t id) { scores[id] = penalised(scores[id], value); });
      break;
    case kTemperature:
      for (int64_t i = 0; i < vocab; ++i) scores[i] = scores[i] / value;
      break;
    case kOnlyTokens:
      std::fill(scores, scores + vocab, kRemoved);
      [[fallthrough]];
    case kSetScores:
      for_each_id(rule.ids, rule.count, vocab, seen, [&](int64_t id) { scores[id] = value; });
      break;
    case kBias:
      if (ends_with(text, length, rule.ids, rule.count - 1))
        for_each_id(rule.ids + rule.count - 1, 1, vocab, seen, [&](int64_t id) { scores[id] += value; });
      break;
    case kDecay:
      for_each_id(rule.ids, rule.count, vocab, seen, [&](int64_t id) { scores[id] = decayed(scores[id], value); });
      break;
    default:
      remove_repeated(text, length, rule.count, vocab, scores);
  }
}

}  // namespace labkit
