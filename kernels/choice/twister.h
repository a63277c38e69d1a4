// torch's random numbers on a CPU: a Mersenne twister (Matsumoto and Nishimura, 1998), and the exponential draws that
// `torch.multinomial` makes from it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace labkit {

// The beginning of the bytes that `torch.Generator.get_state` returns.
struct TwisterState {
  static constexpr int kWords = 624;
  uint64_t seed;
  int32_t left;  // words until the state is made anew, one more than are unread
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

  // Reads past `count` words.
  void skip(int64_t count) {
    while (count) {
      if (left_ == 1) make_anew();
      const int64_t passed = count < left_ - 1 ? count : left_ - 1;
      left_ -= int(passed), next_ += int(passed), count -= passed;
    }
  }

  // A number of [0, 1) with 53 bits, from the next two words.
  double uniform() {
    const uint64_t high = word(), low = word();
    return double((high << 32 | low) & ((uint64_t(1) << 53) - 1)) * 0x1p-53;
  }

 private:
  static constexpr int kWords = TwisterState::kWords, kAhead = 397;

  uint32_t word() {
    if (left_ == 1) make_anew();
    if (!tempered_) temper();
    --left_;
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
  bool tempered_ = false;  // whether the outputs were made from the present words
  uint32_t words_[kWords], outputs_[kWords];
};

}  // namespace labkit
