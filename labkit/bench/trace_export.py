"""Synthetic exports of any size, in the tables of nsys: steps with stages that launch kernels."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

COLUMNS = {
    "NVTX_EVENTS": "start end eventType rangeId category color text globalTid endGlobalTid textId domainId uint64Value "
    "int64Value doubleValue uint32Value int32Value floatValue jsonTextId jsonText",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start end deviceId contextId streamId correlationId globalPid demangledName "
    "shortName mangledName launchType cacheConfig registersPerThread gridX gridY gridZ blockX blockY blockZ "
    "staticSharedMemory dynamicSharedMemory localMemoryPerThread localMemoryTotal gridId sharedMemoryExecuted "
    "graphNodeId sharedMemoryLimitConfig",
}
NEVER_NULL = ("start", "eventType", "eventClass", "nameId", "deviceId", "streamId", "demangledName", "gridX", "gridY")
META = {"EXPORT_PRODUCT_VERSION": "2023.4.4.54", "EXPORT_SCHEMA_VERSION": "3.7.2"}
PID = 1 << 48 | 4000 << 24
TID = PID | 4000
STAGE_NS, LATENCY_NS = 50_000, 20_000
PER_STEP = 200  # ranges of a step, including the step's own
STAGES = [f"decode/layer.{layer}/{stage}" for layer in range(32) for stage in ("qkv", "attention", "mlp", "residual")]
KERNELS = [f"void kernel_{number}<__half, 128>(Params<{number}>)" for number in range(60)]
STEP, CALL = "decode/step", "cudaLaunchKernel_v7000"
CHUNK = 50_000

Values = dict[str, NDArray[np.int64] | int]


@dataclass(frozen=True)
class Size:
    ranges: int
    kernels: int

    def __str__(self) -> str:
        return f"{self.kernels:,} kernels under {self.ranges:,} ranges"


def write_export(path: Path, size: Size) -> Path:
    """Writes an export of one process and thread, with launches spread evenly over the stages."""
    strings = [STEP, CALL, *STAGES, *KERNELS]
    number = np.arange(size.ranges)
    is_step = number % PER_STEP == 0
    stage = np.cumsum(~is_step) - 1  # of each range; for a step's own range the stage before it
    stages = size.ranges - int(is_step.sum())
    of_kernel = np.arange(size.kernels) * stages // size.kernels
    nth = np.arange(size.kernels) - np.searchsorted(of_kernel, of_kernel)
    launched = of_kernel * STAGE_NS + 1000 + nth * ((STAGE_NS - 5000) // (int(nth.max()) + 1))
    correlation = np.arange(size.kernels) + 1
    name = strings.index(KERNELS[0]) + np.arange(size.kernels) * 7 % len(KERNELS)

    database = sqlite3.connect(path)
    database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF")
    database.execute("CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT)")
    database.executemany("INSERT INTO META_DATA_EXPORT VALUES (?, ?)", META.items())
    database.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(strings))
    last = np.minimum(stage + PER_STEP - 1, stages - 1)  # last stage of a step
    ranges: Values = {
        "start": np.where(is_step, (stage + 1) * STAGE_NS - 50, stage * STAGE_NS + 100),
        "end": np.where(is_step, (last + 1) * STAGE_NS - 60, (stage + 1) * STAGE_NS - 100),
        "eventType": 59,
        "globalTid": TID,
        "textId": np.where(is_step, 0, 2 + stage % len(STAGES)),
        "domainId": 1,
    }
    calls: Values = {
        "start": launched,
        "end": launched + 2000,
        "eventClass": 0,
        "globalTid": TID,
        "correlationId": correlation,
        "nameId": strings.index(CALL),
        "returnValue": 0,
    }
    kernels: Values = {
        "start": launched + LATENCY_NS,
        "end": launched + LATENCY_NS + 5000,
        **dict.fromkeys(("deviceId", "contextId", "gridY", "gridZ", "blockY", "blockZ"), 1),
        "streamId": 7,
        "correlationId": correlation,
        "globalPid": PID,
        "demangledName": name,
        "shortName": name,
        "registersPerThread": 64,
        "gridX": 108 + np.arange(size.kernels) % 13,
        "blockX": 128,
        **dict.fromkeys(("dynamicSharedMemory", "localMemoryPerThread", "localMemoryTotal", "gridId"), 0),
        "staticSharedMemory": 16_384,
    }
    _fill(database, "NVTX_EVENTS", ranges)
    _fill(database, "CUPTI_ACTIVITY_KIND_RUNTIME", calls)
    _fill(database, "CUPTI_ACTIVITY_KIND_KERNEL", kernels)
    text = {"start": 0, "eventType": 75, "globalTid": TID, "domainId": 1, "text": "labkit"}
    database.execute(f"INSERT INTO NVTX_EVENTS ({', '.join(text)}) VALUES (?, ?, ?, ?, ?)", list(text.values()))
    database.commit()
    database.close()
    return path


def _fill(database: sqlite3.Connection, table: str, values: Values) -> None:
    """Makes a table from these columns. A single number fills its column; missing columns are NULL."""
    columns = COLUMNS[table].split()
    kinds = [f"{name} INTEGER NOT NULL" if name in NEVER_NULL else f"{name} INTEGER" for name in columns]
    database.execute(f"CREATE TABLE {table} ({', '.join(kinds)})")
    arrays = np.broadcast_arrays(*values.values())
    insert = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"
    for begin in range(0, len(arrays[0]), CHUNK):
        database.executemany(insert, zip(*(array[begin : begin + CHUNK].tolist() for array in arrays), strict=True))
