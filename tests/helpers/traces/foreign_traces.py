"""Small traces in the formats of recorders other than nsys and PyTorch's profiler."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]
COPY_DETAILS = "kind_src:pinned kind_dst:device size:1024 dest:0 async:1"


def named(pid: object, process: str, threads: dict[int, str] | None = None, labels: str = "") -> list[Event]:
    """Events that name a process and its threads."""
    entries = [("process_name", 0, {"name": process})] + [("process_labels", 0, {"labels": labels})] * bool(labels)
    entries += [("thread_name", tid, {"name": name}) for tid, name in (threads or {}).items()]
    return [{"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args} for name, tid, args in entries]


def span(pid: object, tid: object, name: str, ts: object, dur: object, cat: object = "", **args: object) -> Event:
    event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur, "args": args}
    return event | ({"cat": cat} if cat else {})


def jax_gpu() -> Event:
    """Trace of JAX: a process for each GPU with its streams and the lines that XLA derives; the last event is empty."""
    lines = {14: "Stream #7(Compute,MemcpyH2D)", 15: "Stream #9(MemcpyD2H)", 90: "XLA Modules", 91: "XLA Ops"}
    kernel = {"correlation_id": "85", "hlo_module": "jit_f", "hlo_op": "dot.1", "kernel_details": "regs:32 grid:1,1,1"}
    return {
        "displayTimeUnit": "ns",
        "metadata": {"highres-ticks": True},
        "traceEvents": [
            *named(2, "/device:GPU:1", lines),
            *named(701, "/host:CPU", {77: "python", 78: "pjrt"}),
            span(701, 77, "PjitFunction(f)", 5.5, 40),
            span(701, 77, "cuLaunchKernelEx", 10, 2, correlation_id="85"),
            span(2, 14, "gemm_fusion_dot_1", 20.125, 10.5, **kernel),
            span(2, 14, "MemcpyH2D", 40, 5, correlation_id="86", memcpy_details=COPY_DETAILS),
            span(2, 15, "MemcpyD2H", 50, 5, correlation_id="87"),
            span(2, 90, "jit_f(123)", 20, 30),
            span(2, 91, "dot.1", 20.125, 10.5),
            {},
        ],
    }


def jax_tpu() -> Event:
    return {
        "traceEvents": [
            *named(3, "/device:TPU:2", {1: "Steps", 2: "XLA Modules", 3: "XLA Ops", 4: "XLA TraceMe"}),
            *named(701, "/host:CPU", {77: "python"}),
            span(701, 77, "PjitFunction(f)", 5, 40),
            span(3, 1, "0", 10, 30),
            span(3, 2, "jit_f(1)", 10, 30),
            span(3, 3, "fusion.3", 10, 12),
            span(3, 3, "copy.1", 25, 15),
        ]
    }


def ascend() -> list[Event]:
    """trace_view.json of MindStudio: Python, CANN, the hardware with its streams, and the lines derived from them."""
    origin_us = 1_723_545_784_434_032
    return [
        *named(71, "Python", {901: "main"}, "CPU"),
        *named(72, "CANN", {}, "CPU"),
        *named(73, "Ascend Hardware", {2: "Stream 2", 3: "Stream 3"}, "NPU"),
        *named(74, "Overlap Analysis", {0: "Computing", 3: "Free"}),
        *named(75, "Communication", {1: "Plane 0"}),
        span(71, 901, "aten::mm", f"{origin_us}.125", 50, "cpu_op", **{"Sequence number": 3}),
        span(71, 901, "Enqueue", f"{origin_us + 1}.000", 2, "enqueue", correlation_id=7),
        span(72, 902, "AscendCL@aclnnMatmul", f"{origin_us + 5}.000", 9, level="acl", connection_id=7),
        span(72, 902, "Node@launch", f"{origin_us + 8}.000", 2, level="node", connection_id=7),
        span(
            73, 2, "MatMulV2", f"{origin_us + 30}.250", 10, connection_id=7, **{"Task Type": "AI_CORE", "Stream Id": 2}
        ),
        span(73, 2, "EVENT_WAIT", f"{origin_us + 45}.250", 900, **{"Task Type": "EVENT_WAIT"}),
        span(73, 3, "MEMCPY_ASYNC", f"{origin_us + 60}.250", 4, operation="host to device", **{"size(B)": 2048}),
        span(74, 0, "Computing", f"{origin_us + 30}.250", 10),
        span(74, 3, "Free", f"{origin_us + 40}.250", 10),
        span(75, 1, "hcom_allReduce_", f"{origin_us + 70}.250", 10),
        {
            "ph": "s",
            "cat": "async_npu",
            "name": "torch_to_npu",
            "id": 7,
            "pid": 71,
            "tid": 901,
            "ts": f"{origin_us + 1}.000",
        },
        {"ph": "C", "name": "AI Core Freq", "pid": 76, "tid": 0, "ts": f"{origin_us}.000", "args": {"MHz": 1000}},
    ]


def mtia() -> Event:
    """Kineto's trace for MTIA: work, copies and waits in one category, and a CPU queue on the device."""
    category = "mtia_ccp_events"
    return {
        "schemaVersion": 1,
        "traceEvents": [
            *named(17, "MTIA 17", {108: "Stream 108", 208: "Stream 108 Submission Queue", 20014: "PACKET"}, "MTIA 17"),
            *named(865, "service", {1837: "main"}, "CPU"),
            span(865, 1837, "aten::mm", 1, 30, "cpu_op", **{"External id": 3}),
            span(865, 1837, "runFunction - job", 4, 3, "mtia_runtime", correlation=204, device=17, stream_id="108"),
            span(17, 208, "synchronize", 5, 500, "mtia_runtime", correlation=1_000_000_000, device=17),
            span(17, 108, "fc-dtype_Float", 20, 40, category, correlation=204, stream=108, row="0"),
            span(17, 108, "event_wait", 61, 800, category, stream=108, wait_on_stream=104),
            span(17, 108, "dma_request", 70, 5, category, stream=108, direction="DEVICE_TO_HOST", size=1024),
            span(17, 20014, "packet", 70, 5, category),
        ],
    }


def viztracer() -> Event:
    return {
        "traceEvents": [
            *named(5, "MainProcess", {6: "MainThread"}),
            span(5, 6, "main (/a.py:1)", 1, 90, "FEE"),
            span(5, 6, "work (/a.py:9)", 10, 20, "FEE"),
            {"ph": "C", "name": "memory", "pid": 5, "tid": 6, "ts": 3, "args": {"rss": 1}},
            {"ph": "b", "cat": "task", "id": 1, "name": "await", "pid": 5, "tid": 6, "ts": 4},
            {"ph": "e", "cat": "task", "id": 1, "name": "await", "pid": 5, "tid": 6, "ts": 9},
        ],
        "viztracer_metadata": {"version": "0.16", "overflow": False},
    }
