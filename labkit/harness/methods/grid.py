"""The cells of all methods and batch sizes as a table like the articles', and the articles' own table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.harness.methods.cell import MethodCell
from labkit.harness.records import Measurement
from labkit.published import NOT_MEASURED_HERE, published
from labkit.statistics import Trust
from labkit.statistics.sequential import PROCESS_LUCK
from labkit.system.result_table import ResultTable, Tabular, frame_of

if TYPE_CHECKING:
    import pandas as pd

OOM, NONE = "oom", "–"
FEW = 3  # methods that a title names
DOUBTED = " ?"  # follows a figure that is not trustworthy
AT_BATCH = "method, at batch"
LARGE, SMALL = "bloom176b-8xa100", "bloom7b1-8xa6000"  # of the published tables
UNITS = (
    "ms a token: time of the whole call, prompts included / new tokens of all sequences, with its 95% interval; the "
    "articles' time per token",
    "ms a step: time of the whole call / new tokens of one sequence",
    "of the limit: the least time of a decode step at the memory's read rate next to it / the time of the step",
    "peak memory: the most RAM that a process of the method used beyond its imports, with files that it maps",
)


@dataclass(frozen=True, repr=False)
class MethodGrid(Tabular):
    """Cells in the order of methods and batch sizes, all of the same model and lengths."""

    cells: tuple[MethodCell, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.method for cell in self.cells))

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({cell.case.batch for cell in self.cells}))

    def table(self) -> ResultTable:
        """Milliseconds a token, a row for each method and a column for each batch size, as in the articles."""
        cells = {cell.place: cell for cell in self.cells}
        first, dropped = self.cells[0], sum(cell.dropped_pairs for cell in self.cells)
        case, memory_gb = first.case, first.case.memory_gb
        limit = (
            "no limit of memory"
            if memory_gb is None
            else f"{memory_gb:g} GB of memory for each method beyond its imports"
        )
        rows = tuple(
            (method, *(_figure(cells.get((method, batch))) for batch in self.batches)) for method in self.methods
        )
        return ResultTable(
            title=f"ms a token: {case.model}, {case.dtype}, {case.prompt_tokens} + {case.new_tokens} tokens",
            columns=(AT_BATCH, *map(str, self.batches)),
            rows=rows,
            notes=(
                UNITS[0],
                *self._ways(),
                f"{limit}; {case.threads} threads",
                *self._reasons(),
                *self._doubts(),
                *([f"{dropped} pairs of turns were dropped, because the machine slept meanwhile"] if dropped else []),
                f"weights: {case.origin}",
                f"machine: {first.environment.machine}",
            ),
            styles={OOM: "red"},
        )

    def details(self) -> ResultTable:
        """All figures of the measured cells."""
        rows = []
        for cell in self.cells:
            if (measured := cell.measured) is not None:
                numbers = (
                    (cell.step_ms, ".2f"),
                    (cell.token_ms, ".2f"),
                    (cell.tokens_per_s, ".1f"),
                    (measured.floor_share, ".0%"),
                    (measured.start_to_ready_s, ".1f"),
                    (measured.peak_rss_mb, ",.0f"),
                )
                rows.append((cell.method, str(cell.case.batch), *(_number(value, form) for value, form in numbers)))
        limits = sorted({cell.measured.memory_limit for cell in self.cells if cell.measured} - {""})
        return ResultTable(
            title="All figures",
            columns=(
                *("method", "batch", "ms a step", "ms a token", "tokens / s"),
                *("of the limit", "s to ready", "peak memory, MB"),
            ),
            rows=tuple(rows),
            notes=(
                *UNITS[1:],
                *(f"memory was limited by {limit}" for limit in limits),
                *(f"{method}: {impl}" for method, impl in self._impls().items()),
            ),
            names=1,
        )

    def published(self) -> ResultTable:
        """The articles' table of the same BLOOM; for other models that of the large BLOOM."""
        return published_table(SMALL if "7b1" in self.cells[0].case.model else LARGE)

    def to_frame(self) -> pd.DataFrame:
        """A row for each cell."""
        return frame_of([cell.as_dict() for cell in self.cells])

    def page(self) -> str:
        """All tables as a page of Markdown."""
        tables = (table.markdown() for table in self.tables())
        count = len(self.methods)
        which = ", ".join(self.methods) if count <= FEW else f"{count} methods"
        return "\n".join((f"# Ways to run {self.cells[0].case.model}: {which}\n", *tables))

    def tables(self) -> tuple[ResultTable, ...]:
        """The articles' figure, all figures, and the articles' own table."""
        return self.table(), self.details(), self.published()

    def _ways(self) -> list[str]:
        """How the cells were measured: each way once, with its cells where there are several ways."""
        ways: dict[str, list[str]] = {}
        for cell in self.cells:
            if cell.measured is not None:
                ways.setdefault(_way(cell, cell.measured), []).append(_name(cell))
        return [f"{way} ({'; '.join(cells)})" if len(ways) > 1 else way for way, cells in ways.items()]

    def _reasons(self) -> list[str]:
        """Why cells have no figures: each reason once, with its batch sizes."""
        places: dict[tuple[str, str], list[str]] = {}
        for cell in self.cells:
            if cell.why:
                places.setdefault((cell.method, cell.why), []).append(str(cell.case.batch))
        return [f"{method}, batch {', '.join(batches)}: {why}" for (method, why), batches in places.items()]

    def _doubts(self) -> list[str]:
        """Why figures are not trustworthy: each reason once, with its cells, and the remedy."""
        places: dict[str, list[str]] = {}
        doubts = tuple(doubt for cell in self.cells for doubt in cell.trust.doubts)
        for cell in self.cells:
            if cell.trust.doubts:
                places.setdefault(cell.trust.why, []).append(_name(cell))
        lines = [f"?: not trustworthy: {why} ({'; '.join(cells)})" for why, cells in places.items()]
        return [*lines, f"to mend it: {Trust(doubts).remedy}"] if lines else []

    def _impls(self) -> dict[str, str]:
        return {cell.method: cell.measured.impl for cell in self.cells if cell.measured is not None}


