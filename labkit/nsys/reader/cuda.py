"""The CUDA events of an export: work on the GPU, API calls, and the creation of the nodes of CUDA graphs."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.reader.database import NULL, Column, Export
from labkit.nsys.reader.limits import GREATEST, check_size
from labkit.nsys.reader.names import Names
from labkit.nsys.trace import CALL_KINDS, KINDS, typed

CALLS = {"CUPTI_ACTIVITY_KIND_RUNTIME": "api", "OSRT_API": "os"}  # the first table holds the driver's calls too
NODES = ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS")  # tables of nodes: the second up to 2023.4
WORK = ("deviceId", "streamId", "correlationId", "globalPid")
OPERATIONS = {  # by table: the kind, and the columns besides the times
    "CUPTI_ACTIVITY_KIND_KERNEL": ("kernel", (*WORK, "graphNodeId", "demangledName", "registersPerThread")),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("memcpy", (*WORK, "graphNodeId", "copyKind", "bytes", "srcKind", "dstKind")),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("memset", (*WORK, "graphNodeId", "bytes")),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ("graph", WORK),
}
COPIES = (  # by copyKind
    *("unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),
    *("HtoD unified", "DtoH unified", "DtoD unified"),
)
# By srcKind and dstKind.
MEMORIES = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
WORK_TABLE = re.compile(r"CUPTI_ACTIVITY_KIND_(?:CONCURRENT_)?(?:KERNEL|MEMCPY|MEMSET|GRAPH_TRACE)")
GPUS, CUDA_DEVICES = "TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE"
GRID, BLOCK = ("gridX", "gridY", "gridZ"), ("blockX", "blockY", "blockZ")
SHARED = ("staticSharedMemory", "dynamicSharedMemory")
VERSION = re.compile(r"_v\d{4,5}$")  # CUDA's version at the end of the names of runtime calls


def read_operations(export: Export) -> pd.DataFrame:
    """Kernels, copies, memsets, and graphs traced as a whole, in the order of their starts."""
    names, shapes = Names(), Names()
    parts = [part for table in OPERATIONS if (part := _operations(export, table, names, shapes)) is not None]
    if not parts:
        return typed("operations", {})
    columns = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    order = np.argsort(columns["start_ns"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    kind = pd.Categorical.from_codes(columns.pop("kind"), list(KINDS))
    name = names.categorical(columns.pop("name"))
    texts = {column: shapes.categorical(columns.pop(column)) for column in ("grid", "block", "memory")}
    return typed("operations", {**columns, "kind": kind, "name": name, **texts})


def _operations(export: Export, table: str, names: Names, shapes: Names) -> dict[str, NDArray] | None:
    """The columns of one table. Texts are numbers in `names` and `shapes`."""
    kind, columns = OPERATIONS[table]
    may_lack = ("graphNodeId", "srcKind", "dstKind")
    rows = export.read(table, columns, may_lack=may_lack, computed=_launch(export, table))
    if rows is None:
        return None
    untimed = (rows["start"] == 0) & (rows["end"] == 0)
    if untimed.any():
        export.skipped.append(f"{int(untimed.sum())} operations of {table} without times: left out")
        rows = {name: column[~untimed] for name, column in rows.items()}
    count = len(rows["start"])
    zeros = np.zeros(count, np.int64)

    def filled(name: str) -> Column:
        column = rows.get(name, zeros)
        return np.where(column == NULL, 0, column)

    for column in ("deviceId", "registersPerThread", "shared"):
        check_size(filled(column), f"{column} of {table}")
    if kind == "kernel":
        name = export.codes(rows["demangledName"], names)
    elif kind == "memcpy":
        where, used = pd.factorize(filled("copyKind"))
        name = names.codes(COPIES[copy] if 0 <= copy < len(COPIES) else f"kind {copy}" for copy in used.tolist())[where]
    else:
        name = np.full(count, names.code(kind))
    return {
        "start_ns": rows["start"],
        "end_ns": export.ends(rows, f"operations of {table}"),
        "process": export.process(filled("globalPid") >> 24),
        "kind": np.full(count, KINDS.index(kind), np.int8),
        "name": name,
        "device": filled("deviceId"),
        "stream": filled("streamId"),
        "correlation": filled("correlationId"),
        "graph_node": filled("graphNodeId"),
        "bytes": filled("bytes"),
        "memory": _memories(rows, shapes) if kind == "memcpy" else np.full(count, shapes.code("")),
        "grid": _shapes(filled("grid"), shapes),
        "block": _shapes(filled("block"), shapes),
        "registers": filled("registersPerThread"),
        "shared_bytes": filled("shared"),
    }


def _launch(export: Export, table: str) -> dict[str, str]:
    """SQL for the launch of kernels. Three sizes fit into one number within CUDA's limits."""
    columns = export.nullable(table).keys()
    sql = {"shared": " + ".join(SHARED)} if columns >= set(SHARED) else {}
    for name, (x, y, z) in {"grid": GRID, "block": BLOCK}.items():
        if columns >= {x, y, z}:
            sql[name] = f"({x} << 32) | ({y} << 16) | {z}"
    return sql


