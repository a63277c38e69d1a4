// Waits of one thread for another. It spins for a while, then it sleeps until it is woken, or naps if the other is in
// another process.
#pragma once

#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace labkit {

constexpr int kSpins = 4000;            // 50 us on a Zen 4, 190 us on a Xeon
constexpr int kRankSpins = 4 * kSpins;  // in an exchange of ranks, which rarely takes longer if each has a core
constexpr long kNapNs = 20'000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel compares the bare word");

// Leaves the core to other threads for a moment. A loop of sched_yield() would do so, too, but Linux puts a
// thread's next turn off with each of these calls. A rank that had waited some milliseconds in such a loop got no core
// for 0.4 s when it had to compute (4 ranks on 2 cores, Linux 6.18).
inline void nap() {
  // Linux may end a sleep later by the timer slack, which is 50 us unless it is set.
  [[maybe_unused]] thread_local const bool precise = prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL) == 0;
  const timespec duration{0, kNapNs};
  nanosleep(&duration, nullptr);
}

// Returns once the word was woken, at once if it is not `value`, or spuriously. For threads of one process.
inline void sleep_while(const std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

inline void wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace labkit
