// The experts of all layers in a file, each of which is read into a slot of memory.
#pragma once

#include <algorithm>
#include <mutex>
#include <numeric>
#include <vector>

#include "../layer_stream/file_identity.h"
#include "../layer_stream/xxh64.h"
#include "../slot_stream/slot_stream.h"

namespace labkit {

constexpr int64_t kExpertParts = 4;        // tensors of an expert: two matrices, each with its scales
constexpr int64_t kExpertPiece = 1 << 20;  // bytes that are read at once, before the next look whether they are needed

// An expert in the file: the offsets of its parts, -1 for a part that it lacks, and XXH64 of the XXH64s of its parts.
struct StoredExpert {
  int64_t offsets[kExpertParts];
  uint64_t digest;
};

// Each expert is compared with its digest when it is first read, and again after the file was changed. Several threads
// may read.
class ExpertFile {
 public:
  // bytes: of each part, 0 for a part that experts lack.
  ExpertFile(int fd, const StoredExpert* experts, int64_t count, const int64_t* bytes)
      : file_(fd),
        bytes_(bytes, bytes + kExpertParts),
        experts_(experts, experts + count),
        identity_(fd),
        verified_(size_t(count)) {}

  // Bytes of an expert.
  int64_t bytes() const { return std::accumulate(bytes_.begin(), bytes_.end(), int64_t(0)); }

  bool direct() const { return file_.direct(); }

  // A slot has room for the pages that an expert's parts touch, wherever these begin in their first pages.
  static int64_t slot_bytes(const int64_t* bytes) {
    int64_t total = 0;
    for (int64_t p = 0; p < kExpertParts; ++p) total += room(bytes[p]);
    return total;
  }

  // The offset in a slot at which a part of an expert begins.
  int64_t place_in_slot(int64_t number, int64_t part) const {
    int64_t at = 0;
    for (int64_t p = 0; p < part; ++p) at += room(bytes_[size_t(p)]);
    return at + experts_[size_t(number)].offsets[part] % kPage;
  }

  // Fills a slot, which begins at a multiple of kPage. Gives up once goes_on() returns false, which is asked before
  // each piece.
  template <class GoesOn>
  Outcome read(int64_t number, char* slot, GoesOn&& goes_on) {
    const StoredExpert& expert = experts_[size_t(number)];
    uint64_t digests[kExpertParts];
    int64_t parts = 0, bytes = 0;
    const FileIdentity before(file_.fd());
    const bool verify = !verified(number, before);
    for (int64_t p = 0; p < kExpertParts; ++p) {
      if (expert.offsets[p] < 0) continue;
      char* const data = slot + place_in_slot(number, p);
      const int64_t skipped = expert.offsets[p] % kPage, first = expert.offsets[p] - skipped;
      const int64_t needed = skipped + bytes_[size_t(p)];
      for (int64_t done = 0; done < needed;) {
        if (!goes_on()) return {kGivenUp, 0, 0, bytes};
        const int64_t left = round_up(needed, kPage) - done;
        const ssize_t got = file_.read(data - skipped + done, std::min(left, kExpertPiece), first + done);
        if (got < 0) return {kReadError, errno, first + done};
        if (got == 0) return {kEnds, 0, first + done};
        done += got;
        bytes += got;
      }
      if (verify) digests[parts++] = digest_of(data, size_t(bytes_[size_t(p)]));
    }
    if (verify) {
      if (digest_of(digests, size_t(parts) * sizeof(uint64_t)) != expert.digest)
        return {kAltered, 0, expert.offsets[0]};
      if (before == FileIdentity(file_.fd())) note_verified(number, before);
    }
    return {kWhole, 0, 0, bytes};
  }

 private:
  static int64_t room(int64_t bytes) { return bytes ? round_up(bytes, kPage) + kPage : 0; }

  bool verified(int64_t number, const FileIdentity& now) {
    std::lock_guard lock(mutex_);
    if (!(now == identity_)) {
      identity_ = now;
      verified_.assign(verified_.size(), false);
    }
    return verified_[size_t(number)];
  }
  void note_verified(int64_t number, const FileIdentity& then) {
    std::lock_guard lock(mutex_);
    if (then == identity_) verified_[size_t(number)] = true;
  }

  DirectFile file_;
  const std::vector<int64_t> bytes_;
  const std::vector<StoredExpert> experts_;
  std::mutex mutex_;  // of the members below
  FileIdentity identity_;
  std::vector<bool> verified_;
};

}  // namespace labkit
