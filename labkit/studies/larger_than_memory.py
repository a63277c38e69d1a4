"""The study of a model larger than memory: speed by batch size, overlap of reading and computing, and baselines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal

from labkit.harness.compare.compare import comparison_case
from labkit.harness.compare.disk_sides import ACCELERATE_DISK, HF_DISK, STREAMED
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.compare.side_process import WorkerError
from labkit.harness.comparison import Comparison
from labkit.harness.frozen_record import FrozenRecord, ResultRecord
from labkit.harness.results import OF_LARGER, save_lines, save_or_warn
from labkit.harness.runs import Case
from labkit.harness.streaming.make import plan_streaming, writable_folder
from labkit.harness.streaming.measured import measured_plan
from labkit.harness.streaming.plan import StreamingPlan
from labkit.harness.streaming.records import BatchPoint, MemorySample
from labkit.harness.streaming.spans import hidden_share
from labkit.harness.streaming.table import free_sentence, three_digits
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.statistics import Trust
from labkit.studies.frames import number
from labkit.studies.last import read_study
from labkit.studies.outcome import Notes, Outcome, Study
from labkit.studies.settings import Model, NewTokens, PromptTokens, StudySetting, Threads
from labkit.system.bounds import check_numbers
from labkit.system.comma_list import listed, listed_counts
from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.output_folder import RUNS, check_output_folder
from labkit.system.owned_folder import owned_folder
from labkit.system.partly import Show, so_far, unseen
from labkit.system.progress import Progress, part_of, unheard
from labkit.weights.precision import precision_of

BASELINES = f"{ACCELERATE_DISK}, {HF_DISK}"
PRECISIONS = ("bfloat16", "float32", "int8-32+head", "int4-64+head8")
COMPARED_NEW = 3  # new tokens of each side: a baseline may take seconds per token
REASON = 200  # most characters of the reason why a side was left out
WARM_UP = 2  # new tokens of the untimed run
MEASURED, ALL = 60, 100  # percent of the work: after all batches, at the end


class LeftOut(FrozenRecord):
    """A side that could not be measured, and the reason."""

    side: str
    reason: str


class StreamingStudy(Study, ResultRecord):
    """Result of `study_larger_than_memory`."""

    kind: Literal["streaming_study"] = "streaming_study"
    plan: StreamingPlan  # predicted, with the measured batches as its points
    too_large: tuple[int, ...] = ()  # requested batches that do not fit
    memory: tuple[MemorySample, ...] = ()  # of the engine's process over time
    comparisons: tuple[Comparison, ...] = ()  # of each baseline with the streamed engine, in the same memory
    left_out: tuple[LeftOut, ...] = ()  # baselines that could not be measured

    @property
    def points(self) -> tuple[BatchPoint, ...]:
        return self.plan.points

    @property
    def shown(self) -> BatchPoint:
        """The batch whose timeline is shown: the batch with the most tokens per second."""
        assert self.plan.best_point is not None
        return self.plan.best_point

    @property
    def hidden(self) -> float | None:
        """Overlap of reading and computing in the shown steps, as a share of the shorter of the two."""
        return hidden_share(self.shown.spans)

    @property
    def free_sentence(self) -> str:
        """The predicted number of sequences from which on streaming costs no time, as a sentence."""
        return free_sentence(self.plan)

    @property
    def times_larger(self) -> float:
        """The bytes of the weights / the whole memory budget."""
        return self.plan.footprint.weights / self.plan.memory

    @property
    def hidden_sentence(self) -> str:
        """The overlap in the shown steps, as a sentence; empty if nothing was read."""
        if self.hidden is None:
            return ""
        return f"{self.hidden:.0%} of the shorter of reading and computing is hidden"

    @property
    def notes(self) -> Notes:
        """The result on the points that the notebook asks a reader to notice."""
        quickest, most = self.plan.lowest_latency, self.plan.highest_throughput
        sentences = [
            self.free_sentence,
            f"Predicted: the quickest step, {number(quickest.step_ms)} ms, has {quickest.resident_layers} layers in "
            f"memory; the most tokens per second, {number(most.tokens_per_s)}, come from {most.batch:,} sequences with "
            f"{most.resident_layers} layers in memory.",
        ]
        if self.hidden_sentence:
            sentences.append(f"In the drawn steps of batch {self.shown.batch:,}, {self.hidden_sentence}.")
        if self.too_large:
            batches = ", ".join(f"{batch:,}" for batch in self.too_large)
            sentences.append(f"Not measured, because it does not fit: batch {batches}.")
        sentences += [f"Not measured: `{gap.side}`: {gap.reason}." for gap in self.left_out]
        return Notes(tuple(sentences), tuple(doubt.why for doubt in self.plan.trust.doubts))

    def case(self) -> dict[str, Any]:
        return self.plan.case.columns

    def rows(self) -> list[dict[str, Any]]:
        """A row for each batch, and for each baseline at the batch of its comparison."""
        plan = self.plan
        of_engine = [
            _row(
                "fused-streamed",
                point.batch,
                point.step_ms,
                point.tokens_per_s,
                point.trust(plan.case.threads, plan.environment.cores),
            )
            | {"resident_layers": point.resident_layers, "share_of_disk": point.share_of_disk}
            for point in self.points
        ]
        of_others = [
            _row(side.name, side.case.batch, side.per_token_ms, side.tokens_per_s, trust)
            | {"resident_layers": None, "share_of_disk": None}
            for side, trust in ((comparison.baseline, comparison.trust()) for comparison in self.comparisons)
        ]
        return of_engine + of_others

    @property
    def claim(self) -> str:
        """The speed of the smallest and of the best batch, and the share of the disk's rate."""
        case, first, best = self.plan.case, self.points[0], self.shown
        hidden, share = self.hidden, best.share_of_disk
        streamed = "" if share is None else f"; its steps read at {share:.0%} of the disk's rate"
        overlap = "" if hidden is None else f" and hide {hidden:.0%} of the shorter of reading and computing"
        gains = f"batch {first.batch:,} gives {three_digits(first.tokens_per_s)} tokens/s"
        if best.batch != first.batch:
            gains += f" and batch {best.batch:,} gives {three_digits(best.tokens_per_s)}"
        larger = three_digits(self.times_larger)
        return f"{case.model}, {case.precision}, {larger} times its memory: {gains}{streamed}{overlap}"

    @property
    def headline(self) -> str:
        """The claim, and its grade."""
        return self.plan.trust.graded(self.claim)

    @property
    def outcome(self) -> Outcome:
        return Outcome.graded(self.claim, self.plan.trust, self.plan.environment.machine)


