"""What an export says about CUDA: work on the GPU, API calls, and the nodes of CUDA graphs as they were made."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.reader.database import NULL, Column, Export
from labkit.nsys.reader.names import Names
from labkit.nsys.trace import KINDS, typed

CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"  # holds the driver's calls too
NODES = ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS")  # where the nodes are: the second one up to 2023.4
WORK = ("deviceId", "streamId", "correlationId", "globalPid")
OPERATIONS = {  # by table: the kind, and the columns besides the times
    "CUPTI_ACTIVITY_KIND_KERNEL": ("kernel", (*WORK, "graphNodeId", "demangledName", "registersPerThread")),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("memcpy", (*WORK, "graphNodeId", "copyKind", "bytes")),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("memset", (*WORK, "graphNodeId", "bytes")),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ("graph", WORK),
}
COPIES = (  # by copyKind
    *("unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),
    *("HtoD unified", "DtoH unified", "DtoD unified"),
)
GRID, BLOCK = ("gridX", "gridY", "gridZ"), ("blockX", "blockY", "blockZ")
SHARED = ("staticSharedMemory", "dynamicSharedMemory")
VERSION = re.compile(r"_v\d{4,5}$")  # of CUDA, at the end of the names of runtime calls


def read_operations(export: Export) -> pd.DataFrame:
    """Kernels, copies, memsets and graphs traced as a whole, in the order of their starts."""
    names, shapes = Names(), Names()
    parts = [part for table in OPERATIONS if (part := _operations(export, table, names, shapes)) is not None]
    if not parts:
        return typed("operations", {})
    columns = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    order = np.argsort(columns["start_ns"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    kind = pd.Categorical.from_codes(columns.pop("kind"), list(KINDS))
    name = names.categorical(columns.pop("name"))
    grid, block = (shapes.categorical(columns.pop(each)) for each in ("grid", "block"))
    return typed("operations", {**columns, "kind": kind, "name": name, "grid": grid, "block": block})


def _operations(export: Export, table: str, names: Names, shapes: Names) -> dict[str, NDArray] | None:
    """The columns of one table. Texts are given as their numbers in `names` and `shapes`."""
    kind, wanted = OPERATIONS[table]
    rows = export.read(table, wanted, may_lack=("graphNodeId",), computed=_launch(export, table))
    if rows is None:
        return None
    count = len(rows["start"])
    zeros = np.zeros(count, np.int64)

    def known(name: str) -> Column:
        column = rows.get(name, zeros)
        return np.where(column == NULL, 0, column)

    if kind == "kernel":
        name = export.codes(rows["demangledName"], names)
    elif kind == "memcpy":
        where, used = pd.factorize(known("copyKind"))
        name = names.codes(COPIES[copy] if 0 <= copy < len(COPIES) else f"kind {copy}" for copy in used.tolist())[where]
    else:
        name = np.full(count, names.code(kind))
    return {
        "start_ns": rows["start"],
        "end_ns": export.ends(rows, f"operations of {table}"),
        "process": export.process(known("globalPid") >> 24),
        "kind": np.full(count, KINDS.index(kind), np.int8),
        "name": name,
        "device": known("deviceId"),
        "stream": known("streamId"),
        "correlation": known("correlationId"),
        "graph_node": known("graphNodeId"),
        "bytes": known("bytes"),
        "grid": _shapes(known("grid"), shapes),
        "block": _shapes(known("block"), shapes),
        "registers": known("registersPerThread"),
        "shared_bytes": known("shared"),
    }


def _launch(export: Export, table: str) -> dict[str, str]:
    """SQL for how kernels were launched; sizes in three directions in one number, of which CUDA's limits leave room."""
    columns = export.nullable(table).keys()
    sql = {"shared": " + ".join(SHARED)} if columns >= set(SHARED) else {}
    for name, (x, y, z) in {"grid": GRID, "block": BLOCK}.items():
        if columns >= {x, y, z}:
            sql[name] = f"({x} << 32) | ({y} << 16) | {z}"
    return sql


def _shapes(packed: Column, shapes: Names) -> NDArray[np.int32]:
    where, used = pd.factorize(packed)
    return shapes.codes(f"{n >> 32} x {n >> 16 & 0xFFFF} x {n & 0xFFFF}" if n else "" for n in used.tolist())[where]


def read_calls(export: Export) -> pd.DataFrame:
    """Calls of CUDA's runtime and driver, in the order of their starts."""
    rows = export.read(CALLS, ("globalTid", "correlationId", "nameId"))
    if rows is None:
        return typed("calls", {})
    if homeless := int((rows["globalTid"] == NULL).sum()):
        export.skipped.append(f"{homeless} API calls without a thread: left out")
        rows = {name: column[rows["globalTid"] != NULL] for name, column in rows.items()}
    ends = export.ends(rows, "API calls")
    order = np.lexsort((-ends, rows["start"]))
    rows = {name: column[order] for name, column in rows.items()}
    names = Names()
    codes = export.codes(rows["nameId"], names, clean=lambda name: VERSION.sub("", name))
    return typed(
        "calls",
        {
            "start_ns": rows["start"],
            "end_ns": ends[order],
            **export.threads(rows["globalTid"]),
            "kind": pd.Categorical.from_codes(np.zeros(len(order), np.int8), ["api"]),
            "name": names.categorical(codes),
            "correlation": np.where(rows["correlationId"] == NULL, 0, rows["correlationId"]),
        },
    )


def read_graph_nodes(export: Export) -> pd.DataFrame:
    """The nodes of CUDA graphs, in the order in which they were made."""
    table = next((table for table in NODES if "graphNodeId" in export.nullable(table)), None)
    rows = table and export.read(table, ("globalTid", "graphNodeId", "originalGraphNodeId"))
    if not rows:
        return typed("graph_nodes", {})
    order = np.argsort(rows["start"], kind="stable")
    known = {name: np.where(column == NULL, 0, column)[order] for name, column in rows.items()}
    return typed(
        "graph_nodes",
        {
            "node": known["graphNodeId"],
            "original": known["originalGraphNodeId"],
            "start_ns": known["start"],
            **export.threads(known["globalTid"]),
        },
    )
