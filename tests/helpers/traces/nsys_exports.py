"""Databases as `nsys export --type sqlite` writes them, row by row, with the tables and columns of real exports."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PUSH_POP, START_END, IMPORTED_PUSH_POP, IMPORTED_START_END = 59, 60, 70, 71
CATEGORY, MARK, THREAD_NAME, DOMAIN_CREATE, DOMAIN_DESTROY = 33, 34, 39, 75, 76
MACHINE = 1 << 48
GENERATIONS = {  # version of nsys and version of the schema
    "2022.4": ("2022.4.2.1", "3.0.0"),
    "2023.4": ("2023.4.4.54", "3.7.2"),
    "2026.1": ("2026.1.1.77", "3.24.0"),
}
NVTX, RUNTIME = "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME"
KERNEL, MEMCPY, MEMSET, GRAPH = (
    f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
)
OSRT, GPUS, CUDA_DEVICES = "OSRT_API", "TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE"
START_TIME = "TARGET_INFO_SESSION_START_TIME"

WORK = "start! end! deviceId! contextId! streamId! correlationId globalPid"
META = "name!:TEXT value:TEXT"
NODES = "start! end! eventClass! globalTid nameId! graphNodeId! originalGraphNodeId"
TABLES = {  # columns in the order of the exports; INTEGER by default; ! means NOT NULL
    "StringIds": "id! value!:TEXT",
    NVTX: "start! end eventType! rangeId category color text:TEXT globalTid endGlobalTid textId domainId uint64Value "
    "int64Value doubleValue:REAL uint32Value int32Value floatValue:REAL jsonTextId jsonText:TEXT",
    RUNTIME: "start! end! eventClass! globalTid correlationId nameId! returnValue! callchainId",
    KERNEL: f"{WORK} demangledName! shortName! mangledName launchType cacheConfig registersPerThread! gridX! gridY! "
    "gridZ! blockX! blockY! blockZ! staticSharedMemory! dynamicSharedMemory! localMemoryPerThread! localMemoryTotal! "
    "gridId! sharedMemoryExecuted graphNodeId sharedMemoryLimitConfig",
    MEMCPY: f"{WORK} bytes! copyKind! deprecatedSrcId srcKind dstKind srcDeviceId srcContextId dstDeviceId "
    "dstContextId migrationCause graphNodeId virtualAddress",
    MEMSET: f"{WORK} value! bytes! graphNodeId memKind",
    GRAPH: f"{WORK} graphId! graphExecId!",
    "CUDA_GRAPH_EVENTS": NODES,
    "CUDA_GRAPH_NODE_EVENTS": NODES,
    OSRT: "start! end! eventClass! globalTid correlationId nameId! returnValue! nestingLevel callchainId!",
    GPUS: "vmId! id! name:TEXT busLocation:TEXT totalMemory memoryBandwidth smCount",
    CUDA_DEVICES: "gpuId cudaId! pid! uuid:TEXT numMultiprocessors",
    "PROCESSES": "globalPid pid name:TEXT",
    "ThreadNames": "nameId! priority globalTid",
    START_TIME: "utcEpochNs utcTime:TEXT localTime:TEXT",
}
SIZES = ("gridY", "gridZ", "blockY", "blockZ")
LOCAL = ("localMemoryPerThread", "localMemoryTotal", "gridId")

Row = Mapping[str, object]


@dataclass
class Export:
    """Contents of a database: the rows of each table. Columns that a row lacks are NULL."""

    generation: str = "2022.4"
    tables: dict[str, list[Row]] = field(default_factory=dict)
    strings: dict[str, int] = field(default_factory=dict)

    @property
    def old(self) -> bool:
        return self.generation == "2022.4"

    def add(self, table: str, row: Mapping[str, object]) -> None:
        self.tables.setdefault(table, []).append(row)

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def range(self, start: int, end: int | None, tid: int, **columns: object) -> None:
        """Adds a push/pop range of the default domain, unless the columns say otherwise."""
        self.add(NVTX, {"start": start, "end": end, "eventType": PUSH_POP, "globalTid": tid, "domainId": 0} | columns)

    def labelled(self, start: int, end: int | None, tid: int, text: str) -> None:
        """Adds a push/pop range of domain number 1, which `create` made."""
        self.range(start, end, tid, textId=self.string(text), domainId=1)

    def create(self, start: int, tid: int, domain: int, name: str) -> None:
        row = {"start": start, "eventType": DOMAIN_CREATE, "globalTid": tid, "domainId": domain, "text": name}
        self.add(NVTX, row)

    def call(self, start: int, end: int, tid: int, correlation: int, name: str = "cudaLaunchKernel_v7000") -> None:
        row = {"start": start, "end": end, "eventClass": 0, "globalTid": tid, "correlationId": correlation}
        self.add(RUNTIME, row | {"nameId": self.string(name), "returnValue": 0})

    def kernel(
        self, start: int, end: int, pid: int, correlation: int | None, name: str = "gemm", node: int | None = None
    ) -> None:
        names = {"demangledName": self.string(name), "shortName": self.string(name.split("<")[0]), "graphNodeId": node}
        sizes = {"gridX": 108, "blockX": 128} | dict.fromkeys(SIZES, 1) | dict.fromkeys(LOCAL, 0)
        memory = {"registersPerThread": 32, "staticSharedMemory": 1024, "dynamicSharedMemory": 512}
        self.add(KERNEL, {**_work(start, end, pid, correlation), **names, **sizes, **memory})

    def os(self, start: int, end: int, tid: int, name: str) -> None:
        row = {"start": start, "end": end, "eventClass": 27, "globalTid": tid, "correlationId": 0, "returnValue": 0}
        self.add(OSRT, row | {"nameId": self.string(name), "callchainId": 0})

    def copy(
        self, start: int, end: int, pid: int, correlation: int | None, kind: int = 1, memory: tuple[int, int] = (0, 2)
    ) -> None:
        work = _work(start, end, pid, correlation) | {"bytes": 4096, "copyKind": kind}
        self.add(MEMCPY, work | {"srcKind": memory[0], "dstKind": memory[1]})

    def memset(self, start: int, end: int, pid: int, correlation: int | None) -> None:
        self.add(MEMSET, _work(start, end, pid, correlation) | {"bytes": 512, "value": 0})

    def graph(self, start: int, end: int, pid: int, correlation: int | None) -> None:
        self.add(GRAPH, _work(start, end, pid, correlation) | {"graphId": 1, "graphExecId": 2})

    def node(self, start: int, tid: int, node: int, original: int | None = None) -> None:
        row = {"start": start, "end": start, "eventClass": 90, "globalTid": tid, "graphNodeId": node}
        table = "CUDA_GRAPH_NODE_EVENTS" if self.generation == "2026.1" else "CUDA_GRAPH_EVENTS"
        self.add(table, row | {"nameId": self.string("Graph Node Creation"), "originalGraphNodeId": original})

    def started(self, epoch_ns: int) -> None:
        self.add(START_TIME, {"utcEpochNs": epoch_ns, "utcTime": "2026-11-22T00:49:08"})

    def write(self, path: Path, *, schema: str | None = None, without: Collection[str] = ()) -> Path:
        """Writes the tables that have had rows, even if they are empty now, without the columns in `without`."""
        version, default_schema = GENERATIONS[self.generation]
        versions = {"EXPORT_PRODUCT_VERSION": version, "EXPORT_SCHEMA_VERSION": schema or default_schema}
        meta: list[Row] = [{"name": name, "value": value} for name, value in versions.items()]
        tables = {"EXPORT_META_DATA" if self.old else "META_DATA_EXPORT": meta, **self.tables}
        tables["StringIds"] = [{"id": number, "value": text} for text, number in self.strings.items()]
        path.unlink(missing_ok=True)
        database = sqlite3.connect(path)
        for table, rows in tables.items():
            words = [word for word in TABLES.get(table, META).split() if _name(word) not in without]
            database.execute(f'CREATE TABLE "{table}" ({", ".join(map(_column, words))})')
            insert = f'INSERT INTO "{table}" VALUES ({", ".join("?" * len(words))})'
            database.executemany(insert, [[row.get(_name(word)) for word in words] for row in rows])
        database.commit()
        database.close()
        return path


def global_pid(pid: int) -> int:
    return MACHINE | pid << 24


def global_tid(pid: int, tid: int) -> int:
    return global_pid(pid) | tid


def _work(start: int, end: int, pid: int, correlation: int | None) -> dict[str, int | None]:
    location = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": pid}
    return {"start": start, "end": end, **location, "correlationId": correlation}


def _name(word: str) -> str:
    return word.split(":")[0].rstrip("!")


def _column(word: str) -> str:
    kind = word.partition(":")[2] or "INTEGER"
    return f"{_name(word)} {kind} NOT NULL" if "!" in word else f"{_name(word)} {kind}"
