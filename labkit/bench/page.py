"""Shared parts of all benches: consoles, options, names of files, and parts of pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape

from labkit.bench.bars import NOT_TRUSTED, BarCheck
from labkit.harness.compare.peers.llama_cpp import LLAMA_CPP
from labkit.harness.compare.peers.table import PEERS
from labkit.harness.comparison import Comparison
from labkit.harness.environment import Environment
from labkit.harness.frozen_record import FrozenRecord
from labkit.harness.results import load_records
from labkit.kernels.tuned import slug
from labkit.system.markdown import markdown_table as markdown_table
from labkit.system.output_folder import check_output_folder
from labkit.system.progress import Progress, progress_bar
from labkit.system.whole_file import write_whole

Kept = TypeVar("Kept", bound=FrozenRecord)

NONE = "–"
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Quick = Annotated[
    bool, typer.Option("--quick", help="Few tokens, epochs and rounds: tests that it works, not its speed.")
]
EpochCount = Annotated[int, typer.Option("--rounds", min=2, help="Epochs of turns of a few tokens.")]
Output = Annotated[Path | None, typer.Option(help="Folder; profiles, or runs with --quick.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; by default one per core.")]


def way_of(comparisons: Sequence[Comparison]) -> str:
    """How the sides of comparisons were measured beside each other, in words."""
    counts = sorted({comparison.rounds for comparison in comparisons})
    count = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if all(comparison.in_epochs for comparison in comparisons):
        places = _places_of_weights(comparisons)
        return f"{count} epochs of turns of a few tokens in random order, each with the weights in {places}"
    return f"{count} rounds with one run of every side in random order"


def _places_of_weights(comparisons: Sequence[Comparison]) -> str:
    """Words for the memory in which each epoch had its weights."""
    stayed = sum(not comparison.placed_anew for comparison in comparisons)
    if not stayed:
        return "new memory"
    if stayed == len(comparisons):
        return "the same memory as all others"
    return f"new memory, except in {stayed} of {len(comparisons)} comparisons"


def stop_if_interrupted(comparisons: Sequence[Comparison]) -> None:
    """Raises KeyboardInterrupt if the user ended the measurement, which then has a result with fewer epochs."""
    if any(comparison.interrupted for comparison in comparisons):
        raise KeyboardInterrupt


@dataclass(frozen=True)
class BenchFiles:
    """The files of a bench: its records as JSON lines, and the page about them."""

    records: Path

    @classmethod
    def of(cls, machine: str, subject: str = "", *, quick: bool = False, output: Path | None = None) -> BenchFiles:
        """Files named after machine, day and subject, in the folder `output` (None: runs if `quick`, else profiles).

        The folder is made if needed. UserError if it is not writable.
        """
        parts = (machine, f"{datetime.now(UTC):%Y-%m-%d}", "quick" if quick else "", subject)
        folder = check_output_folder(output or Path("runs" if quick else "profiles"))
        return cls(folder / f"{'-'.join(filter(None, parts))}.jsonl")

    @property
    def page(self) -> Path:
        return self.records.with_suffix(".md")

    def kept(self, kind: type[Kept]) -> list[Kept]:
        """The records of this kind that an earlier run wrote."""
        records = load_records(self.records) if self.records.exists() else []
        return [record for record in records if isinstance(record, kind)]

    def write(self, records: Iterable[BaseModel], page: str) -> None:
        """Writes both files, each whole or not at all."""
        write_whole(self.records, "".join(record.model_dump_json() + "\n" for record in records))
        write_whole(self.page, page)

    def finish(self, records: Iterable[BaseModel], page: str, checks: Iterable[BarCheck] = ()) -> None:
        """Writes both files, and prints a line for each bar and the path of the page."""
        self.write(records, page)
        print_checks(checks)
        self.name_page()

    def name_page(self) -> None:
        """Prints the path of the page."""
        out.print(str(self.page), soft_wrap=True)


def machine_of(environment: Environment) -> str:
    """The name of the GPU, or of the processor if there is no GPU, in the form of file names."""
    kind, name = ("gpu", environment.gpu) if environment.gpu else ("cpu", environment.cpu)
    return f"{kind}-{slug(name)}"


@contextmanager
def followed(prefix: str) -> Iterator[Progress]:
    """A progress bar whose labels begin with `prefix`."""
    with progress_bar(err) as follow:
        yield lambda done, total, label: follow(done, total, f"{prefix}: {label}")


def llama_cpp_is_missing() -> bool:
    """Whether llama.cpp cannot be a side on this machine. A note says why."""
    missing = PEERS[LLAMA_CPP].unavailable()
    if missing:
        err.print(f"note: without llama.cpp: {escape(missing)}", style="yellow")
    return missing is not None


def print_checks(checks: Iterable[BarCheck]) -> None:
    """Prints a line for each bar."""
    for check in checks:
        out.print(f"{check.what}: {check.figure} ({check})", soft_wrap=True)


def page_of(title: str, *blocks: str) -> str:
    """A Markdown page of these blocks. Empty blocks are left out."""
    return "\n\n".join(block for block in (f"# {title}", *blocks) if block) + "\n"


def verdict(judged: Sequence[tuple[str, BarCheck]], covered: str = "") -> str:
    """The number of bars that are met, and a line for each missed bar with the name of its case.

    `covered` is added to the first sentence.
    """
    missed = [f"- {case}, {check.what}: {check.figure} ({check})" for case, check in judged if not check.met]
    first = f"**{len(judged) - len(missed)} of {len(judged)} bars met**{covered}." + (" Missed:" if missed else "")
    return "\n\n".join([first, "\n".join(missed)] if missed else [first])


def checks_table(checks: Iterable[BarCheck]) -> str:
    """A table of the bars of one case."""
    return markdown_table(("bar", "measured", ""), ((check.what, check.figure, str(check)) for check in checks))


def ratio_cell(comparison: Comparison, metric: str) -> str:
    """The ratio of a metric with its interval, marked if it is not trustworthy."""
    return f"{comparison.ratio(metric)}{'' if comparison.trust(metric).trustworthy else NOT_TRUSTED}"


def cell(value: float | None, form: str) -> str:
    """A figure in this format, or a dash for None."""
    return NONE if value is None else form.format(value)
