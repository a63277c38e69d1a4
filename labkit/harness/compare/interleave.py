"""`compare`: sides, each in a fresh process, run the same case in turns.

A shared machine drifts within seconds, so what is compared must run side by side: a round is one run of each side in
random order, and each run has the read bandwidth probed just before and just after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from labkit.engine.runners.stage_clock import StageTime
from labkit.harness.compare import peers
from labkit.harness.compare.baselines import check_baseline, comparison_device
from labkit.harness.compare.sides import Side
from labkit.harness.environment import read_environment
from labkit.harness.records import Case, Comparison, Measurement, Run
from labkit.harness.results import save
from labkit.harness.roofline import count_work, probe_bandwidth
from labkit.harness.timing import Times
from labkit.models.config import ModelConfig
from labkit.models.dtypes import FLOAT_DTYPES, dtype_of
from labkit.models.policies import model_config_of
from labkit.models.shards import shard
from labkit.system.errors import UserError
from labkit.weights.resolve import resolve

STAGES = TypeAdapter(tuple[StageTime, ...])
Progress = Callable[[int, int, str], None]  # steps done, steps in all, what runs now


@dataclass(frozen=True)
class SideSpec:
    """Who takes part: a name of `labkit.harness.compare.baselines`, on as many ranks, each with its own `threads`."""

    name: str
    threads: int
    ranks: int = 1

    @property
    def label(self) -> str:
        return self.name if self.ranks == 1 else f"{self.name}-tp{self.ranks}"

    @property
    def cores(self) -> int:
        """That it computes on."""
        return self.threads * self.ranks


@dataclass(frozen=True)
class Turns:
    """What `take_turns` found: `sides` in their order, and the tokens [round, sequence, position] of each."""

    sides: tuple[Measurement, ...]
    tokens: tuple[list[Any], ...]

    def comparison(self, baseline: int, candidate: int) -> Comparison:
        """Two of the sides, by their places."""
        difference = first_difference(self.tokens[baseline], self.tokens[candidate])
        return Comparison(
            baseline=self.sides[baseline],
            candidate=self.sides[candidate],
            tokens_equal=difference is None,
            first_difference=difference,
        )


def labels(sides: Sequence[SideSpec]) -> list[str]:
    """What the sides are called; those that differ in nothing but threads say how many."""
    found = []
    for side in sides:
        alike = {other.threads for other in sides if other.label == side.label}
        threads = f", {side.threads} thread{'s' if side.threads > 1 else ''}"
        found.append(side.label + (threads if len(alike) > 1 else ""))
    return found


def compare(
    baseline: str = "hf-eager",
    candidate: str = "fused",
    *,
    model: str,
    dtype: str = "float32",
    batch: int = 1,
    prompt: int = 128,
    new: int = 128,
    threads: int | None = None,
    tp: int = 1,
    rounds: int = 7,
    seed: int = 0,
    output: str | os.PathLike[str] | None = "runs",
    progress: Progress | None = None,
) -> Comparison:
    """Measure `candidate` against `baseline`, names of `labkit.harness.compare.baselines`, on the model called `model`.

    Both generate `new` greedy tokens (no end-of-text before) for the same `batch` random prompts of `prompt` tokens,
    new ones each round, on the current GPU, else on `threads` threads (None: as many as torch would use). The record is
    also written under the folder `output`, at the end and whole; None: not written.

    tp: the candidate, a fused one, is cut for as many ranks of `threads` threads each (None: the cores shared out);
    the baseline has `threads` threads in all, so that `limit_ratio` says what the memory allows them to gain.

    ValueError: a name, size or dtype that cannot be. WorkerError: a side's process failed.
    """
    (comparison,) = compare_with_each(
        (baseline,),
        candidate,
        model=model,
        dtype=dtype,
        batch=batch,
        prompt=prompt,
        new=new,
        threads=threads,
        tp=tp,
        rounds=rounds,
        seed=seed,
        output=output,
        progress=progress,
    )
    return comparison


def compare_with_each(
    baselines: Sequence[str],
    candidate: str = "fused",
    *,
    model: str,
    dtype: str = "float32",
    batch: int = 1,
    prompt: int = 128,
    new: int = 128,
    threads: int | None = None,
    tp: int = 1,
    rounds: int = 7,
    seed: int = 0,
    warm_up: int | None = None,
    stages: bool = True,
    output: str | os.PathLike[str] | None = "runs",
    progress: Progress | None = None,
) -> tuple[Comparison, ...]:
    """`compare` the candidate with several baselines, "llama.cpp" too, all of them in the same rounds.

    `warm_up`: new tokens of the first run, which is not timed; None: `new`, which hf-compile and hf-graph need.
    `stages`: whether each side runs once more with its stages told apart.
    """
    threads = max(1, torch.get_num_threads() // max(1, tp)) if threads is None else threads
    sides = [SideSpec(name, threads) for name in baselines] + [SideSpec(candidate, threads, tp)]
    turns = take_turns(
        sides,
        model=model,
        dtype=dtype,
        batch=batch,
        prompt=prompt,
        new=new,
        rounds=rounds,
        seed=seed,
        warm_up=warm_up,
        stages=stages,
        output=output,
        progress=progress,
    )
    comparisons = tuple(turns.comparison(which, -1) for which in range(len(baselines)))
    if output is not None:
        for comparison in comparisons:
            save(comparison, output)
    return comparisons


def take_turns(
    sides: Sequence[SideSpec],
    *,
    model: str,
    dtype: str = "float32",
    batch: int = 1,
    prompt: int = 128,
    new: int = 128,
    rounds: int = 7,
    seed: int = 0,
    warm_up: int | None = None,
    stages: bool = True,
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Turns:
    """Measure sides that may differ in threads and ranks, all in the same rounds. The rest is as for `compare`.

    `output`: a folder that is made before anything is measured, for the caller's records.
    """
    device = comparison_device()
    _check(sides, dtype=dtype, batch=batch, prompt=prompt, new=new, rounds=rounds)
    if device.type != "cpu" and (several := [side.label for side in sides if side.ranks > 1]):
        raise UserError(
            f"got {several[0]} on {device}: the ranks of a comparison share one GPU; start them with torchrun"
        )
    source = resolve(model, seed=seed)
    config = model_config_of(source.hf_config)
    for side in sides:
        shard(config, side.ranks)  # says so where the model has too few heads
    check_positions(config, prompt, new)
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)

    steps = _Steps(sum(side.name in peers.PEERS for side in sides) + len(sides) * (1 + rounds + stages), progress)
    names, environments = labels(sides), [read_environment(side.cores) for side in sides]
    with ExitStack() as stack:
        weights = str(source.folder or model)  # decided here, so that all sides load the same
        gguf: dict[str, str] = {}
        for side in sides:
            if side.name in peers.PEERS:
                steps.begin(f"converting the weights for {side.name}")
                gguf[side.name] = str(stack.enter_context(peers.converted(side.name, weights, dtype=dtype, seed=seed)))
        processes = [stack.enter_context(Side(side.name, side.threads, side.ranks)) for side in sides]
        shape = {"model": weights, "dtype": dtype, "batch": batch, "prompt": prompt, "new": new}
        loaded = []
        for name, side, process in zip(names, sides, processes, strict=True):
            steps.begin(f"loading and warming up {name}")
            own = {"name": side.name, "threads": side.threads, "gguf": gguf.get(side.name)}
            loaded.append(_loaded(process.ask("load", seed=seed, warm_up=warm_up, **own, **shape)))
        runs: list[list[Run]] = [[] for _ in sides]
        tokens: list[list[Any]] = [[] for _ in sides]
        order = np.random.default_rng(seed)
        for index in range(rounds):
            for which in order.permutation(len(sides)):
                steps.begin(f"round {index + 1} of {rounds}: {names[which]}")
                before = probe_bandwidth(sides[which].cores, device)
                replies = processes[which].ask("run", seed=seed + 1 + index)
                after = probe_bandwidth(sides[which].cores, device)
                times = slowest([Times(**reply["times"]) for reply in replies])
                runs[which].append(Run.of(times, round=index, before=before, after=after))
                tokens[which].append(replies[0]["tokens"])
        memory = [max(rank["bytes"] for rank in process.ask("peak_memory")) for process in processes]
        staged: list[list[dict[str, Any]]] = []
        for name, process in zip(names, processes, strict=True) if stages else ():
            steps.begin(f"stages of {name}")
            staged.append(process.ask("stages", seed=seed))

    measured = tuple(
        Measurement(
            name=names[which],
            case=Case(
                model=model,
                origin=source.origin,
                dtype=dtype,
                batch=batch,
                prompt_tokens=prompt,
                new_tokens=new,
                threads=side.threads,
                tp=side.ranks,
            ),
            environment=environments[which],
            work=count_work(config, getattr(torch, loaded[which].pop("weights")), batch, prompt, new),
            runs=tuple(runs[which]),
            peak_rss_mb=memory[which] / 1e6,
            stages=STAGES.validate_python(staged[which][0]["stages"]) if stages else (),
            rank_stages=tuple(STAGES.validate_python(rank["stages"]) for rank in staged[which])
            if stages and side.ranks > 1
            else (),
            stage_run=_stage_run(staged[which][0]["times"]) if stages else None,
            **loaded[which],
        )
        for which, side in enumerate(sides)
    )
    steps.end()
    return Turns(measured, tuple(tokens))


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """The earliest position at which two arrays of tokens [round, sequence, position] differ, or None."""
    one, other = np.asarray(a), np.asarray(b)
    if one.shape != other.shape:
        return min(one.shape[-1], other.shape[-1])
    positions = np.nonzero((one != other).any(axis=(0, 1)))[0]
    return int(positions[0]) if len(positions) else None


def _check(sides: Sequence[SideSpec], *, dtype: str, **counts: int) -> None:
    for side in sides:
        if side.name not in peers.PEERS:
            check_baseline(side.name)
        elif reason := peers.unavailable():
            raise UserError(reason)
    dtype_of(dtype, FLOAT_DTYPES)
    least = {"batch": 1, "prompt": 1, "new": 2, "rounds": 2}
    reasons = {"new": " (a decode step follows the first token)", "rounds": " (an interval needs two)"}
    given = [*counts.items(), *(("threads", side.threads) for side in sides), *(("tp", side.ranks) for side in sides)]
    for name, value in given:
        if value < least.get(name, 1):
            raise UserError(f"got {name} = {value}, expected at least {least.get(name, 1)}{reasons.get(name, '')}")
    for side in sides:
        if side.ranks > 1 and not side.name.startswith("fused"):
            raise UserError(
                f"got tp={side.ranks} and the candidate {side.name!r}; expected 'fused' or 'fused-int8', "
                "which can be cut"
            )


def check_positions(config: ModelConfig, prompt: int, new: int) -> None:
    """ValueError when `new` tokens after `prompt` tokens need more positions than the model has."""
    if config.max_positions is not None and prompt + new > config.max_positions:
        raise UserError(
            f"a prompt of {prompt} and {new} new tokens need {prompt + new} positions, {config.architecture} has "
            f"{config.max_positions}; use a shorter prompt or fewer new tokens"
        )


def _loaded(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a side said when it was ready; of several ranks the last one's times count."""
    return ranks[0] | {
        name: max(rank[name] for rank in ranks) for name in ("load_s", "first_run_s", "start_to_ready_s")
    }


def slowest(ranks: Sequence[Times]) -> Times:
    """The times of one generation on several ranks: at each point those of the slowest."""
    steps = zip(*(times.decode_ms for times in ranks), strict=True)
    return Times(
        ttft_ms=max(times.ttft_ms for times in ranks),
        decode_ms=tuple(max(step) for step in steps),
        end_to_end_ms=max(times.end_to_end_ms for times in ranks),
    )


def _stage_run(times: dict[str, Any] | None) -> Run | None:
    return None if times is None else Run.of(Times(**times), round=0, before=None, after=None)


class _Steps:
    """Counts the parts of a comparison for whoever follows."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._begun, self._total, self._progress = 0, total, progress

    def begin(self, label: str) -> None:
        self._say(self._begun, label)
        self._begun += 1

    def end(self) -> None:
        self._say(self._total, "done")

    def _say(self, done: int, label: str) -> None:
        if self._progress:
            self._progress(done, self._total, label)
