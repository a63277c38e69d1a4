// Pieces of a file, one per layer, that are prefetched into a few slots of memory, again and again in the same order.
//
// One thread reads; it waits only for a free slot. A pass uses every piece once, in order: `wait` for the piece's turn,
// use its slot, `release` it. Turns count on from pass to pass, so the first pieces of the next pass are read while the
// last pieces of this pass are used, and between the passes. Turn t is in slot t % slots.
//
// After a failure `wait` no longer waits, and the contents of slots that were not filled before are invalid. The caller
// asks `pass_failed` when the pass is over: a piece that is read ahead for the next pass does not count, because that
// pass tries again.
#pragma once

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "../team.h"
#include "direct_file.h"

namespace labkit {

constexpr size_t kMostSpans = 1 << 16;  // spans that are kept until they are taken

enum SpanKind : int64_t { kRead = 0, kWait = 1, kCompute = 2, kWrite = 3 };

struct Span {
  int64_t kind, layer, begin_ns, end_ns;
};

enum StreamFailure : int32_t { kWhole = 0, kReadError = 1, kEnds = 2, kAltered = 3, kWriteError = 4, kGivenUp = 5 };

struct Outcome {
  StreamFailure failure = kWhole;
  int error_number = 0;
  int64_t offset = 0;  // in the file, of a failure
  int64_t bytes = 0;   // moved bytes, without a failure
};

// The state of a stream; Python gets a copy.
struct StreamState {
  int64_t blocks_read, bytes_read, read_ns;  // since the beginning
  int64_t blocks_written, bytes_written;
  int64_t direct;  // whether the page cache is bypassed
  int64_t failure, error_number, failed_layer, failed_offset;
};

class SlotStream {
 public:
  virtual ~SlotStream() = default;
  SlotStream(const SlotStream&) = delete;
  SlotStream& operator=(const SlotStream&) = delete;

  // The turn of the first piece in a new pass. Unused pieces of an interrupted pass are skipped. committed: number of
  // tokens whose keys and values count as cached; streams of weights ignore it.
  int64_t begin_pass(int64_t committed = 0) {
    std::lock_guard lock(mutex_);
    released_ = round_up(released_, pieces_);
    pass_end_ = released_ + pieces_;
    state_.failure = kWhole;
    begun(committed);
    changed_.notify_all();
    return released_;
  }

