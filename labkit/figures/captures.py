"""What two captures recorded, and how far they can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.display import Markdown

from labkit.system.markdown import as_text, markdown_table

if TYPE_CHECKING:
    from labkit.studies.traces import CapturePair


WORDS = {  # for the fields of a capture's case; the side is the head of its column
    "impl": "", "model": "{}", "dtype": "{}", "prompt": "a prompt of {} tokens", "new": "{} new tokens",
    "threads": "{} threads", "tp": "{} ranks",
}  # fmt: skip


def captures_table(pair: CapturePair) -> Markdown:
    """A column for each side: the profiler, the run, the cost of being profiled, the share of the time with a stage."""
    records, tables = (pair.vanilla.record, pair.fused.record), pair.tables
    machines = [(record.environment or {}).get("cpu", "not recorded") for record in records]
    gpus = [(record.environment or {}).get("gpu") for record in records]
    rows = {
        "captured by": [record.profiler for record in records],
        "on": [f"{gpu}, {cpu}" if gpu else cpu for gpu, cpu in zip(gpus, machines, strict=True)],
        "case": [_case(record.case) for record in records],
        "other programs took": [_taken(record.taken_cores) for record in records],
        "cost of profiling": [str(record.tax) if record.tax else "not measured" for record in records],
        "time that has a stage": [f"{table.coverage:.1%} of the {table.clock}'s" for table in tables],
    }
    cells = [[as_text(cell) for cell in ("", *pair.names)]]
    cells += [[row, *map(as_text, both)] for row, both in rows.items()]
    graded = [] if pair.trust.trustworthy else [pair.trust.sentence]
    remarks = [*graded, *pair.remarks, *(remark for table in tables for remark in table.remarks)]
    return Markdown(
        "\n".join([markdown_table(cells[0], cells[1:]), "", *(f"- {as_text(line)}" for line in dict.fromkeys(remarks))])
    )


def _taken(cores: float | None) -> str:
    return "not recorded" if cores is None else f"{cores:.1f} of the processors"


def _case(case: dict[str, object]) -> str:
    """The run in words. A field that WORDS lacks keeps its name, with blanks for underscores."""
    phrases = (
        WORDS[name].format(value) if name in WORDS else f"{name.replace('_', ' ')} {value}"
        for name, value in case.items()
    )
    return ", ".join(phrase for phrase in phrases if phrase)
