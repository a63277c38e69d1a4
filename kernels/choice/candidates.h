// The tokens that are left of a vocabulary, and the rules that remove tokens. A rule whose result the rounding of
// torch's sums could change says so.
#pragma once

#include "../simd.h"
#include "rules.h"

namespace labkit {

// The tokens of a sequence that are left, in the order of the vocabulary.
struct Candidates {
  float* scores;  // [vocab], as all others
  int32_t* ids;
  float* weights;  // exp(score - largest score), in softmax's sense
  int32_t* order;  // scratch: buckets, then indices of candidates
  int64_t count;
  float top;      // the largest score
  double weight;  // the sum of all weights
};

inline double sum_of(const float* numbers, int64_t count) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) total += double(numbers[i]);
  return total;
}

// Bounds of the relative error that rounding leaves in torch's softmax. torch adds the exponentials as floats, in
// lanes. In ascending order the sums are off by at most 6 units + 0.06 * sqrt(rank) of them, where rank is that of a
// token drawn by weight: measured, for up to 250,880 scores with standard deviations of 0.3 to 8.
inline double slack_in_order(double mean_rank) { return 0x1p-24 * (16 + 0.5 * std::sqrt(mean_rank)); }

// The same for sums in the order of the vocabulary: they also lose terms that are too small to change them.
inline double slack_of(const Candidates& of) {
  const double least = 0x1p-23 * of.weight;
  double lost = 0;
  for (int64_t i = 0; i < of.count; ++i) lost += double(of.weights[i]) < least ? double(of.weights[i]) : 0;
  return 0x1p-24 * (40 + 4 * std::sqrt(double(of.count) / 16)) + lost / of.weight;
}

// Keeps the candidates i with keep(i).
template <class Keep>
void keep_if(Candidates& of, Keep&& keep) {
  int64_t kept = 0;
  for (int64_t i = 0; i < of.count; ++i) {
    if (!keep(i)) continue;
    of.scores[kept] = of.scores[i], of.ids[kept] = of.ids[i], of.weights[kept] = of.weights[i];
    ++kept;
  }
  of.count = kept;
}

inline void weigh(Candidates& of) {
  of.top = kRemoved;
  for (int64_t i = 0; i < of.count; ++i) of.top = std::max(of.top, of.scores[i]);
  int64_t i = 0;
  for (; i + kWidth <= of.count; i += kWidth) store(of.weights + i, exp(load(of.scores + i) - of.top));
  for (; i < of.count; ++i) of.weights[i] = exp(broadcast(of.scores[i] - of.top))[0];
  of.weight = sum_of(of.weights, of.count);
}

// Calls use(i) for each score from `begin` on with is_large(score). It tests the largest score of a block first.
template <class IsLarge, class Use>
void for_each_large(const float* scores, int64_t begin, int64_t count, IsLarge&& is_large, Use&& use) {
  int64_t i = begin;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth) {
    const vf largest = max(max(load(scores + i), load(scores + i + kWidth)),
                           max(load(scores + i + 2 * kWidth), load(scores + i + 3 * kWidth)));
    if (!is_large(maximum(largest))) continue;
    for (int64_t j = i; j < i + 4 * kWidth; ++j)
      if (is_large(scores[j])) use(j);
  }
  for (; i < count; ++i)
    if (is_large(scores[i])) use(i);
}

// The k-th largest of the scores, 0 < k <= count. `heap` has room for k.
inline float kth_largest(const float* scores, int64_t count, int64_t k, float* heap) {
  if (k > count / 8) {
    std::copy(scores, scores + count, heap);
    std::nth_element(heap, heap + (k - 1), heap + count, std::greater<float>());
    return heap[k - 1];
  }
  std::copy(scores, scores + k, heap);
  std::make_heap(heap, heap + k, std::greater<float>());
  const auto is_larger = [&](float score) { return score > heap[0]; };
  for_each_large(scores, k, count, is_larger, [&](int64_t i) {
    std::pop_heap(heap, heap + k, std::greater<float>());
    heap[k - 1] = scores[i];
    std::push_heap(heap, heap + k, std::greater<float>());
  });
  return heap[0];
}