  // The slot of a turn, once it is filled. Every thread of a team may call it.
  char* wait(int64_t turn) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return holds(turn) || state_.failure != kWhole; });
    return slot(turn);
  }

  // Whether the slot of a turn is filled, so that `wait` would return at once.
  bool filled(int64_t turn) const {
    std::lock_guard lock(mutex_);
    return holds(turn);
  }

  // Allows a new piece in the turn's slot, once the slot's tokens of the range `written` are in the file.
  void release(int64_t turn, Range written = {0, 0}) {
    {
      std::lock_guard lock(mutex_);
      if (turn + 1 > released_) released_ = turn + 1;
      over(turn, written);
    }
    changed_.notify_all();
  }

  // Whether a piece of this pass could not be read, or an earlier piece could not be written.
  bool pass_failed() const {
    std::lock_guard lock(mutex_);
    return state_.failure != kWhole && failed_turn_ < pass_end_;
  }

  StreamState state() const {
    std::lock_guard lock(mutex_);
    StreamState state = state_;
    state.direct = file_.direct();
    return state;
  }

  void note(SpanKind kind, int64_t layer, int64_t begin_ns, int64_t end_ns) {
    std::lock_guard lock(mutex_);
    if (spans_.size() == kMostSpans) spans_.pop_front();
    spans_.push_back({kind, layer, begin_ns, end_ns});
  }

  // Moves the oldest spans to `to`, at most `most`. Returns their number.
  int64_t take_spans(Span* to, int64_t most) {
    std::lock_guard lock(mutex_);
    int64_t taken = 0;
    for (; taken < most && !spans_.empty(); ++taken) {
      to[taken] = spans_.front();
      spans_.pop_front();
    }
    return taken;
  }

  // Returns once everything is written, or writing has failed.
  virtual void flush() {}

 protected:
  // slots: [slot_count][slot_bytes], at a multiple of kPage. ahead: a piece is read at most this many turns after the
  // last finished turn.
  SlotStream(int fd, int64_t pieces, char* slots, int64_t slot_bytes, int64_t slot_count, int64_t ahead)
      : file_(fd),
        pieces_(pieces),
        slots_(slots),
        slot_bytes_(slot_bytes),
        slot_count_(slot_count),
        ahead_(ahead),
        holds_(size_t(slot_count), -1) {}

  // A derived class calls `start` at the end of its constructor, and `stop` in its destructor, before its members end.
  void start() {
    reader_ = std::thread([this] { read_on(); });
  }
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (reader_.joinable()) reader_.join();
  }

  // Fills a slot. The reader calls it without the lock.
  virtual Outcome read_piece(int64_t index, char* to) = 0;
  virtual int64_t layer_of(int64_t index) const = 0;

  // Called with the lock: when a pass begins; when a turn is released. `done`: turns before it are over, with free
  // slots.
  virtual void begun(int64_t) {}
  virtual void over(int64_t, Range) {}
  virtual int64_t done() const { return released_; }

  char* slot(int64_t turn) const { return slots_ + turn % slot_count_ * slot_bytes_; }
  bool holds(int64_t turn) const { return holds_[size_t(turn % slot_count_)] == turn; }

  // turn: of a piece that could not be read; -1: a piece could not be written.
  void fail(const Outcome& outcome, int64_t layer, int64_t turn) {
    failed_turn_ = turn;
    state_.failure = outcome.failure;
    state_.error_number = outcome.error_number;
    state_.failed_layer = layer;
    state_.failed_offset = outcome.offset;
  }

  bool stopping() const {
    std::lock_guard lock(mutex_);
    return stop_;
  }

  DirectFile file_;
  const int64_t pieces_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t released_ = 0;  // turns before this one were released or skipped
  int64_t pass_end_ = 0;  // the turn after the last one of the pass
  int64_t failed_turn_ = -1;
  StreamState state_{};
  bool stop_ = false;

 private:
  void read_on() {
    std::unique_lock lock(mutex_);
    for (int64_t turn = 0;; ++turn) {
      changed_.wait(lock, [&] {
        if (turn < released_) turn = released_;  // skipped
        return stop_ || (state_.failure == kWhole && turn < done() + ahead_);
      });
      if (stop_) return;
      const int64_t index = turn % pieces_, layer = layer_of(index);
      holds_[size_t(turn % slot_count_)] = -1;
      lock.unlock();
      const int64_t begin = now_ns();
      const Outcome outcome = read_piece(index, slot(turn));
      const int64_t end = now_ns();
      if (outcome.failure == kWhole) note(kRead, layer, begin, end);
      lock.lock();
      if (stop_) return;
      if (outcome.failure == kWhole) {
        holds_[size_t(turn % slot_count_)] = turn;
        ++state_.blocks_read;
        state_.bytes_read += outcome.bytes;
        state_.read_ns += end - begin;
      } else {
        fail(outcome, layer, turn);
        --turn;  // the next pass tries it again, unless it skips it
      }
      changed_.notify_all();
    }
  }

  char* const slots_;
  const int64_t slot_bytes_, slot_count_, ahead_;
  std::vector<int64_t> holds_;  // [slots]: the turn of each slot's contents; -1: none
  std::deque<Span> spans_;
  std::thread reader_;
};

// What make() returns, or null without memory or a thread: no exception passes through C.
template <class Make>
auto opened(Make&& make) -> decltype(make()) {
  try {
    return make();
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace labkit