def _row(side: str, batch: int, step_ms: float, tokens_per_s: float, trust: Trust) -> dict[str, Any]:
    return {
        "side": side,
        "batch": batch,
        "step_ms": step_ms,
        "tokens_per_s": tokens_per_s,
        "trustworthy": trust.trustworthy,
    }


def study_larger_than_memory(
    *,
    model: Model = "llama-shape",
    precision: Annotated[
        str, StudySetting("of the weights, as for `labkit evaluate --dtype`", choices=PRECISIONS, check=precision_of)
    ] = "bfloat16",
    memory_gb: Annotated[
        float, StudySetting("GB (10^9 bytes) for weights, slots, caches and workspace together", (0.001, 100_000.0))
    ] = 0.5,
    batches: Annotated[
        str, StudySetting("batch sizes, separated by commas; sizes that do not fit are left out", check=parse_batches)
    ] = "1, 4, 16, 48",
    prompt_tokens: PromptTokens = 16,
    new_tokens: NewTokens = 8,
    baselines: Annotated[str, StudySetting("sides of `labkit compare`, separated by commas; or none")] = BASELINES,
    rounds: Annotated[
        int,
        StudySetting(
            "epochs of each batch (3 or more for an interval), and runs with each baseline (6 or more)", (2, 99)
        ),
    ] = 3,
    path: Annotated[str, StudySetting("a folder on the disk for offloaded layers; empty: a temporary one")] = "",
    threads: Threads = 0,
    slots: int = 3,
    output: str | os.PathLike[str] = RUNS,
    progress: Progress | None = None,
    show: Show = unseen,
) -> StreamingStudy:
    """Measures the streamed engine at each batch size within `memory_gb` GB, in its own process, in epochs of turns
    between which the rates of disk and processor are probed. Then compares it with baselines in the same memory, at the
    first batch size, in rounds of whole generations: limited memory is made cold before each.

    Batch sizes that do not fit and sides that cannot run are left out with the reason. The packed weights stay in a
    given `path`; a temporary folder is in labkit's cache.

    - slots: offloaded layers that are in memory at a time.
    - output: folder for the record, which `load_study` reads.
    - progress: receives the progress.
    - show: receives the study with the parts that are measured so far.

    UserError as from `plan_streaming`, if no batch fits, and if the path does not exist.
    """
    check_numbers(rounds=rounds)
    requested, follow = parse_batches(batches), progress or unheard
    check_output_folder(output)
    with _folder(path) as folder:
        follow(0, ALL, "probing the disk and the processor")
        plan = plan_streaming(
            model, memory_gb=memory_gb, precision=precision, prompt=prompt_tokens, new=new_tokens, slots=slots,
            threads=threads or None, path=folder,
        )  # fmt: skip
        fitting = tuple(batch for batch in requested if batch <= plan.largest_batch)
        if not fitting:
            raise UserError(
                f"got batches = {batches!r} in {memory_gb:g} GB, expected one of at most {plan.largest_batch:,}; allow "
                "more memory, or fewer tokens"
            )
        plan, memory = measured_plan(
            plan, batches=fitting, path=folder, rounds=rounds, progress=part_of(follow, 2, MEASURED, ALL)
        )
        too_large = tuple(batch for batch in requested if batch not in fitting)
        known = {"plan": plan, "too_large": too_large, "memory": memory}
        show(so_far(StreamingStudy, **known))
        comparisons, left_out = _compared(plan, fitting[0], listed(baselines), rounds, folder, follow)
    study = StreamingStudy(**known, comparisons=comparisons, left_out=left_out)
    save_or_warn(study, output, save_study)
    follow(ALL, ALL, "done")
    return study