def _shapes(packed: Column, shapes: Names) -> NDArray[np.int32]:
    where, used = pd.factorize(packed)
    return shapes.codes(f"{n >> 32} x {n >> 16 & 0xFFFF} x {n & 0xFFFF}" if n else "" for n in used.tolist())[where]


def _memories(rows: dict[str, Column], shapes: Names) -> NDArray[np.int32]:
    """ "Pageable -> Device" for each copy; "" if the file lacks it."""
    known = len(MEMORIES)
    kinds = [np.where((rows[name] >= 0) & (rows[name] < known), rows[name], known) for name in ("srcKind", "dstKind")]
    where, used = pd.factorize(kinds[0] * (known + 1) + kinds[1])
    pairs = (divmod(pair, known + 1) for pair in used.tolist())
    texts = (f"{MEMORIES[a]} -> {MEMORIES[b]}" if a < known and b < known else "" for a, b in pairs)
    return shapes.codes(texts)[where]


def read_calls(export: Export) -> pd.DataFrame:
    """Calls of CUDA's runtime and driver and of the system's libraries, in the order of their starts."""
    parts = [part for table, kind in CALLS.items() if (part := _calls(export, table, kind)) is not None]
    if not parts:
        return typed("calls", {})
    columns = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    names = Names()
    order = np.lexsort((-columns["end"], columns["start"]))
    columns = {name: column[order] for name, column in columns.items()}
    codes = export.codes(columns["nameId"], names, clean=lambda name: VERSION.sub("", name))
    return typed(
        "calls",
        {
            "start_ns": columns["start"],
            "end_ns": columns["end"],
            **export.threads(columns["globalTid"]),
            "kind": pd.Categorical.from_codes(columns["kind"], list(CALL_KINDS)),
            "name": names.categorical(codes),
            "correlation": columns["correlationId"],
        },
    )


def _calls(export: Export, table: str, kind: str) -> dict[str, Column] | None:
    """The calls of one table, without calls that have no thread."""
    rows = export.read(table, ("globalTid", "correlationId", "nameId"))
    if rows is None:
        return None
    threadless = rows["globalTid"] == NULL
    if threadless.any():
        export.skipped.append(f"{int(threadless.sum())} calls of {table} without a thread: left out")
        rows = {name: column[~threadless] for name, column in rows.items()}
    linked = (rows["correlationId"] != NULL) & (kind == "api")
    return rows | {
        "end": export.ends(rows, f"calls of {table}"),
        "correlationId": np.where(linked, rows["correlationId"], 0),
        "kind": np.full(len(rows["start"]), CALL_KINDS.index(kind), np.int8),
    }


def read_devices(export: Export) -> pd.DataFrame:
    """The GPUs of each process, by the numbers that CUDA gave them in this process.

    Without a table of these numbers, the GPU's own number is taken in each process.
    """
    if not {"id", "name"} <= export.nullable(GPUS).keys() or not export.processes:
        return typed("devices", {})
    rate = "coalesce(memoryBandwidth, 0) / 1e9" if "memoryBandwidth" in export.nullable(GPUS) else "0.0"
    gpus = {
        gpu: (str(name or ""), float(gb_s))
        for gpu, name, gb_s in export.rows(
            f"SELECT id, CAST(name AS TEXT), {rate} FROM {GPUS} WHERE id BETWEEN 0 AND {GREATEST}"
        )
    }
    pairs = {(number, gpu): gpu for number in export.processes.values() for gpu in gpus}
    if {"gpuId", "cudaId", "pid"} <= export.nullable(CUDA_DEVICES).keys():
        numbers = {key & 0xFFFFFF: number for key, number in export.processes.items()}
        rows = export.rows(f"SELECT pid, cudaId, gpuId FROM {CUDA_DEVICES} WHERE cudaId BETWEEN 0 AND {GREATEST}")
        pairs = {(numbers[pid], device): gpu for pid, device, gpu in rows if pid in numbers and gpu in gpus} or pairs
    return typed(
        "devices",
        {
            "process": [process for process, _ in pairs],
            "device": [device for _, device in pairs],
            "name": [gpus[gpu][0] for gpu in pairs.values()],
            "bandwidth_gb_s": [gpus[gpu][1] for gpu in pairs.values()],
        },
    )


def read_graph_nodes(export: Export) -> pd.DataFrame:
    """The nodes of CUDA graphs, in the order of their creation."""
    table = next((table for table in NODES if "graphNodeId" in export.nullable(table)), None)
    rows = table and export.read(table, ("globalTid", "graphNodeId", "originalGraphNodeId"))
    if not rows:
        return typed("graph_nodes", {})
    order = np.argsort(rows["start"], kind="stable")
    columns = {name: np.where(column == NULL, 0, column)[order] for name, column in rows.items()}
    return typed(
        "graph_nodes",
        {
            "node": columns["graphNodeId"],
            "original": columns["originalGraphNodeId"],
            "start_ns": columns["start"],
            **export.threads(columns["globalTid"]),
        },
    )
