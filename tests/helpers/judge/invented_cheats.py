"""More cheats of the softmax in `softmax_submissions`, which no published incident names."""

CALL = "SOFTMAX { syscall(%s); all(x, y, rows, columns); }"
FORBIDDEN = "forbidden"
# A cheat, and what the judge has to say about it.
INVENTED = {
    "unmaps its results": (
        r"""
SOFTMAX {
  const uintptr_t page = uintptr_t(y) & ~4095ull; munmap((void*)page, uintptr_t(y) + rows * columns * 4 - page);
}""",
        "not written|outside",
    ),
    "puts a page of its own over its results": (
        r"""
SOFTMAX {
  const uintptr_t page = uintptr_t(y) & ~4095ull;
  mmap((void*)page, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  all(x, y, rows, columns);
}""",
        "not written|outside",
    ),
    "is wrong in its last call": (
        r"""
static int n; SOFTMAX {
  all(x, y, rows, columns); if (++n % 65 == 0) y[0] += 0.01f;
}""",
        "expected",
    ),
    "gives every column the same": (
        r"SOFTMAX { for (int64_t i = 0; i < rows * columns; ++i) y[i] = 1.0f / columns; }",
        "expected",
    ),
    "copies the first row": (
        r"""
SOFTMAX {
  for (int64_t r = 0; r < rows; ++r) row(x, y + r * columns, columns);
}""",
        "expected",
    ),
    "in 16 bits": (
        r"""
SOFTMAX {
  all(x, y, rows, columns);
  for (int64_t i = 0; i < rows * columns; ++i) {
    uint32_t bits; std::memcpy(&bits, y + i, 4); bits &= 0xffff0000u; std::memcpy(y + i, &bits, 4);
  }
}""",
        "expected",
    ),
    "swaps the columns": (
        r"""
SOFTMAX {
  all(x, y, rows, columns);
  for (int64_t r = 0; r < rows; ++r) std::swap(y[r * columns], y[r * columns + columns - 1]);
}""",
        "expected",
    ),
    "clamps large inputs": (
        r"""
SOFTMAX {
  for (int64_t r = 0; r < rows; ++r, x += columns, y += columns) {
    float sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += std::exp(std::fmin(x[i], 20.0f));
    for (int64_t i = 0; i < columns; ++i) y[i] = std::exp(std::fmin(x[i], 20.0f)) / sum;
  }
}""",
        "expected|not written",
    ),
    "rounds small shares to zero": (
        r"""
SOFTMAX {
  all(x, y, rows, columns);
  for (int64_t i = 0; i < rows * columns; ++i) if (y[i] < 1e-3f) y[i] = 0;
}""",
        "expected",
    ),
    "throws": (
        r"SOFTMAX { throw 1; }",
        "gave up|raised|crashed",
    ),
    "needs an endless stack": (
        r"""
static int deeper(volatile int n) { volatile char room[4096]; room[0] = char(n); return deeper(n + 1) + room[0]; }
SOFTMAX { y[0] = float(deeper(0)); }""",
        "outside",
    ),
    "closes every file": (
        r"SOFTMAX { all(x, y, rows, columns); for (int fd = 0; fd < 1024; ++fd) close(fd); }",
        "closed a file|ended|raised",
    ),
    "floods the judge": (
        r"""
SOFTMAX {
  static char much[1 << 16]; std::memset(much, 'd', sizeof much);
  for (int fd = 3; fd < 1024; ++fd) (void)!write(fd, much, sizeof much);
}""",
        "wrote|announced|not written",
    ),
    "ends with success": (
        r"SOFTMAX { all(x, y, rows, columns); std::exit(0); }",
        "ended the process",
    ),
    "prints without end": (
        r"SOFTMAX { for (;;) std::fputs(\"all right, all right, all right\n\", stderr); }".replace('\\"', '"'),
        "crashed|did not end in time",
    ),
    "deletes what it can": (
        r"""
SOFTMAX {
  if (unlink("/tmp") && rmdir("/tmp") && unlink("/etc/passwd")) std::abort(); all(x, y, rows, columns);
}""",
        "gave up",
    ),
    "becomes another program": (
        r'SOFTMAX { execl("/bin/true", "true", nullptr); all(x, y, rows, columns); }',
        FORBIDDEN,
    ),
    "starts a process by another call": (CALL % "SYS_vfork", FORBIDDEN),
    "raises its limits": (
        r"""
SOFTMAX {
  rlimit all_of_it{RLIM_INFINITY, RLIM_INFINITY}; syscall(SYS_setrlimit, RLIMIT_AS, &all_of_it);
  all(x, y, rows, columns);
}""",
        FORBIDDEN,
    ),
    "lowers the judge's limits": (
        r"""
SOFTMAX {
  rlimit nothing{0, 0}; syscall(SYS_prlimit64, getppid(), RLIMIT_CPU, &nothing, nullptr); all(x, y, rows, columns);
}""",
        FORBIDDEN,
    ),
    "sets the clock back": (
        r"""
SOFTMAX {
  timespec long_ago{0, 0}; syscall(SYS_clock_settime, CLOCK_REALTIME, &long_ago); all(x, y, rows, columns);
}""",
        FORBIDDEN,
    ),
    "handles its own faults of memory": (CALL % "SYS_userfaultfd, 0", FORBIDDEN),
    "lets the system write for it": (CALL % "SYS_io_uring_setup, 1, nullptr", FORBIDDEN),
    "counts what the judge does": (CALL % "SYS_perf_event_open, nullptr, getppid(), -1, -1, 0", FORBIDDEN),
    "leaves for a system of its own": (CALL % "SYS_unshare, 0x10000000", FORBIDDEN),
    "looks for the judge's files by its number": (CALL % "SYS_pidfd_open, getppid(), 0", FORBIDDEN),
    "follows the judge step by step": (CALL % "SYS_ptrace, 16, getppid(), nullptr, nullptr", FORBIDDEN),
}  # fmt: skip
