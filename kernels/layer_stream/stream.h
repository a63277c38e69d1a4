// Layers that are read from a file ahead of their use, over and over in the same order, into a few slots of memory.
//
// One thread reads; it waits only for a free slot. A pass uses every block once, in order: `wait` for the block's turn,
// use its slot, `release` it. Turns count on from pass to pass, so that the first blocks of the next pass are read
// while the last ones of this pass are used, and while nobody uses any. Turn t is in slot t % slots.
//
// Every block is compared with its digest when it is first read, and again after the file was changed. After a failure
// `wait` no longer waits and what is in the slots counts for nothing: the caller asks `failed` when the pass is over.
// The next pass tries again.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "../team.h"
#include "xxh64.h"

namespace labkit {

constexpr int64_t kPage = 4096;         // O_DIRECT: of addresses, offsets and lengths
constexpr size_t kMostSpans = 1 << 16;  // that are kept until they are asked for
constexpr int kDontCache = 0x80;        // RWF_DONTCACHE of Linux 6.14, which older headers lack

// Made by Python (layer_stream/__init__.py). Offset and bytes are multiples of kPage.
struct Block {
  int64_t layer, offset, bytes;
  uint64_t digest;
};

enum SpanKind : int64_t { kRead = 0, kWait = 1, kCompute = 2 };

struct Span {
  int64_t kind, layer, begin_ns, end_ns;
};

enum StreamFailure : int32_t { kWhole = 0, kReadError = 1, kEnds = 2, kAltered = 3 };

// What is known of the reading: given to Python as it is.
struct StreamState {
  int64_t blocks_read, bytes_read, read_ns;  // since the beginning
  int64_t direct;                            // whether the page cache is bypassed
  int64_t failure, error_number, failed_layer, failed_offset;
};

class LayerStream {
 public:
  // fd: opened for reading, with O_DIRECT where the file system takes it; stays the caller's. slots: [slot_count]
  // [slot_bytes], from a multiple of kPage on.
  LayerStream(int fd, const Block* blocks, int64_t count, char* slots, int64_t slot_bytes, int64_t slot_count,
              int64_t read_bytes)
      : fd_(fd),
        blocks_(blocks, blocks + count),
        verified_(size_t(count)),
        slots_(slots),
        slot_bytes_(slot_bytes),
        slot_count_(slot_count),
        read_bytes_(read_bytes),
        holds_(size_t(slot_count), -1) {
    state_.direct = (fcntl(fd_, F_GETFL) & O_DIRECT) != 0;
    identity_ = identity();
    reader_ = std::thread([this] { read_on(); });
  }

  ~LayerStream() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    reader_.join();
  }

  LayerStream(const LayerStream&) = delete;
  LayerStream& operator=(const LayerStream&) = delete;

  // The turn of the first block in a new pass. What an interrupted pass has left is skipped.
  int64_t begin_pass() {
    std::lock_guard lock(mutex_);
    const int64_t count = int64_t(blocks_.size());
    released_ = (released_ + count - 1) / count * count;
    state_.failure = kWhole;
    changed_.notify_all();
    return released_;
  }

