// torch's random numbers on a CPU: a Mersenne twister (Matsumoto and Nishimura, 1998), and the exponential draws that
// `torch.multinomial` makes from it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace labkit {

// The beginning of the bytes that `torch.Generator.get_state` returns.
struct TwisterState {
  static constexpr int kWords = 624;
  uint64_t seed;
  int32_t left;  // 1 + number of unread words; at 1 the state is made anew
  int32_t seeded;
  uint64_t next;  // index of the next word
  uint64_t words[kWords];
};

class Twister {
 public:
  explicit Twister(const TwisterState& from) : left_(from.left), next_(int(from.next)) {
    for (int k = 0; k < kWords; ++k) words_[k] = uint32_t(from.words[k]);
  }

  void save(TwisterState& to) const {
    to.left = left_, to.next = uint64_t(next_);
    for (int k = 0; k < kWords; ++k) to.words[k] = words_[k];
  }

  // Words that were read or skipped since the state that this one was made from.
  int64_t words_read() const { return words_read_; }

  // Reads past `count` words.
  void skip(int64_t count) {
    words_read_ += count;
    while (count) {
      if (left_ == 1) make_anew();
      const int64_t passed = count < left_ - 1 ? count : left_ - 1;
      left_ -= int(passed), next_ += int(passed), count -= passed;
    }
  }

  static constexpr int kAtOnce = TwisterState::kWords / 2;

  // Writes the next numbers of [0, 1), with 53 bits from two words each, and returns how many: at least 1, at most
  // `most` and kAtOnce.
  int64_t uniforms(int64_t most, double* to) {
    if (left_ == 1) make_anew();
    const int64_t count = std::min<int64_t>(most, (left_ - 1) / 2);
    if (!count) {  // the words of the next number come from two states
      const uint64_t high = word();
      *to = uniform(high << 32 | word());
      return 1;
    }
    if (!tempered_) temper();
    for (int64_t k = 0; k < count; ++k) {
      uint64_t words;  // the first one in the lower half
      std::memcpy(&words, outputs_ + next_ + 2 * k, sizeof words);
      to[k] = uniform(words << 32 | words >> 32);
    }
    left_ -= int(2 * count), next_ += int(2 * count), words_read_ += 2 * count;
    return count;
  }

 private:
  static constexpr int kWords = TwisterState::kWords, kAhead = 397;

  static double uniform(uint64_t words) { return double(words & ((uint64_t(1) << 53) - 1)) * 0x1p-53; }

  uint32_t word() {
    if (left_ == 1) make_anew();
    if (!tempered_) temper();
    --left_, ++words_read_;
    return outputs_[next_++];
  }

  void temper() {
    for (int k = 0; k < kWords; ++k) {
      uint32_t y = words_[k];
      y ^= y >> 11;
      y ^= y << 7 & 0x9d2c5680u;
      y ^= y << 15 & 0xefc60000u;
      outputs_[k] = y ^ y >> 18;
    }
    tempered_ = true;
  }

  static uint32_t twisted(uint32_t high, uint32_t low) {
    const uint32_t both = (high & 0x80000000u) | (low & 0x7fffffffu);
    return both >> 1 ^ (-(low & 1u) & 0x9908b0dfu);
  }

  // Each word depends on words that are at least kWords - kAhead = 227 places away, so vectors of words can be made at
  // once.
  void make_anew() {
    for (int k = 0; k < kWords - kAhead; ++k) words_[k] = words_[k + kAhead] ^ twisted(words_[k], words_[k + 1]);
#pragma GCC ivdep
    for (int k = kWords - kAhead; k < kWords - 1; ++k)
      words_[k] = words_[k - (kWords - kAhead)] ^ twisted(words_[k], words_[k + 1]);
    words_[kWords - 1] = words_[kAhead - 1] ^ twisted(words_[kWords - 1], words_[0]);
    left_ = kWords + 1, next_ = 0, tempered_ = false;
  }

  int left_, next_;
  int64_t words_read_ = 0;
  bool tempered_ = false;  // whether the outputs were made from the present words
  uint32_t words_[kWords], outputs_[kWords];
};

}  // namespace labkit
