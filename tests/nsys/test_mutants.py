"""A damaged trace gives every table or is refused with a message; it never causes a traceback or a hang."""

from __future__ import annotations

import gzip
import json
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from helpers.sweeps import sweep
from helpers.traces.foreign_traces import ascend, jax_gpu, jax_tpu, mtia, viztracer
from helpers.traces.nsys_databases import random_database
from helpers.traces.nsys_exports import GENERATIONS
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from labkit.nsys.reader.reading import read
from labkit.nsys.tables.compare import compare_traces
from labkit.nsys.tables.gaps import gaps, short_kernels
from labkit.nsys.tables.nsys_reports import nvtx_gpu_proj_trace, nvtx_kern_sum
from labkit.nsys.tables.operations import calls, kernels
from labkit.nsys.tables.operators import operators
from labkit.nsys.tables.ranges import projection
from labkit.nsys.tables.rank_waits import rank_waits
from labkit.nsys.tables.selection import Selection
from labkit.nsys.tables.summary import summarise
from labkit.nsys.timeline.export import write_chrome
from labkit.nsys.timeline.synthetic import decode_trace
from labkit.nsys.trace import Trace
from labkit.system.errors import UserError

MOST_S = 10.0  # processor time for a trace of some hundred events: far more than any needs
ODD: tuple[Any, ...] = (
    *(None, True, [], {}, "", "x", [[]], {"a": 1}, "\x1b[2J\u202e", "é" * 300, [1, "a", None]),
    *(0, -1, 1.5, 2**31, 2**63 - 1, -(2**63), 2**64 + 3, 10**30, 1e-300, 1e300, "nan", "-Infinity", "1e999", "0x7"),
)
TOKENS = (
    *(b"NaN", b"Infinity", b"-inf", b"1e999999", b"9" * 40, b"null"),
    *(b"]", b"[", b"{", b"}", b",", b'"', b"\xff\xfe", b"\0"),
)
VALUES = (None, -1, 0, 2**62, 2**63 - 1, -(2**63), "text", b"\xff\0", 1.5, 1e300, "", 2**31)
TABLES: tuple[Callable[[Trace], object], ...] = (
    *(summarise, calls, gaps, short_kernels, operators, projection, rank_waits, nvtx_gpu_proj_trace, nvtx_kern_sum),
    lambda trace: compare_traces(trace, decode_trace(steps=2, layers=1)),
    lambda trace: kernels(trace, Selection(window_ns=(0, 50_000), name="a", ranks=(0,))),
)


@cache
def documents() -> dict[str, str]:
    """Undamaged traces of every recorder, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        kineto = write_chrome(decode_trace(steps=2, layers=1, ranks=2), Path(folder, "kineto.json")).read_text()
    foreign = {"jax": jax_gpu(), "tpu": jax_tpu(), "ascend": ascend(), "mtia": mtia(), "viztracer": viztracer()}
    return {"kineto": kineto, **{name: json.dumps(document) for name, document in foreign.items()}}


def damaged_json(random: Random) -> bytes:
    """A trace in which values are replaced, events lost or doubled, or bytes changed."""
    document = json.loads(documents()[random.choice(sorted(documents()))])
    events = document["traceEvents"] if isinstance(document, dict) else document
    for _ in range(random.randrange(4)):
        event = random.choice(events)
        holder: Any = event.get("args") if isinstance(event, dict) and random.random() < 0.4 else event
        keys = sorted(holder) if isinstance(holder, dict) else []
        match random.randrange(4 if keys else 2):
            case 0:
                events.insert(random.randrange(len(events)), random.choice((*events, *ODD)))
            case 1:
                events[random.randrange(len(events))] = random.choice((random.choice(events), *ODD))
            case 2:
                del holder[random.choice(keys)]
            case 3:
                new = random.choice(("ph", "cat", "args", "ts", "dur", "pid", "tid", *keys, *keys, *keys))
                holder[new] = random.choice((*ODD, "B", "E", "X", "M", "kernel", "mtia_ccp_events", "gpu_memcpy"))
    text = json.dumps(document, indent=random.choice((None, 1))).encode()
    for _ in range(random.choice((0, 0, 1, 2))):
        position = random.randrange(len(text))
        token = random.choice((*TOKENS, text[position : position + random.randrange(200)]))
        text = text[:position] + token + text[position + random.choice((0, 1, len(token), 100)) :]
    if random.random() < 0.1:
        text = text[: random.randrange(len(text))]
    if random.random() < 0.3:
        text = gzip.compress(text, 1)
        if random.random() < 0.5:
            text = _changed_bytes(text, random)
    return text


def damaged_database(random: Random) -> bytes:
    """An export in which values, columns, tables or bytes are changed."""
    with tempfile.TemporaryDirectory() as folder:
        path = random_database(Path(folder, "a.sqlite"), random.randrange(5), random.choice(sorted(GENERATIONS)))
        with closing(sqlite3.connect(path)) as connection:
            tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for _ in range(random.randrange(4)):
                table = random.choice(tables)
                columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
                column = random.choice(columns or [""])
                change = random.choice(
                    (
                        f'UPDATE "{table}" SET "{column}" = ? WHERE rowid % {random.randrange(1, 9)} = 0',
                        f'UPDATE "{table}" SET "{column}" = ?',
                        f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "odd"',
                        f'ALTER TABLE "{table}" RENAME TO "{table}_V3"',
                        f'DROP TABLE "{table}"',
                        f'DELETE FROM "{table}"',
                        f'INSERT INTO "{table}" SELECT * FROM "{table}"',
                    )
                )
                with suppress(sqlite3.Error):
                    connection.execute(change, (random.choice(VALUES),) if "?" in change else ())
            connection.commit()
        content = path.read_bytes()
    return _changed_bytes(content, random) if random.random() < 0.4 else content


def _changed_bytes(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.randrange(1, 6)):
        changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed[: random.randrange(len(changed))]) if random.random() < 0.2 else bytes(changed)


def survives(make: Callable[[Random], bytes], random: Random) -> None:
    """Reads a damaged trace and makes every table and export of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "damaged")
        path.write_bytes(make(random))
        start = time.process_time()
        with suppress(UserError):
            trace = read(path, cache=False)
            tables: list[Callable[[Trace], object]] = [*TABLES, partial(write_chrome, path=Path(folder, "back.json"))]
            for table in tables:
                with suppress(UserError):
                    table(trace)
        assert time.process_time() - start < MOST_S


@pytest.mark.parametrize("count", [4, pytest.param(400, marks=[sweep, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("make", [damaged_json, damaged_database])
def test_a_damaged_trace_is_read_or_refused(make: Callable[[Random], bytes], count: int) -> None:
    run_examples = settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a smaller seed makes no smaller trace
        suppress_health_check=list(HealthCheck),
    )

    @run_examples
    @given(st.randoms(use_true_random=False))
    def check(random: Random) -> None:
        survives(make, random)

    check()