  // The slot of a turn, once it is filled. Every thread of a team may call it.
  char* wait(int64_t turn) {
    const int64_t slot = turn % slot_count_;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return holds_[size_t(slot)] == turn || state_.failure != kWhole; });
    return slots_ + slot * slot_bytes_;
  }

  // Whether the slot of a turn is filled, so that `wait` would return at once.
  bool filled(int64_t turn) const {
    std::lock_guard lock(mutex_);
    return holds_[size_t(turn % slot_count_)] == turn;
  }

  // The turn's slot may be filled anew.
  void release(int64_t turn) {
    {
      std::lock_guard lock(mutex_);
      if (turn + 1 > released_) released_ = turn + 1;
    }
    changed_.notify_all();
  }

  bool failed() const {
    std::lock_guard lock(mutex_);
    return state_.failure != kWhole;
  }

  StreamState state() const {
    std::lock_guard lock(mutex_);
    return state_;
  }

  void note(SpanKind kind, int64_t layer, int64_t begin_ns, int64_t end_ns) {
    std::lock_guard lock(mutex_);
    if (spans_.size() == kMostSpans) spans_.pop_front();
    spans_.push_back({kind, layer, begin_ns, end_ns});
  }

  // Moves the oldest spans to `to`, at most `most`; returns how many.
  int64_t take_spans(Span* to, int64_t most) {
    std::lock_guard lock(mutex_);
    int64_t taken = 0;
    for (; taken < most && !spans_.empty(); ++taken) {
      to[taken] = spans_.front();
      spans_.pop_front();
    }
    return taken;
  }

 private:
  // Changes whenever the file's content may have changed.
  struct Identity {
    int64_t size, modified_s, modified_ns, changed_s, changed_ns;
    bool operator==(const Identity& other) const {
      return size == other.size && modified_s == other.modified_s && modified_ns == other.modified_ns &&
             changed_s == other.changed_s && changed_ns == other.changed_ns;
    }
  };

  struct Outcome {
    StreamFailure failure = kWhole;
    int error_number = 0;
    int64_t offset = 0;  // of the file, where it failed
  };

  Identity identity() const {
    struct stat now{};
    if (fstat(fd_, &now) != 0) return {};
    return {now.st_size, now.st_mtim.tv_sec, now.st_mtim.tv_nsec, now.st_ctim.tv_sec, now.st_ctim.tv_nsec};
  }

  void read_on() {
    std::unique_lock lock(mutex_);
    for (int64_t turn = 0;; ++turn) {
      changed_.wait(lock, [&] { return stop_ || (state_.failure == kWhole && turn < released_ + slot_count_); });
      if (stop_) return;
      if (turn < released_) turn = released_;  // skipped
      const size_t slot = size_t(turn % slot_count_), index = size_t(turn % int64_t(blocks_.size()));
      const Block& block = blocks_[index];
      holds_[slot] = -1;
      lock.unlock();
      const int64_t begin = now_ns();
      const Outcome outcome = read_block(index, slots_ + int64_t(slot) * slot_bytes_);
      const int64_t end = now_ns();
      if (outcome.failure == kWhole) note(kRead, block.layer, begin, end);
      lock.lock();
      if (stop_) return;
      if (outcome.failure == kWhole) {
        holds_[slot] = turn;
        ++state_.blocks_read;
        state_.bytes_read += block.bytes;
        state_.read_ns += end - begin;
      } else {
        state_.failure = outcome.failure;
        state_.error_number = outcome.error_number;
        state_.failed_layer = block.layer;
        state_.failed_offset = outcome.offset;
        --turn;  // the next pass tries it again, unless it skips it
      }
      changed_.notify_all();
    }
  }

  Outcome read_block(size_t index, char* to) {
    const Block& block = blocks_[index];
    for (int64_t done = 0; done < block.bytes && !stopping();) {
      const int64_t left = block.bytes - done, offset = block.offset + done;
      const ssize_t got = read_some(to + done, left < read_bytes_ ? left : read_bytes_, offset);
      if (got < 0) return {kReadError, errno, offset};
      if (got == 0) return {kEnds, 0, offset};
      done += got;
    }
    if (const Identity now = identity(); !(now == identity_)) {
      identity_ = now;
      verified_.assign(verified_.size(), false);
    }
    if (!verified_[index] && !stopping()) {
      if (digest_of(to, size_t(block.bytes)) != block.digest) return {kAltered, 0, block.offset};
      verified_[index] = true;
    }
    return {};
  }

  // As pread. What went through the page cache is not left there.
  ssize_t read_some(char* to, int64_t bytes, int64_t offset) {
    for (;;) {
      ssize_t got;
      if (state_.direct) {
        got = pread(fd_, to, size_t(bytes), offset);
        if (got >= 0 && got % kPage == 0) return got;
        if (got >= 0 || errno == EINVAL) {  // refused on the way, as some file systems do
          through_page_cache();
          continue;
        }
      } else {
        const iovec into{to, size_t(bytes)};
        got = dont_cache_ ? preadv2(fd_, &into, 1, offset, kDontCache) : pread(fd_, to, size_t(bytes), offset);
        if (got >= 0) {
          posix_fadvise(fd_, offset, got, POSIX_FADV_DONTNEED);
          return got;
        }
        if (dont_cache_ && (errno == EOPNOTSUPP || errno == EINVAL)) {
          dont_cache_ = false;
          continue;
        }
      }
      if (errno != EINTR) return -1;
    }
  }

  void through_page_cache() {
    fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) & ~O_DIRECT);
    std::lock_guard lock(mutex_);
    state_.direct = false;
  }

  bool stopping() const {
    std::lock_guard lock(mutex_);
    return stop_;
  }

  const int fd_;
  const std::vector<Block> blocks_;
  std::vector<bool> verified_;  // the reader's own, like identity_ and dont_cache_
  Identity identity_;
  bool dont_cache_ = true;
  char* const slots_;
  const int64_t slot_bytes_, slot_count_, read_bytes_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int64_t> holds_;  // [slots]: the turn that each is filled for, -1: none
  int64_t released_ = 0;        // turns before this one are over
  StreamState state_{};
  std::deque<Span> spans_;
  bool stop_ = false;
  std::thread reader_;
};

}  // namespace labkit