def parse_batches(text: str) -> tuple[int, ...]:
    """The numbers in "1, 4, 16", each once, in increasing order. UserError for an empty list, and for other text."""
    return listed_counts("batches", text, "numbers of sequences, such as '1, 4, 16'")


def save_study(study: StreamingStudy, folder: str | os.PathLike[str]) -> Path:
    """Writes the study to a new file under `folder`, whole or not at all, and returns its path.

    SaveError as for `save`.
    """
    model = Path(study.plan.case.model).name
    return save_lines(expanded(folder) / f"{study.created:%Y%m%dT%H%M%S%f}-{model}{OF_LARGER}", [study])


def load_study(path: str | os.PathLike[str]) -> StreamingStudy:
    """The study in a file from `save_study`. UserError if the file holds no such record."""
    return read_study(StreamingStudy, path)


def _compared(
    plan: StreamingPlan, batch: int, baselines: Sequence[str], rounds: int, folder: Path, follow: Progress
) -> tuple[tuple[Comparison, ...], tuple[LeftOut, ...]]:
    """Compares each baseline with the streamed engine, in separate rounds: if one cannot run, the others still do.
    `folder` gets the files from which their models are read.
    """
    comparisons, left_out = list[Comparison](), list[LeftOut]()
    for index, name in enumerate(baselines):
        begin, end = (MEASURED + (ALL - MEASURED) * done / len(baselines) for done in (index, index + 1))
        try:
            comparisons.append(_against(plan, batch, name, rounds, folder, part_of(follow, begin, end, ALL)))
        except (UserError, WorkerError) as error:
            reason = shorten(str(error).partition("\n")[0], REASON, placeholder=" …")
            left_out.append(LeftOut(side=name, reason=reason))
    return tuple(comparisons), tuple(left_out)


def _against(plan: StreamingPlan, batch: int, name: str, rounds: int, folder: Path, follow: Progress) -> Comparison:
    case, threads = plan.case, plan.case.threads
    if case.precision not in FLOAT_DTYPES:
        raise UserError(f"baselines compute in {', '.join(FLOAT_DTYPES)}, and the weights here are {case.precision}")
    sides = [SideSpec(name, threads), SideSpec(STREAMED, threads)]
    schedule = Schedule(rounds=rounds, warm_up=WARM_UP, stages=False, scratch=folder)
    return take_turns(sides, compared_case(plan, batch), schedule, progress=follow).comparison(0, 1)


def compared_case(plan: StreamingPlan, batch: int) -> Case:
    """The case of each side of a comparison, within the memory of the plan."""
    case = plan.case
    return comparison_case(
        model=case.model, dtype=case.precision, batch=batch, prompt=case.prompt_tokens, new=COMPARED_NEW,
        threads=case.threads, memory_gb=case.memory_gb,
    )  # fmt: skip


@contextmanager
def _folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    if os.fspath(path):
        folder = expanded(path)
        if not folder.is_dir():
            raise UserError(
                f"got path = {os.fspath(path)!r}, which is no folder; expected a folder on the disk for offloaded "
                "layers, or nothing for a temporary one"
            )
        yield folder
        return
    with owned_folder("study-", writable_folder(None)) as folder:
        yield folder
