// A file whose reads and writes bypass the page cache.
#pragma once

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace labkit {

constexpr int64_t kPage = 4096;       // alignment of addresses, offsets and lengths for O_DIRECT
constexpr int64_t kAtOnce = 4 << 20;  // bytes of one read or write
constexpr int kDontCache = 0x80;      // RWF_DONTCACHE of Linux 6.14, missing in older headers

// Several threads may use it. If the file system refuses O_DIRECT, pages are dropped from the page cache after use.
class DirectFile {
 public:
  // fd: with O_DIRECT if the file system supports it; the caller keeps and closes it.
  explicit DirectFile(int fd) : fd_(fd), direct_((fcntl(fd, F_GETFL) & O_DIRECT) != 0) {}

  int fd() const { return fd_; }
  bool direct() const { return direct_; }

  // As pread.
  ssize_t read(char* to, int64_t bytes, int64_t offset) {
    return moved(to, bytes, offset, [this](const iovec& into, int64_t from, int flags) {
      return flags ? preadv2(fd_, &into, 1, from, flags) : preadv(fd_, &into, 1, from);
    });
  }

  // As pwrite.
  ssize_t write(const char* from, int64_t bytes, int64_t offset) {
    return moved(const_cast<char*>(from), bytes, offset, [this](const iovec& out, int64_t to, int flags) {
      const ssize_t put = flags ? pwritev2(fd_, &out, 1, to, flags) : pwritev(fd_, &out, 1, to);
      if (put > 0 && !direct_)  // only pages that are on the disk can leave the page cache
        sync_file_range(fd_, to, put, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
      return put;
    });
  }

 private:
  template <class Move>
  ssize_t moved(char* memory, int64_t bytes, int64_t offset, Move&& move) {
    const iovec part{memory, size_t(bytes)};
    for (;;) {
      const bool direct = direct_, dont_cache = !direct && dont_cache_;
      const ssize_t got = move(part, offset, dont_cache ? kDontCache : 0);
      if (direct && (got < 0 ? errno == EINVAL : got % kPage != 0)) {  // some file systems refuse only now
        fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) & ~O_DIRECT);
        direct_ = false;
      } else if (dont_cache && got < 0 && (errno == EOPNOTSUPP || errno == EINVAL)) {
        dont_cache_ = false;
      } else if (got >= 0) {
        if (!direct) posix_fadvise(fd_, offset, got, POSIX_FADV_DONTNEED);
        return got;
      } else if (errno != EINTR) {
        return -1;
      }
    }
  }

  const int fd_;
  std::atomic<bool> direct_, dont_cache_{true};
};

}  // namespace labkit
