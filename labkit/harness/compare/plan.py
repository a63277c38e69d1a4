"""Plan of a comparison: its sides, its case and its schedule, checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from labkit.engine.runners.pipeline.schedules import SCHEDULES
from labkit.harness.compare.installation import INSTALLED, Installation
from labkit.harness.compare.loaded_side import comparison_device
from labkit.harness.compare.loader import check_side, loader_of
from labkit.harness.compare.sides import SIDES, side_row
from labkit.harness.runs import Case
from labkit.models.config import ModelConfig
from labkit.models.dtypes import FLOAT_DTYPES, dtype_of
from labkit.models.policies import known_policy, model_config_of
from labkit.models.shards import shard
from labkit.statistics.sequential import Rule
from labkit.system.bounds import check_number, check_numbers
from labkit.system.errors import UserError
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

QUEUE = "queue"
ON_RANKS = re.compile(
    rf"(?P<name>.+?)(-pp(?P<pp>[1-9]\d*)(-(?P<schedule>{'|'.join(SCHEDULES)}))?)?(-tp(?P<tp>[1-9]\d*))?(-ep(?P<ep>[1-9]\d*))?"
)


@dataclass(frozen=True)
class SideSpec:
    """A side of a comparison and its ranks."""

    name: str  # in the table of sides
    threads: int  # of each rank
    tp: int = 1  # ranks of each stage
    pp: int = 1  # stages
    schedule: str = QUEUE  # of several stages
    ep: int = 1  # parts of the experts, on the ranks of a stage
    installation: Installation = INSTALLED  # the labkit that computes it

    @classmethod
    def named(cls, label: str, threads: int) -> Self:
        """The side with this label, such as "fused", "fused-tp2", "fused-pp2-naive" or "fused-ep2", with `threads` in
        all. "fused-ep2" stands for "fused-tp2-ep2".
        """
        match = ON_RANKS.fullmatch(label)
        if match is None:
            return cls(label, threads)
        ep, pp = int(match["ep"] or 1), int(match["pp"] or 1)
        tp = int(match["tp"] or ep)
        return cls(match["name"], max(1, threads // (tp * pp)), tp, pp, match["schedule"] or QUEUE, ep)

    @property
    def label(self) -> str:
        schedule = "" if self.schedule == QUEUE else f"-{self.schedule}"
        stages = "" if self.pp == 1 else f"-pp{self.pp}{schedule}"
        ranks = "" if self.tp in (1, self.ep) else f"-tp{self.tp}"
        experts = "" if self.ep == 1 else f"-ep{self.ep}"
        version = self.installation.version and f" at {self.installation.version}"
        return f"{self.name}{stages}{ranks}{experts}{version}"

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def options(self) -> dict[str, Any]:
        """Options of `init_inference` that divide the model."""
        options: dict[str, Any] = {} if self.tp == 1 else {"tensor_parallel": {"tp_size": self.tp}}
        if self.pp > 1:
            options["pipeline_parallel"] = {"pp_size": self.pp, "schedule": self.schedule}
        if self.ep > 1:
            options["moe"] = {"ep_size": self.ep}
        return options

    @property
    def cores(self) -> int:
        """The processors that the threads of all ranks keep busy."""
        return self.threads * self.ranks


@dataclass(frozen=True)
class Schedule:
    """How often and in which order the sides of a case run.

    rounds: epochs, or runs of each side where the sides cannot take turns of a few tokens. With a `budget_s` they are
    the minimum, and more are added until the comparison is decided or `budget_s` seconds have passed since the first
    one began. None: as many as the first look at the comparison needs.
    precision: how narrow the interval of the ratio has to be, upper end / lower end - 1; None: a verdict is enough.
    turns: whether sides that can pause take turns of a few tokens, in epochs; else whole generations take turns.
    whole: an epoch of turns ends with the end of a generation, so that it has steps at every length of the context;
    else it ends after some pairs or seconds.
    seed: of random weights, prompts and the order of the runs.
    warm_up: new tokens of the first, untimed run; None: as many as in a timed run, which hf-compile and hf-graph need.
    stages: whether each side runs once more to time its stages.
    wait_quiet_s: wait at most this long until other programs leave the processors alone; None: do not wait.
    scratch: a folder in which the files of sides that read their own stay for later calls; None: they are temporary.
    question: each side answers it once after the timed runs, in at most `answer_tokens`, if the model was trained for
    conversations; empty: no question.
    """

    rounds: int | None = 7
    budget_s: float | None = None
    precision: float | None = None
    turns: bool = True
    whole: bool = False
    seed: int = 0
    warm_up: int | None = None
    stages: bool = True
    wait_quiet_s: float | None = None
    scratch: Path | None = None
    question: str = ""
    answer_tokens: int = 64

    def numbered(self, unit: str, number: int, rule: Rule) -> str:
        """What is being measured: "epoch 3 of 6", or "epoch 3" where a budget decides how many there will be."""
        return f"{unit} {number}" + ("" if self.budget_s else f" of {self.least(rule)}")

    def least(self, rule: Rule) -> int:
        """The fewest rounds or epochs, after which the verdict of a comparison with a budget is first checked."""
        if self.budget_s is None:
            return self.rounds or rule.first_look
        return max(self.rounds or 0, rule.first_look)


@dataclass(frozen=True)
class Prepared:
    """A case whose model has been resolved."""

    case: Case
    source: ModelSource
    config: ModelConfig | None  # None: the architecture has no row, and transformers runs it, alone or with hooks

    @property
    def weights(self) -> str:
        """Name or folder of the weights. It is decided once, so all sides load the same weights."""
        return self.case.model if self.source.gguf else str(self.source.folder or self.case.model)


def prepare(sides: Sequence[SideSpec], case: Case, schedule: Schedule) -> Prepared:
    """The case with its model and the origin of its weights. UserError for an impossible side, size or dtype."""
    _check_case(case, schedule)
    check_sides(sides, case)
    take_any = all(side_row(side.name).models == "any" for side in sides)
    source = resolve(case.model, seed=schedule.seed, any_architecture=take_any)
    has_row = not take_any or known_policy(source.hf_config) is not None
    config = model_config_of(source.hf_config) if has_row else None
    for side in sides:
        if config is None and side.tp * side.pp > 1:
            kind = type(source.hf_config).__name__.removesuffix("Config")
            raise UserError(f"{side.label} divides the model, which needs a row, and {kind} has none; use one process")
        if config is not None:
            shard(config, side.tp, ep_size=side.ep)  # UserError where the model has too few heads, or no experts
            if side.pp > config.num_layers:
                raise UserError(f"got pp={side.pp} for {config.num_layers} layers, expected at most one stage for each")
        loader_of(side.name).check_model(side.name, source)
    if config is not None:
        check_positions(config, case.prompt_tokens, case.new_tokens)
    return Prepared(case.model_copy(update={"origin": source.origin}), source, config)


def labels(sides: Sequence[SideSpec]) -> list[str]:
    """Labels of the sides. Sides that differ only in their number of threads also state it."""
    texts = []
    for side in sides:
        thread_counts = {spec.threads for spec in sides if spec.label == side.label}
        threads = f", {side.threads} thread{'s' if side.threads > 1 else ''}"
        texts.append(side.label + (threads if len(thread_counts) > 1 else ""))
    return texts


def check_positions(config: ModelConfig, prompt: int, new: int) -> None:
    """UserError when `new` tokens after `prompt` tokens need more positions than the model has."""
    if config.max_positions is not None and prompt + new > config.max_positions:
        raise UserError(
            f"a prompt of {prompt} and {new} new tokens need {prompt + new} positions, {config.architecture} has "
            f"{config.max_positions}; use a shorter prompt or fewer new tokens"
        )


def check_schedule(schedule: Schedule) -> None:
    """UserError for a number that no measurement can have, and for fewer rounds than an interval needs."""
    if schedule.rounds is not None:
        check_number("rounds", schedule.rounds, least=2, why="an interval needs two")
    check_numbers(budget_s=schedule.budget_s, wait_quiet_s=schedule.wait_quiet_s, precision=schedule.precision)


def check_sides(sides: Sequence[SideSpec], case: Case) -> None:
    """UserError for a side that does not exist, or cannot run the case."""
    for side in sides:
        _check_side(side, case)


def _check_case(case: Case, schedule: Schedule) -> None:
    dtype_of(case.dtype, FLOAT_DTYPES)
    check_numbers(batch=case.batch, prompt=case.prompt_tokens, seed=schedule.seed)
    check_number("new", case.new_tokens, least=2, why="a decode step follows the first token")
    check_schedule(schedule)
    check_numbers(memory_gb=case.memory_gb)
    if case.memory_gb is not None and (device := comparison_device()).type != "cpu":
        raise UserError(
            f"got memory_gb = {case.memory_gb} on {device}: only the CPU's memory can be limited; leave it out"
        )


def _check_side(side: SideSpec, case: Case) -> None:
    check_side(side.name, dtype=case.dtype, batch=case.batch)
    check_numbers(threads=side.threads, tp=side.tp, pp=side.pp)
    if side.schedule not in SCHEDULES:
        raise UserError(f"got schedule = {side.schedule!r}, expected one of {', '.join(SCHEDULES)}")
    row = side_row(side.name)
    if case.sample and not row.samples:
        able = ", ".join(name for name, known in SIDES.items() if known.samples)
        raise UserError(f"got sample and the side {side.name!r}, which is greedy; expected sides that sample: {able}")
    staged = row.weights == "stages"
    if staged and (side.pp == 1 or side.tp > 1):
        raise UserError(
            f"got {side.name} with pp={side.pp} and tp={side.tp}; it runs only on stages: pass pp=2 or more and tp=1"
        )
    if side.ranks == 1:
        return
    if not staged and not row.divisible:
        divisible = ", ".join(name for name, known in SIDES.items() if known.divisible)
        option = f"tp={side.tp}" if side.pp == 1 else f"pp={side.pp}"
        raise UserError(f"got {option} and the side {side.name!r}; expected a side that can be cut: {divisible}")
    if (device := comparison_device()).type != "cpu":
        raise UserError(
            f"got {side.label} on {device}: the ranks of a comparison share one GPU; start them with torchrun"
        )
