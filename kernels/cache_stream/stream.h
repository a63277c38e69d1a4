// Keys and values that are offloaded to a file and pass through slots: prefetched before a layer's turn, written back
// after it.
//
// A second thread writes, so that a read need not wait until the disk has taken the tokens of the previous layer. A
// layer is read again only once it is written. Tokens that could not be written stay in their slot, and the next pass
// begins by trying again. So no failure loses tokens that were cached before.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "../slot_stream/slot_stream.h"

namespace labkit {

constexpr int64_t kHugePage = 2 << 20;

// Created by Python (cache_stream/file.py): in a slot `rows` consecutive rows of `row_bytes` each, a multiple of kPage,
// with `token_bytes` for a token.
//
// In the file the first pages of all rows come first, then the second pages, and so on. So the filled part is read as
// one piece, and the changes of a token are written as one.
struct Section {
  int64_t rows, row_bytes, token_bytes;
};

class CacheStream final : public SlotStream {
 public:
  // filled: tokens of every layer that are in the file.
  CacheStream(int fd, int64_t layers, const Section* sections, int64_t count, int64_t filled, char* slots,
              int64_t slot_bytes, int64_t slot_count)
      : SlotStream(fd, layers, slots, slot_bytes, slot_count, slot_count < layers ? slot_count : layers),
        sections_(sections, sections + count),
        layer_bytes_(slot_bytes),
        filled_(size_t(layers), filled),
        reading_(slot_bytes),
        writing_(slot_bytes) {
    writer_ = std::thread([this] { write_on(); });
    try {
      start();
    } catch (...) {
      stop();
      writer_.join();
      throw;
    }
  }
  ~CacheStream() override {
    stop();
    writer_.join();
  }

  void flush() override {
    std::unique_lock lock(mutex_);
    state_.failure = kWhole;
    changed_.notify_all();
    changed_.wait(lock, [&] { return to_write_.empty() || state_.failure != kWhole; });
  }

 private:
  struct Changed {
    int64_t turn;
    Range tokens;
  };

  // Memory for pages in the file's order, in huge pages. A virtual disk moves a few large pieces of memory about twice
  // as fast as single pages to their rows in a slot.
  struct Staging {
    explicit Staging(int64_t most)
        : bytes(most < kAtOnce ? most : kAtOnce),
          memory(static_cast<char*>(std::aligned_alloc(size_t(kHugePage), size_t(kAtOnce))), &std::free) {
      madvise(memory.get(), size_t(kAtOnce), MADV_HUGEPAGE);
    }
    const int64_t bytes;
    const std::unique_ptr<char, decltype(&std::free)> memory;
  };

  int64_t layer_of(int64_t index) const override { return index; }

  void begun(int64_t committed) override {
    for (int64_t& filled : filled_)
      if (filled > committed) filled = committed;
  }

  // A slot that was never filled is not written: its tokens are another layer's.
  void over(int64_t turn, Range tokens) override {
    if (tokens.begin == tokens.end || !holds(turn)) return;
    filled_[size_t(turn % pieces_)] = tokens.end;
    to_write_.push_back({turn, tokens});
  }

  int64_t done() const override { return to_write_.empty() ? released_ : to_write_.front().turn; }

  Outcome read_piece(int64_t layer, char* to) override {
    int64_t filled;
    {
      std::lock_guard lock(mutex_);
      filled = filled_[size_t(layer)];
    }
    return for_pages(layer, {0, filled}, reading_, [&](char* pages, int64_t bytes, int64_t offset, auto&& each) {
      const ssize_t got = file_.read(pages, bytes, offset);
      each(got / kPage, [=](int64_t at, const char* page) { std::memcpy(to + at, page, size_t(kPage)); });
      return got < 0 ? Outcome{kReadError, errno, offset} : Outcome{got < kPage ? kEnds : kWhole, 0, offset, got};
    });
  }

  Outcome write_piece(const Changed& changed) {
    const char* from = slot(changed.turn);
    return for_pages(
        changed.turn % pieces_, changed.tokens, writing_, [&](char* pages, int64_t bytes, int64_t offset, auto&& each) {
          each(bytes / kPage, [=](int64_t at, char* page) { std::memcpy(page, from + at, size_t(kPage)); });
          const ssize_t put = file_.write(pages, bytes, offset);
          if (put < 0) return Outcome{kWriteError, errno, offset};
          return Outcome{put < kPage ? kWriteError : kWhole, ENOSPC, offset, put};
        });
  }

  // Moves the pages that these tokens touch in every row, as many at once as fit into the staging memory.
  // move(pages, bytes, offset, each): moves a run of pages of the file. each(count, use): calls use(place in the slot,
  // page) for the first `count` pages of the run.
  template <class Move>
  Outcome for_pages(int64_t layer, Range tokens, const Staging& staging, Move&& move) {
    Outcome all;
    int64_t section_begin = 0;
    for (const Section& section : sections_) {
      const int64_t rows = section.rows, first = tokens.begin * section.token_bytes / kPage * rows;
      const int64_t last = ceil_div(tokens.end * section.token_bytes, kPage) * rows;
      for (int64_t at = first; at < last && !stopping();) {
        const int64_t most = staging.bytes / kPage, count = last - at < most ? last - at : most;
        char* const pages = staging.memory.get();
        auto each = [&](int64_t moved, auto&& use) {
          for (int64_t i = 0; i < moved; ++i)
            use(section_begin + (at + i) % rows * section.row_bytes + (at + i) / rows * kPage, pages + i * kPage);
        };
        const Outcome some = move(pages, count * kPage, layer * layer_bytes_ + section_begin + at * kPage, each);
        if (some.failure != kWhole) return some;
        at += some.bytes / kPage;
        all.bytes += some.bytes;
      }
      section_begin += rows * section.row_bytes;
    }
    return all;
  }

  void write_on() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || (state_.failure == kWhole && !to_write_.empty()); });
      if (stop_) return;
      const Changed changed = to_write_.front();
      lock.unlock();
      const int64_t begin = now_ns();
      const Outcome outcome = write_piece(changed);
      const int64_t end = now_ns();
      if (outcome.failure == kWhole) note(kWrite, changed.turn % pieces_, begin, end);
      lock.lock();
      if (outcome.failure == kWhole) {
        to_write_.pop_front();
        ++state_.blocks_written;
        state_.bytes_written += outcome.bytes;
      } else {
        fail(outcome, changed.turn % pieces_, -1);
      }
      changed_.notify_all();
    }
  }

  const std::vector<Section> sections_;
  const int64_t layer_bytes_;
  std::vector<int64_t> filled_;  // [layers]: tokens in the file, or soon
  std::deque<Changed> to_write_;
  const Staging reading_, writing_;
  std::thread writer_;
};

}  // namespace labkit
