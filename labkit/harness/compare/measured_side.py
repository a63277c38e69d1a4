"""One side while it is measured: requests, answers, and the measurement that they result in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from labkit.engine.runners.stage_clock import StageTime
from labkit.harness.compare.installation import PROTOCOL
from labkit.harness.compare.loaded_side import comparison_device
from labkit.harness.compare.plan import Prepared, Schedule, SideSpec
from labkit.harness.compare.side_process import SideProcesses, WorkerError
from labkit.harness.disk import BLOCK, read_rate_gb_s
from labkit.harness.environment import read_environment
from labkit.harness.expert_reads import ExpertReads
from labkit.harness.hosted_work import MatrixNumbers, work_of_matrices
from labkit.harness.records import Measurement
from labkit.harness.roofline import Work, count_work, probe_peak
from labkit.harness.rounds import Turn
from labkit.harness.runs import Run
from labkit.harness.stored_weights import from_plain, name_of
from labkit.harness.timing import Times
from labkit.harness.turns.sharing import SharedBlock
from labkit.harness.turns.turn_streamer import GO_ON
from labkit.kernels.probe import probe_winner
from labkit.system.errors import UserError
from labkit.system.page_cache import make_cold

CHOOSE_ANOTHER = "name another version, closer to the installed one"
STAGES = TypeAdapter(tuple[StageTime, ...])
PROBE_S = 0.2  # of a disk
PATIENCE, LEAST_PATIENCE_S = 20, 60.0  # a side hangs if it takes this many times as long as its load and warm-up
Replies = list[dict[str, Any]]  # of all ranks of a side, by rank


@dataclass(frozen=True)
class ReadFiles:
    """Files of a side, each once, even if it has several names."""

    paths: tuple[Path, ...] = ()

    @classmethod
    def below(cls, folder: str | None) -> ReadFiles:
        """All files below a folder; no files for None."""
        if folder is None:
            return cls()
        files = {path.stat().st_ino: path for path in sorted(Path(folder).rglob("*")) if path.is_file()}
        return cls(tuple(files.values()))

    def make_cold(self) -> int | None:
        """Removes the files from the page cache. Returns their bytes that are still in it; None where the system does
        not report that, or without files.
        """
        cached = [make_cold(path) for path in self.paths]
        known = [size for size in cached if size is not None]
        return sum(known) if known and len(known) == len(cached) else None

    def rate_gb_s(self) -> float | None:
        """The present rate at which the largest file is read past the page cache; None where all are too short."""
        largest = max(self.paths, key=lambda path: path.stat().st_size, default=None)
        if largest is None or largest.stat().st_size < BLOCK:
            return None
        return read_rate_gb_s(largest, PROBE_S)


@dataclass(frozen=True)
class Ran:
    """Result of a run. The last two fields are None for a side that reads no files or has no memory limit."""

    replies: Replies
    cached_mb: float | None  # of its files, in the page cache before the run
    disk_gb_s: tuple[float, float] | None  # rate of the disk before and after the run


class MeasuredSide:
    """A side in processes of its own. `process` must stay open while methods are called."""

    def __init__(
        self, name: str, spec: SideSpec, process: SideProcesses, prepared: Prepared, schedule: Schedule
    ) -> None:
        self.name, self.spec, self.process = name, spec, process
        self._prepared, self._schedule = prepared, schedule
        self._environment = read_environment(spec.cores).model_copy(update=dict(spec.installation.described))
        self._runs: list[Run] = []
        self.tokens: list[Any] = []  # [round, sequence, position]
        self._files = ReadFiles()
        self._peak_bytes: int | None = None  # of the largest rank
        self._peak_limited_bytes: int | None = None  # of all ranks, with files' pages
        self._reading = ""
        self._placed_anew = True
        self.shares = False  # whether it can share weights with another process
        self._peak_gflop_s: list[float] = []
        self._staged: Replies = []
        self._answer: str | None = None

    def load(self, converted: str | None) -> None:
        """Loads the weights within the case's memory limit, and runs once untimed. `converted`: the folder of a side
        that reads files of its own.
        """
        case, schedule = self._prepared.case, self._schedule
        self._prepare()
        if case.memory_gb is not None:
            ReadFiles.below(converted).make_cold()
            self.process.limit_memory(case.memory_gb)
        sampling: dict[str, Any] = {"sample": case.sample} if case.sample else {}  # older versions do not know it
        ranks = self.process.ask(
            "load",
            batch=case.batch,
            prompt=case.prompt_tokens,
            new=case.new_tokens,
            threads=self.spec.threads,
            warm_up=schedule.warm_up,
            converted=converted,
            answer_tokens=schedule.answer_tokens if schedule.question else 0,
            memory_gb=case.memory_gb,
            **sampling,
        )
        if case.memory_gb is not None:
            self._files = ReadFiles.below(converted)  # some sides write files while they load
        self._loaded = ranks[0] | {
            name: max(rank[name] for rank in ranks) for name in ("load_s", "first_run_s", "start_to_ready_s")
        }

    def _prepare(self) -> None:
        """Makes sure that the workers can be talked to, and that they are of this side's version of labkit."""
        installation = self.spec.installation
        try:
            ranks = self.process.ask(
                "prepare",
                name=self.spec.name,
                model=self._prepared.weights,
                dtype=self._prepared.case.dtype,
                seed=self._schedule.seed,
                options=self.spec.options,
            )
        except WorkerError as error:
            if not installation.version:
                raise
            first, *others = str(error).splitlines()
            cause = f"{first} ({others[-1]})" if others else first
            raise WorkerError(f"{self.name} does not understand this labkit: {cause}; {CHOOSE_ANOTHER}") from None
        for rank in ranks:
            if (protocol := rank.get("protocol", PROTOCOL)) != PROTOCOL:
                raise UserError(
                    f"{self.name} speaks protocol {protocol} of comparisons, expected {PROTOCOL}; {CHOOSE_ANOTHER}"
                )
            if self._prepared.case.sample and "samples" not in rank:
                raise UserError(f"{self.name} is a version from before sampling; {CHOOSE_ANOTHER}")
            imported = rank.get("imported", installation.imported)
            if installation.imported and not Path(imported).samefile(installation.imported):
                raise WorkerError(f"{self.name} runs the labkit of {imported}, expected {installation.imported}")
        self.shares = "protocol" in ranks[0] and self.spec.ranks == 1

    def note_peak(self) -> None:
        """Probes the peak rate of this side's processors."""
        weights = from_plain(self._loaded["weights"])
        if (peak := probe_peak(weights, self.spec.cores, comparison_device())) is not None:
            self._peak_gflop_s.append(peak)

    def _ask(self, op: str, **request: Any) -> Replies:
        """The answers to a request that takes no longer than loading and warming up. WorkerError if a rank hangs."""
        before_s = self._loaded["load_s"] + self._loaded["first_run_s"]
        return self.process.ask(op, within_s=max(LEAST_PATIENCE_S, PATIENCE * before_s), **request)

    def run(self, index: int) -> Ran:
        """One timed run with the prompts of this round. With a memory limit, its files are made cold before."""
        cached = self._files.make_cold()
        before = self._files.rate_gb_s()
        replies = self._ask("run", seed=self._schedule.seed + 1 + index)
        after = self._files.rate_gb_s()
        rates = None if before is None or after is None else (before, after)
        return Ran(replies, _megabytes(cached), rates)

    def note(self, turn: Turn[Ran]) -> None:
        """Keeps the result of a run."""
        ran = turn.result
        times = slowest([Times(**reply["times"]) for reply in ran.replies])
        run = Run.of(times, round=turn.round, before=turn.before, after=turn.after)
        reads = ran.replies[0].get("experts")
        experts = None if reads is None else ExpertReads.model_validate(reads)
        of_files = {"cached_mb": ran.cached_mb, "disk_gb_s": ran.disk_gb_s, "experts": experts}
        self._runs.append(run.model_copy(update=of_files))
        self.tokens.append(ran.replies[0]["tokens"])

    @property
    def pauses(self) -> bool:
        """Whether its generations can pause between two tokens."""
        return bool(self._loaded.get("pauses"))

    @property
    def pauses_to_move(self) -> bool:
        """Whether a generation can go on after its weights have moved."""
        return bool(self._loaded.get("pauses_to_move"))

    @property
    def knows_turns(self) -> bool:
        """Whether its labkit knows turns of a few tokens."""
        return "pauses" in self._loaded

    @property
    def weight_mb(self) -> float | None:
        """MB of its matrices; None: the work of this architecture is not counted."""
        return None if self._work is None else self._work.weight_bytes / 1e6

    @cached_property
    def _work(self) -> Work | None:
        """The work of the loaded side, counted once, since every look at the epochs asks for it."""
        config, case = self._prepared.config, self._prepared.case
        weights = from_plain(self._loaded["weights"])
        if config is None:
            if (told := self._loaded.get("matrix_numbers")) is None:
                return None
            numbers = MatrixNumbers.model_validate(told if isinstance(told, dict) else {"dense": told})  # older labkits
            return work_of_matrices(numbers, weights, case.batch, case.prompt_tokens)
        return count_work(config, weights, case.batch, case.prompt_tokens, case.new_tokens)

    def place(self) -> None:
        """Puts the weights into new memory."""
        self._note_placed(self._ask("place"))

    def weight_blocks(self) -> dict[str, Any]:
        """The blocks of its weights, as `Placement.blocks` describes them."""
        return self._ask("weight_blocks")[0]

    def publish(self, blocks: Sequence[SharedBlock]) -> dict[str, Any]:
        """Shares blocks of its weights in new memory; `Placement.publish` describes the answer."""
        return self._note_placed(self._ask("publish", blocks=blocks))

    def adopt(self, pid: int, file: int, blocks: Sequence[SharedBlock]) -> dict[str, Any]:
        """Shares the blocks that the process `pid` has published; `Placement.adopt` describes the answer."""
        return self._note_placed(self._ask("adopt", pid=pid, file=file, blocks=blocks))

    def _note_placed(self, ranks: Replies) -> dict[str, Any]:
        """Keeps whether the weights are in new memory. Returns the answer of the first rank."""
        if "why_not" not in ranks[0]:
            self._placed_anew = self._placed_anew and all(rank["placed"] for rank in ranks)
        return ranks[0]

    def begin(self, seed: int) -> tuple[float, list[list[int]]]:
        """Begins a generation with the prompt of this seed. Returns the milliseconds to the first token, and the tokens
        [step, sequence]. The generation then pauses.
        """
        (first_ms,), tokens = _turn_of(self._ask("begin", seed=seed))
        return first_ms, tokens

    def turn(self, tokens: int) -> tuple[list[float], list[list[int]]]:
        """The next `tokens` steps of the generation: milliseconds of each step, and its tokens [step, sequence].
        WorkerError where the generation ends before.
        """
        steps_ms, new_tokens = _turn_of(self._ask(GO_ON, tokens=tokens))
        if len(steps_ms) != tokens:
            raise WorkerError(f"{self.name} ended its generation after {len(steps_ms)} of {tokens} tokens of a turn")
        return steps_ms, new_tokens

    def note_epochs(self, runs: list[Run], tokens: list[Any]) -> None:
        """Keeps these epochs, instead of all before. `tokens`: [sequence, position] of each of their generations."""
        self._runs, self.tokens = runs, tokens

    def note_memory(self) -> None:
        """Asks for the peak memory of the largest rank."""
        self._peak_bytes = max(rank["bytes"] for rank in self.process.ask("peak_memory"))
        if self.process.budget is not None:
            self._peak_limited_bytes = self.process.budget.peak_bytes

    def note_reading(self) -> None:
        """Asks how the side reads its weights by now."""
        self._reading = str(self.process.ask("reading")[0]["reading"])

    def note_stages(self) -> None:
        """Runs once more to time the stages."""
        self._staged = self.process.ask("stages", seed=self._schedule.seed)

    def note_answer(self) -> None:
        """Asks for an answer to the schedule's question."""
        request: dict[str, Any] = {"question": self._schedule.question, "new": self._schedule.answer_tokens}
        self._answer = self.process.ask("answer", **request)[0]["text"]

    def measurement(self, others_cores: Sequence[float | None]) -> Measurement:
        """The measurement so far. `others_cores`: processors that other programs kept busy, by round."""
        case, spec, loaded = self._prepared.case, self.spec, dict(self._loaded)
        ranks = {"threads": spec.threads, "tp": spec.tp, "pp": spec.pp}
        weights = from_plain(loaded.pop("weights"))
        loaded = {name: value for name, value in loaded.items() if name in Measurement.model_fields}
        staged_ms = self._staged[0]["times"] if self._staged else None
        stage_run = None if staged_ms is None else Run.of(Times(**staged_ms), round=0, before=None, after=None)
        stages = [STAGES.validate_python(rank["stages"]) for rank in self._staged]
        return Measurement(
            name=self.name,
            case=case.model_copy(update=ranks | {"schedule": spec.schedule if spec.pp > 1 else ""}),
            environment=self._environment,
            work=self._work,
            runs=tuple(run.model_copy(update={"others_cores": others_cores[run.round]}) for run in self._runs),
            weights=name_of(weights),
            placed_anew=self._placed_anew and any(run.turns for run in self._runs),
            reading=self._reading,
            peak_gflop_s=max(self._peak_gflop_s, default=None),
            probe="" if self._environment.gpu else probe_winner(self.spec.cores),
            peak_rss_mb=_megabytes(self._peak_bytes),
            memory_limit="" if self.process.budget is None else self.process.budget.how,
            peak_limited_mb=_megabytes(self._peak_limited_bytes),
            stages=stages[0] if stages else (),
            rank_stages=tuple(stages) if spec.ranks > 1 and any(stages) else (),
            question=self._schedule.question,
            answer=self._answer,
            stage_run=stage_run,
            **loaded,
        )


def _turn_of(replies: Replies) -> tuple[list[float], list[list[int]]]:
    """The times of a turn, which are the slowest rank's in each step, and its tokens."""
    steps = zip(*(reply["steps_ms"] for reply in replies), strict=True)
    return [max(step) for step in steps], replies[0]["tokens"]


def slowest(ranks: Sequence[Times]) -> Times:
    """The times of one generation on several ranks: at each token the time of the slowest rank."""
    steps = zip(*(times.decode_ms for times in ranks), strict=True)
    return Times(
        ttft_ms=max(times.ttft_ms for times in ranks),
        decode_ms=tuple(max(step) for step in steps),
        end_to_end_ms=max(times.end_to_end_ms for times in ranks),
    )


def _megabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e6