def published_table(name: str) -> ResultTable:
    """A table of milliseconds a token that the articles published, labelled as such."""
    frame = published(name)
    frame = frame[frame["metric"] == "latency_per_token"]
    batches = sorted(frame["batch"].dropna().unique())
    rows = []
    for (method, precision), group in frame.groupby(["method", "precision"], sort=False):
        values = dict(zip(group["batch"], group["value"], strict=True))
        cells = (NONE if batch not in values else _published_figure(values[batch]) for batch in batches)
        rows.append((f"{method} {precision}", *cells))
    first = frame.iloc[0]
    return ResultTable(
        title=f"ms a token: {first['model']} on {first['gpus']} x {first['hardware']}, {NOT_MEASURED_HERE}",
        columns=(AT_BATCH, *map(str, batches)),
        rows=tuple(rows),
        notes=(f"source: {first['source']}, {first['reference']}",),
        styles={OOM: "red"},
    )


def _name(cell: MethodCell) -> str:
    return f"{cell.method}, batch {cell.case.batch}"


def _way(cell: MethodCell, measured: Measurement) -> str:
    """How a cell was measured."""
    count = len(measured.runs)
    cycles = f"{count} {cell.unit}{'' if count == 1 else 's'}"
    if cell.unit == "round":
        why = f": {cell.why_rounds}" if cell.why_rounds else ""
        return f"{cycles} of whole calls, their median{why}"
    place = (
        "with new memory for the weights between two"
        if measured.placed_anew
        else f"with the weights in one place, so that another process may differ by {PROCESS_LUCK:.0%}"
    )
    return f"{cycles} of turns of a few tokens, {place}: first token + (new tokens - 1) x time per token"


def _figure(cell: MethodCell | None) -> str:
    if cell is None or cell.refused:
        return NONE
    if cell.measured is None or cell.interval is None or cell.token_ms is None:
        return OOM
    low, high = (cell.token_ms * end for end in (cell.interval.low, cell.interval.high))
    figure = f"{cell.token_ms:.2f}" if len(cell.measured.runs) < 2 else f"{cell.token_ms:.2f} [{low:.2f}, {high:.2f}]"
    return figure if cell.trust.trustworthy else figure + DOUBTED


def _published_figure(value: float) -> str:
    return OOM if value != value else f"{value:g}"  # the sources' missing figures ran out of memory


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"
