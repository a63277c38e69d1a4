"""Random exports of nsys: each seed makes one that nsys accepts and that is hard to read.

They leave out cases that nsys does not define or that crash it: two ranges of a thread with the same bounds, two
threads of a process that create the same domain, ranges that end before they start, and open ranges if none was
closed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers.traces.nsys_exports import (
    CATEGORY,
    DOMAIN_DESTROY,
    GENERATIONS,
    IMPORTED_PUSH_POP,
    IMPORTED_START_END,
    KERNEL,
    MARK,
    MEMCPY,
    MEMSET,
    NVTX,
    PUSH_POP,
    RUNTIME,
    START_END,
    THREAD_NAME,
    Export,
    Row,
    global_pid,
    global_tid,
)

EPOCH_NS = 1_795_308_548_674_607_415
SPAN_NS = 10_000_000
MESSAGES = ("decode", "decode/step", "decode/layer.0/qkv", "decode/layer.1/mlp", "prefill/embed", "decode/lm_head")
NAMES = (*MESSAGES, "forward", "forward", 'a "quoted", name', "größe: 3", "iteration 7", "a:b")
KERNELS = ("void gemm<float, 4>(float*, int)", "softmax_kernel", "void add<half>(T1 *, T1)", "flash::fwd(Params)")
CALLS = ("cudaLaunchKernel_v7000", "cuLaunchKernel", "cudaGraphLaunch_v10000", "cudaMemcpyAsync_v3020")


def random_database(path: Path, seed: int, generation: str, *, settled: bool = False) -> Path:
    """Writes an export. `settled`: a range has the last timestamp of all, so all versions end open ranges there."""
    random = np.random.default_rng([seed, list(GENERATIONS).index(generation)])
    return _Maker(random, generation).make(settled).write(path)


class _Maker:
    def __init__(self, random: np.random.Generator, generation: str) -> None:
        self.random, self.export = random, Export(generation)
        self.domains: list[int] = []
        self.correlation = 0

    def make(self, settled: bool) -> Export:
        random, export = self.random, self.export
        export.string("never referred to")
        export.started(EPOCH_NS)
        pids = random.choice(np.arange(300, 9000), random.integers(1, 4), replace=False).tolist()
        for pid in pids:
            export.add("PROCESSES", {"globalPid": global_pid(pid), "pid": pid, "name": "python"})
            tids = [pid, *random.choice(np.arange(9000, 9999), random.integers(0, 3), replace=False).tolist()]
            self.process(pid, [global_tid(pid, tid) for tid in tids])
        self.strangers([*pids, 299])
        if export.tables.get(NVTX):
            self.last(global_tid(pids[0], pids[0]), settled)
        for table, rows in export.tables.items():
            export.tables[table] = [rows[index] for index in random.permutation(len(rows))]
        self.lose_tables()
        return export

    def chance(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def pick(self, *values: int) -> int:
        return int(self.random.choice(values))

    def time(self) -> int:
        return int(self.random.integers(5000, SPAN_NS))

    def process(self, pid: int, tids: list[int]) -> None:
        """Adds domains (some unnamed, some named twice), ranges and calls of each thread. Correlations begin at 1."""
        self.domains = list(range(int(self.random.integers(1, 5))))
        self.correlation = 0
        for domain in self.domains[1:]:
            for repetition in range(self.pick(0, 1, 1, 2)):
                start = int(self.random.integers(0, 1000)) + 2000 * repetition
                self.export.create(start, tids[0], domain, f"domain{domain + repetition}")
        for tid in tids:
            name = self.export.string(f"thread {tid % 7}")
            self.export.add("ThreadNames", {"nameId": name, "priority": 20, "globalTid": tid})
            self.calls(pid, tid, self.nested(tid) + self.overlapping(tid))
            for kind in (MARK, CATEGORY, THREAD_NAME, DOMAIN_DESTROY):
                if self.chance(0.3):
                    self.export.range(self.time(), None, tid, eventType=kind, text="not a range")

    def nested(self, tid: int) -> list[int]:
        """Adds push/pop ranges from a stack; some that remain on the stack are never closed. Returns all bounds."""
        stack: list[int] = []
        times = np.unique(self.random.integers(5000, SPAN_NS, int(self.random.integers(0, 60)))).tolist()
        for time in times:
            if stack and self.chance(0.5):
                self.range(stack.pop(), time, tid, self.pick(PUSH_POP, PUSH_POP, PUSH_POP, IMPORTED_PUSH_POP))
            else:
                stack.append(time)
        for start in stack:
            if self.chance(0.6):
                self.range(start, None, tid, PUSH_POP)
        return times

    def overlapping(self, tid: int) -> list[int]:
        """Adds start/end ranges; some end on another thread, some at once, some never. Returns all bounds."""
        bounds = []
        for _ in range(int(self.random.integers(0, 12))):
            start = self.time()
            end = start + self.pick(0, *self.random.integers(1, SPAN_NS // 2, 8).tolist())
            columns = {"endGlobalTid": tid ^ 1} if self.chance(0.15) else {}
            kind = self.pick(START_END, START_END, START_END, IMPORTED_START_END)
            self.range(start, None if self.chance(0.1) else end, tid, kind, **columns)
            bounds += [start, end]
        return bounds

    def range(self, start: int, end: int | None, tid: int, kind: int, **columns: object) -> None:
        """Adds a range named by a registered string, a text, both (the string counts) or neither."""
        name = str(self.random.choice(NAMES))
        namings: list[Row] = [{"text": name}] * 9 + [{"textId": self.export.string(name)}] * 9
        namings += [{"text": "not this", "textId": self.export.string(name)}, {}]
        naming = namings[int(self.random.integers(len(namings)))]
        self.export.range(start, end, tid, eventType=kind, **naming, **columns, domainId=self.pick(*self.domains))

    def calls(self, pid: int, tid: int, bounds: list[int]) -> None:
        """Adds calls one after the other; some begin or end at a bound of a range, and some contain another call."""
        times = self.random.integers(1, SPAN_NS + 5000, int(self.random.integers(0, 120))).tolist()
        if bounds:
            times += self.random.choice(bounds, min(len(bounds), 10), replace=False).tolist()
        times = np.unique(times).tolist()
        for start, end in zip(times[::2], times[1::2], strict=False):
            self.call(pid, start, end, tid)
            if end - start > 10 and self.chance(0.1):
                self.call(pid, start + 2, end - self.pick(0, 1, 2), tid)

    def call(self, pid: int, start: int, end: int, tid: int) -> None:
        self.correlation += self.correlation == 0 or self.chance(0.95)  # some share the previous correlation
        self.export.call(start, end, tid, self.correlation, str(self.random.choice(CALLS)))
        for _ in range(self.pick(0, 1, 1, 1, 1, 2, 7)):
            self.work(start + self.pick(-50, 5000, 300_000), global_pid(pid), self.correlation, tid)

    def work(self, about: int, pid: int, correlation: int | None, tid: int) -> None:
        start = about + int(self.random.integers(0, 5000))
        end = start + int(self.random.integers(0, 90_000))
        kind = self.random.random()
        if kind < 0.7:
            node = self.pick(*range(1, 20)) if self.chance(0.2) else None
            self.export.kernel(start, end, pid, correlation, str(self.random.choice(KERNELS)), node)
            if node is not None:
                self.export.node(max(start - 1_000_000, 0), tid, node, node + 100 if self.chance(0.5) else None)
        elif kind < 0.85:
            self.export.copy(start, end, pid, correlation, self.pick(1, 2, 8, 10))
        elif kind < 0.97 or self.export.old:
            self.export.memset(start, end, pid, correlation)
        else:
            self.export.graph(start, end, pid, correlation)

    def strangers(self, pids: list[int]) -> None:
        """Adds work whose call was not recorded: no correlation, one without a call, or an unknown process."""
        for _ in range(self.pick(*range(5))):
            pid = self.pick(*pids)
            self.work(self.time(), global_pid(pid), None if self.chance(0.4) else 1_000_000, global_tid(pid, pid))

    def last(self, tid: int, settled: bool) -> None:
        """Adds a closed range after all others, and, unless settled, often an event after it that is not a range."""
        self.export.range(2 * SPAN_NS, 2 * SPAN_NS + 7, tid, text="last")
        if not settled and self.chance(0.8):
            self.export.range(3 * SPAN_NS, None, tid, eventType=MARK, text="later")

    def lose_tables(self) -> None:
        """Removes some tables and empties others. Exports have no table for events that did not happen."""
        for table in (NVTX, RUNTIME, KERNEL, MEMCPY, MEMSET):
            luck = self.random.random()
            if luck < 0.03:
                self.export.tables.pop(table, None)
            elif luck < 0.06:
                self.export.tables[table] = []
