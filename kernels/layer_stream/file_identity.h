// What changes whenever the content of a file may have changed.
#pragma once

#include <sys/stat.h>

#include <cstdint>

namespace labkit {

struct FileIdentity {
  int64_t size = 0, modified_s = 0, modified_ns = 0, changed_s = 0, changed_ns = 0;

  explicit FileIdentity(int fd) {
    struct stat now{};
    if (fstat(fd, &now) != 0) return;
    size = now.st_size;
    modified_s = now.st_mtim.tv_sec;
    modified_ns = now.st_mtim.tv_nsec;
    changed_s = now.st_ctim.tv_sec;
    changed_ns = now.st_ctim.tv_nsec;
  }

  bool operator==(const FileIdentity& other) const {
    return size == other.size && modified_s == other.modified_s && modified_ns == other.modified_ns &&
           changed_s == other.changed_s && changed_ns == other.changed_ns;
  }
};

}  // namespace labkit
