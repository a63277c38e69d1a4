// XXH64 with seed 0, a digest that runs at the speed of memory. The algorithm is specified in
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace labkit {

namespace xxh64 {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;

inline uint64_t rotated(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

template <class Word>
inline uint64_t read(const unsigned char* from) {
  Word word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

inline uint64_t round(uint64_t lane, uint64_t input) { return rotated(lane + input * kPrime2, 31) * kPrime1; }

}  // namespace xxh64

inline uint64_t digest_of(const void* data, size_t size) {
  using namespace xxh64;
  const unsigned char* at = static_cast<const unsigned char*>(data);
  const unsigned char* const end = at + size;
  uint64_t digest = kPrime5;
  if (size >= 32) {
    uint64_t lanes[4] = {kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
    for (; end - at >= 32; at += 32)
      for (int lane = 0; lane < 4; ++lane) lanes[lane] = round(lanes[lane], read<uint64_t>(at + 8 * lane));
    digest = rotated(lanes[0], 1) + rotated(lanes[1], 7) + rotated(lanes[2], 12) + rotated(lanes[3], 18);
    for (uint64_t lane : lanes) digest = (digest ^ round(0, lane)) * kPrime1 + kPrime4;
  }
  digest += size;
  for (; end - at >= 8; at += 8) digest = rotated(digest ^ round(0, read<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  if (end - at >= 4) {
    digest = rotated(digest ^ read<uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    at += 4;
  }
  for (; at < end; ++at) digest = rotated(digest ^ *at * kPrime5, 11) * kPrime1;
  digest = (digest ^ digest >> 33) * kPrime2;
  digest = (digest ^ digest >> 29) * kPrime3;
  return digest ^ digest >> 32;
}

}  // namespace labkit
