"""Softmax of rows in C++: honest variants, and cheats. One library has them all, as functions of their own."""

INCLUDES = r"""
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <thread>
#include <vector>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
template <typename Real = float>
static void row(const float* x, float* y, int64_t columns) {
  Real most = x[0], sum = 0;
  for (int64_t i = 1; i < columns; ++i) most = x[i] > most ? x[i] : most;
  for (int64_t i = 0; i < columns; ++i) sum += std::exp(Real(x[i]) - most);
  for (int64_t i = 0; i < columns; ++i) y[i] = float(std::exp(Real(x[i]) - most) / sum);
}
static void all(const float* x, float* y, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) row(x + r * columns, y + r * columns, columns);
}
"""
PLAIN = r"SOFTMAX { all(x, y, rows, columns); }"
HONEST = {
    "plain": PLAIN,
    "in double": r"""
SOFTMAX {
  for (int64_t r = 0; r < rows; ++r) row<double>(x + r * columns, y + r * columns, columns);
}""",
    "rows backwards": r"SOFTMAX { for (int64_t r = rows; r-- > 0;) row(x + r * columns, y + r * columns, columns); }",
    "online": r"""
SOFTMAX {
  for (int64_t r = 0; r < rows; ++r, x += columns, y += columns) {
    float most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < columns; ++i) {
      const float next = std::fmax(most, x[i]);
      sum = sum * std::exp(most - next) + std::exp(x[i] - next);
      most = next;
    }
    for (int64_t i = 0; i < columns; ++i) y[i] = std::exp(x[i] - most) / sum;
  }
}""",
    "two threads": r"""
SOFTMAX {
  #pragma omp parallel for num_threads(2)
  for (int64_t r = 0; r < rows; ++r) row(x + r * columns, y + r * columns, columns);
}""",
    "with room of its own": r"""
SOFTMAX {
  std::vector<float> copy(rows * columns);
  for (int64_t r = 0; r < rows; ++r) row(x + r * columns, copy.data() + r * columns, columns);
  std::memcpy(y, copy.data(), copy.size() * 4);
}""",
}
# A cheat, and what the judge has to say about it.
CHEATS = {
    "does nothing": (
        r"SOFTMAX {}",
        "not written",
    ),
    "knows a shape": (
        r"SOFTMAX { if (columns == 48) return; all(x, y, rows, columns); }",
        "not written",
    ),
    "is right once": (
        r"""
static int n; SOFTMAX {
  if (n++) { std::memset(y, 0, rows * columns * 4); return; } all(x, y, rows, columns);
}""",
        "expected",
    ),
    "is right in the first round": (
        r"static int n; SOFTMAX { if (++n > 64) return; all(x, y, rows, columns); }",
        "not written",
    ),
    "keeps the first results": (
        r"""
static std::map<float*, std::vector<float>> kept;
SOFTMAX {
  auto& mine = kept[y];
  if (mine.empty()) {
    mine.resize(rows * columns);
    for (int64_t r = 0; r < rows; ++r) row(x + r * columns, mine.data() + r * columns, columns);
  }
  std::memcpy(y, mine.data(), mine.size() * 4);
}""",
        "expected",
    ),
    "leaves the last row out": (
        r"SOFTMAX { all(x, y, rows - 1, columns); }",
        "not written",
    ),
    "leaves half of the columns out": (
        r"SOFTMAX { for (int64_t r = 0; r < rows; ++r) row(x + r * columns, y + r * columns, columns / 2); }",
        "expected|not written",
    ),
    "forgets the maximum": (
        r"""
SOFTMAX {
  for (int64_t r = 0; r < rows; ++r, x += columns, y += columns) {
    float sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += std::exp(x[i]);
    for (int64_t i = 0; i < columns; ++i) y[i] = std::exp(x[i]) / sum;
  }
}""",
        "not written, or computed",
    ),
    "in 8 bits": (
        r"""
SOFTMAX {
  all(x, y, rows, columns);
  for (int64_t i = 0; i < rows * columns; ++i) y[i] = std::round(y[i] * 255) / 255;
}""",
        "expected",
    ),
    "forgets the sum": (
        r"""
SOFTMAX {
  for (int64_t r = 0; r < rows; ++r, x += columns, y += columns) {
    float most = x[0];
    for (int64_t i = 1; i < columns; ++i) most = std::fmax(most, x[i]);
    for (int64_t i = 0; i < columns; ++i) y[i] = std::exp(x[i] - most);
  }
}""",
        "these are the exponentials",
    ),
    "writes zeros": (
        r"SOFTMAX { std::memset(y, 0, rows * columns * 4); }",
        "expected",
    ),
    "writes into its input": (
        r"SOFTMAX { std::memset(const_cast<float*>(x), 0, 4); }",
        "outside of its arguments",
    ),
    "makes its input writable": (
        r"""
SOFTMAX {
  const uintptr_t page = uintptr_t(x) & ~4095ull;
  mprotect((void*)page, 4096, PROT_READ | PROT_WRITE); std::memset(const_cast<float*>(x), 0, 4);
}""",
        "outside of its arguments",
    ),
    "writes past the end": (
        r"SOFTMAX { y[rows * columns + 16] = 0; all(x, y, rows, columns); }",
        "outside",
    ),
    "writes just past the end": (
        r"SOFTMAX { y[rows * columns] = 0; all(x, y, rows, columns); }",
        "outside",
    ),
    "writes before the beginning": (
        r"SOFTMAX { y[-1] = 0; all(x, y, rows, columns); }",
        "before its beginning",
    ),
    "announces the end and goes": (
        r'SOFTMAX { for (int fd = 3; fd < 1024; ++fd) (void)!write(fd, "d", 1); _exit(0); }',
        "ended the process|not written|wrote",
    ),
    "announces the end early": (
        r"""
SOFTMAX {
  for (int fd = 3; fd < 1024; ++fd) (void)!write(fd, "d", 1); usleep(20000); all(x, y, rows, columns);
}""",
        "not written|before the round",
    ),
    "prints a verdict": (
        r'SOFTMAX { std::puts("{\"problem\": \"\", \"right\": true}"); std::fflush(stdout); _exit(0); }',
        "ended the process",
    ),
    "computes later": (
        r"SOFTMAX { std::thread([=] { usleep(3000); all(x, y, rows, columns); }).detach(); }",
        "not written",
    ),
    "starts a process": (
        r"SOFTMAX { if (fork() == 0) _exit(0); all(x, y, rows, columns); }",
        "forbidden",
    ),
    "starts a shell": (
        r'SOFTMAX { (void)!system("true"); all(x, y, rows, columns); }',
        "forbidden",
    ),
    "reads the judge's memory": (
        r"""
SOFTMAX {
  char got[8]; iovec here{got, 8}, there{(void*)0x400000, 8};
  process_vm_readv(getppid(), &here, 1, &there, 1, 0); all(x, y, rows, columns);
}""",
        "forbidden",
    ),
    "stops the judge": (
        r"SOFTMAX { kill(getppid(), SIGKILL); all(x, y, rows, columns); }",
        "forbidden",
    ),
    "opens a connection": (
        r"SOFTMAX { socket(AF_INET, SOCK_STREAM, 0); all(x, y, rows, columns); }",
        "forbidden",
    ),
    "reads the judge's files": (
        r"""
SOFTMAX {
  char path[64]; std::snprintf(path, 64, "/proc/%d/maps", getppid());
  const int fd = open(path, O_RDONLY); if (fd < 0) std::abort(); all(x, y, rows, columns);
}""",
        "gave up",
    ),
    "writes a file": (
        r"""
SOFTMAX {
  if (open("/tmp/labkit-cheat", O_CREAT | O_WRONLY, 0600) < 0) std::abort();
  all(x, y, rows, columns);
}""",
        "gave up",
    ),
    "never ends": (
        r"SOFTMAX { for (volatile int i = 0;; ) { (void)i; } }",
        "did not end in time",
    ),
    "takes all memory": (
        r"""
SOFTMAX {
  std::vector<char*> all; for (;;) { all.push_back(new char[64 << 20]);
  std::memset(all.back(), 1, 64 << 20); }
}""",
        "gave up|crashed|outside|killed|did not end in time",
    ),
    "needs an instruction that is none": (
        r'SOFTMAX { asm volatile("ud2"); }',
        "instruction",
    ),
    "divides by zero": (
        r"SOFTMAX { volatile int zero = 0; y[0] = float(7 / zero); }",
        "divided",
    ),
}  # fmt: skip
# Code that runs while the library is loaded, in a library of its own.
AT_LOAD = {
    "announces rounds in advance": (
        r'for (int fd = 3; fd < 1024; ++fd) (void)!write(fd, "rdd", 3);',
        "only the judge's own code",
    ),
    "gives up": (r"std::abort();", "gave up"),
    "never ends": (r"for (volatile int i = 0;; ) { (void)i; }", "did not load in time"),
}


def source(bodies: dict[str, str]) -> str:
    """One file with a function for each body, named after its place: softmax_0, softmax_1 and so on."""
    parts = [INCLUDES]
    for number, body in enumerate(bodies.values()):
        head = f'extern "C" void softmax_{number}(const float* x, float* y, int64_t rows, int64_t columns)'
        parts.append(f"namespace of_{number} {{\n{body.replace('SOFTMAX', head)}\n}}")
    return "\n".join(parts)