// Keeps tokens with at least the k-th largest score.
inline void keep_top_k(Candidates& of, int64_t k) {
  if (k >= of.count) return;
  const float least = kth_largest(of.scores, of.count, k, of.weights);
  keep_if(of, [&](int64_t i) { return of.scores[i] >= least; });
}

// The first candidates by a key whose weights add up to some share of all weights.
struct Crossing {
  int64_t kept;      // number of these candidates
  double last_key;   // of the last one of them
  double next_key;   // of the first candidate after them, or infinite
  double before;     // share of the weights before the last one
  double with_last;  // share of the weights with the last one
  double mean_rank;  // of a token drawn by weight
};

// The first candidates in the order of key(i), which is at least 0: as many as reach this share of the weights, and at
// least `keep`. Keys are distances to the best token, so a few buckets have most of the mass, and only one or two are
// sorted.
template <class Key>
Crossing crossing(const Candidates& of, double mass, int64_t keep, Key&& key) {
  constexpr int64_t kBuckets = 2048;
  constexpr double kPerUnit = 64;
  double weights[kBuckets] = {};
  int64_t counts[kBuckets] = {};
  int32_t* const buckets = of.order;
  for (int64_t i = 0; i < of.count; ++i) buckets[i] = int32_t(std::min(key(i) * kPerUnit, double(kBuckets - 1)));
  for (int64_t i = 0; i < of.count; ++i) {
    weights[buckets[i]] += double(of.weights[i]);
    counts[buckets[i]] += 1;
  }
  Crossing found{0, 0, std::numeric_limits<double>::infinity(), 0, 0, 0};
  int64_t rank = 0;
  for (int64_t b = 0; b < kBuckets; ++b) {
    found.mean_rank += weights[b] / of.weight * (double(rank) + 0.5 * double(counts[b]));
    rank += counts[b];
  }
  double passed = 0;
  int64_t b = 0;
  for (; b < kBuckets - 1; ++b) {
    if (counts[b] && passed + weights[b] >= mass * of.weight && found.kept + counts[b] >= keep) break;
    passed += weights[b];
    found.kept += counts[b];
  }
  // The bucket in which the mass is reached, and one more for the candidate after it.
  int64_t after = b + 1;
  while (after < kBuckets && !counts[after]) ++after;
  int64_t sorted = 0;
  for (int64_t i = 0; i < of.count; ++i)
    if (buckets[i] == b || buckets[i] == after) of.order[sorted++] = int32_t(i);  // in the memory of `buckets`
  std::sort(of.order, of.order + sorted, [&](int32_t i, int32_t j) { return key(i) < key(j); });
  for (int64_t n = 0; n < sorted; ++n) {
    const int64_t i = of.order[n];
    found.before = passed / of.weight;
    passed += double(of.weights[i]);
    found.with_last = passed / of.weight;
    found.kept += 1, found.last_key = key(i);
    if (found.with_last >= mass && found.kept >= keep) {
      if (n + 1 < sorted) found.next_key = key(of.order[n + 1]);
      break;
    }
  }
  return found;
}

// Keeps the likeliest tokens whose probabilities add up to p, and the one that reaches it. False: unsure.
inline bool keep_top_p(Candidates& of, double p, int64_t keep) {
  weigh(of);
  if (p >= 1) return true;  // torch removes tokens whose probability is 0
  if (keep >= of.count) return true;
  const auto distance = [&](int64_t i) { return double(of.top - of.scores[i]); };
  const Crossing at = crossing(of, p, keep, distance);
  const double doubt = slack_in_order(at.mean_rank);
  if (std::abs(at.with_last - p) < doubt || (at.kept > keep && std::abs(at.before - p) < doubt)) return false;
  if (at.last_key == at.next_key) return false;  // torch's order of equal scores decides
  keep_if(of, [&](int64_t i) { return distance(i) <= at.last_key; });
  return true;
}

