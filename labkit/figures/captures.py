"""What two captures were taken of, and how far they can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.display import Markdown

if TYPE_CHECKING:
    from labkit.studies.traces import CapturePair


def captures_table(pair: CapturePair) -> Markdown:
    """A column for each side: the profiler, the run, what being profiled costs, how much of the time has a stage."""
    records, tables = (pair.vanilla.record, pair.fused.record), pair.tables
    machines = [(record.environment or {}).get("cpu", "not recorded") for record in records]
    gpus = [(record.environment or {}).get("gpu") for record in records]
    rows = {
        "captured by": [record.profiler for record in records],
        "on": [f"{gpu}, {cpu}" if gpu else cpu for gpu, cpu in zip(gpus, machines, strict=True)],
        "case": [_case(record.case) for record in records],
        "what being profiled costs": [str(record.tax) if record.tax else "not measured" for record in records],
        "time that has a stage": [f"{table.coverage:.1%} of the {table.clock}'s" for table in tables],
    }
    lines = [f"| | {pair.names[0]} | {pair.names[1]} |", "|---|---|---|"]
    lines += [f"| {row} | {first} | {second} |" for row, (first, second) in rows.items()]
    remarks = [*pair.remarks, *(remark for table in tables for remark in table.remarks)]
    return Markdown("\n".join([*lines, "", *(f"- {remark}" for remark in dict.fromkeys(remarks))]))


def _case(case: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in case.items() if name != "impl")