// Keeps tokens with at least this probability, which is known with the relative error `doubt`. False: unsure.
inline bool keep_likely(Candidates& of, double least, double doubt, int64_t keep) {
  const double low = least * (1 - doubt) * of.weight, high = least * (1 + doubt) * of.weight;
  int64_t likely = 0, unsure = 0;
  for (int64_t i = 0; i < of.count; ++i) {
    likely += double(of.weights[i]) >= low;
    unsure += double(of.weights[i]) >= low && double(of.weights[i]) <= high;
  }
  if (unsure) return false;
  if (likely < keep) {
    keep_top_k(of, keep);
    return of.count <= keep;  // torch's order of equal scores decides
  }
  keep_if(of, [&](int64_t i) { return double(of.weights[i]) > high; });
  return true;
}

inline double entropy_of(const Candidates& of) {
  double total = 0;
  for (int64_t i = 0; i < of.count; ++i) total += double(of.weights[i]) * double(of.top - of.scores[i]);
  return total / of.weight + std::log(of.weight);
}

// Keeps the tokens whose surprise is nearest to the entropy, until their probabilities add up to `mass`. False: unsure.
inline bool keep_typical(Candidates& of, double mass, int64_t keep) {
  weigh(of);
  const double entropy = entropy_of(of), of_top = std::log(of.weight);
  const auto distance = [&](int64_t i) { return std::abs(double(of.top - of.scores[i]) + of_top - entropy); };
  const Crossing at = crossing(of, mass, 1, distance);
  const double doubt = slack_of(of), surprise = 32 * doubt;  // torch rounds surprises of up to 32 as floats
  if (std::abs(at.with_last - mass) < surprise || std::abs(at.before - mass) < surprise) return false;
  int64_t near = 0;
  for (int64_t i = 0; i < of.count; ++i) near += std::abs(distance(i) - at.last_key) < surprise;
  if (near > 1 || at.kept < keep) return false;
  keep_if(of, [&](int64_t i) { return distance(i) <= at.last_key; });
  return true;
}

// Removes tokens by one rule. False: unsure.
inline bool remove_by(const ScoreRule& rule, Candidates& of) {
  switch (rule.kind) {
    case kTopK:
      keep_top_k(of, rule.count);
      return true;
    case kTopP:
      return keep_top_p(of, rule.value, rule.keep);
    case kMinP:
      weigh(of);
      return keep_likely(of, rule.value / of.weight, slack_in_order(0), rule.keep);
    case kEpsilon:
      weigh(of);
      return keep_likely(of, rule.value, slack_of(of), rule.keep);
    case kEta: {
      weigh(of);
      const double doubt = slack_of(of) * 32;  // of an entropy
      return keep_likely(of, std::min(rule.value, std::sqrt(rule.value) * std::exp(-entropy_of(of))), doubt, rule.keep);
    }
    default:
      return keep_typical(of, rule.value, rule.keep);
  }
}

// Makes candidates of the scores [vocab], which are in `of` already. False: a score is NaN or infinite, or none is
// left.
inline bool leave_removed(int64_t vocab, Candidates& of) {
  int usable = 1, whole = 1;
#pragma omp simd reduction(& : usable, whole)
  for (int64_t i = 0; i < vocab; ++i) {
    usable &= of.scores[i] < std::numeric_limits<float>::infinity();  // not for NaN
    whole &= of.scores[i] > kRemoved;
  }
  if (!usable) return false;
  for (int64_t i = 0; i < vocab; ++i) of.ids[i] = int32_t(i);
  of.count = vocab;
  if (!whole) keep_if(of, [&](int64_t i) { return of.scores[i] > kRemoved; });
  return of.count > 0;
}

}  // namespace labkit
