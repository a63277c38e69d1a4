"""`compare`: sides, each in a fresh process, run the same case in turns.

A shared machine drifts within seconds, so what is compared must run side by side: a round is one run of each side in
random order, and each run has the read bandwidth probed just before and just after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from labkit.config import ModelConfig
from labkit.engine.baselines import DTYPES, check_baseline, comparison_device
from labkit.engine.stage_clock import StageTime
from labkit.harness import peers
from labkit.harness.environment import read_environment
from labkit.harness.records import Case, Comparison, Measurement, Run
from labkit.harness.results import save
from labkit.harness.roofline import count_work, probe_bandwidth
from labkit.harness.sides import Side
from labkit.harness.timing import Times
from labkit.policies import policy_for
from labkit.presets import resolve
from labkit.shards import shard

STAGES = TypeAdapter(tuple[StageTime, ...])
Progress = Callable[[int, int, str], None]  # steps done, steps in all, what runs now


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
    """Measure `candidate` against `baseline`, names of `labkit.engine.baselines`, on the model called `model`.

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
    sides, device = (*baselines, candidate), comparison_device()
    threads = max(1, torch.get_num_threads() // max(1, tp)) if threads is None else threads
    _check(sides, dtype=dtype, batch=batch, prompt=prompt, new=new, threads=threads, tp=tp, rounds=rounds)
    if tp > 1 and not candidate.startswith("fused"):
        raise ValueError(
            f"got tp={tp} and the candidate {candidate!r}; expected 'fused' or 'fused-int8', which can be cut"
        )
    if tp > 1 and device.type != "cpu":
        raise ValueError(f"got tp={tp} on {device}: the ranks of a comparison share one GPU; start them with torchrun")
    source = resolve(model, seed=seed)
    config = policy_for(source.hf_config).model_config(source.hf_config)
    shard(config, tp)  # says so where the model has too few heads
    check_positions(config, prompt, new)
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)

    case = Case(
        model=model,
        origin=source.origin,
        dtype=dtype,
        batch=batch,
        prompt_tokens=prompt,
        new_tokens=new,
        threads=threads,
        tp=tp,
    )
    steps = _Steps(sum(name in peers.PEERS for name in sides) + len(sides) * (1 + rounds + stages), progress)
    environment = read_environment(threads)
    with ExitStack() as stack:
        weights = str(source.folder or model)  # decided here, so that all sides load the same
        gguf: dict[str, str] = {}
        for name in sides:
            if name in peers.PEERS:
                steps.begin(f"converting the weights for {name}")
                gguf[name] = str(stack.enter_context(peers.converted(name, weights, dtype=dtype, seed=seed)))
        ranks = [1] * len(baselines) + [tp]
        threads_of = [threads * count for count in ranks]
        processes = [stack.enter_context(Side(name, threads, count)) for name, count in zip(sides, ranks, strict=True)]
        shape = {"model": weights, "dtype": dtype, "batch": batch, "prompt": prompt, "new": new, "threads": threads}
        loaded = []
        for process in processes:
            steps.begin(f"loading and warming up {process.name}")
            own = {"name": process.name, "gguf": gguf.get(process.name)}
            loaded.append(_loaded(process.ask("load", seed=seed, warm_up=warm_up, **own, **shape)))
        runs: list[list[Run]] = [[] for _ in sides]
        tokens: list[list[Any]] = [[] for _ in sides]
        order = np.random.default_rng(seed)
        for index in range(rounds):
            for which in order.permutation(len(sides)):
                steps.begin(f"round {index + 1} of {rounds}: {sides[which]}")
                before = probe_bandwidth(threads_of[which], device)
                replies = processes[which].ask("run", seed=seed + 1 + index)
                after = probe_bandwidth(threads_of[which], device)
                times = slowest([Times(**reply["times"]) for reply in replies])
                runs[which].append(Run.of(times, round=index, before=before, after=after))
                tokens[which].append(replies[0]["tokens"])
        memory = [max(rank["bytes"] for rank in process.ask("peak_memory")) for process in processes]
        staged: list[list[dict[str, Any]]] = []
        for process in processes if stages else ():
            steps.begin(f"stages of {process.name}")
            staged.append(process.ask("stages", seed=seed))

    measured = [
        Measurement(
            name=name if ranks[which] == 1 else f"{name}-tp{tp}",
            case=case,
            environment=environment,
            work=count_work(config, getattr(torch, loaded[which].pop("weights")), batch, prompt, new),
            runs=tuple(runs[which]),
            peak_rss_mb=memory[which] / 1e6,
            stages=STAGES.validate_python(staged[which][0]["stages"]) if stages else (),
            rank_stages=tuple(STAGES.validate_python(rank["stages"]) for rank in staged[which])
            if stages and ranks[which] > 1
            else (),
            stage_run=_stage_run(staged[which][0]["times"]) if stages else None,
            **loaded[which],
        )
        for which, name in enumerate(sides)
    ]
    differences = [first_difference(theirs, tokens[-1]) for theirs in tokens[:-1]]
    comparisons = tuple(
        Comparison(
            baseline=baseline,
            candidate=measured[-1],
            tokens_equal=difference is None,
            first_difference=difference,
        )
        for baseline, difference in zip(measured[:-1], differences, strict=True)
    )
    if output is not None:
        for comparison in comparisons:
            save(comparison, output)
    steps.end()
    return comparisons


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """The earliest position at which two arrays of tokens [round, sequence, position] differ, or None."""
    one, other = np.asarray(a), np.asarray(b)
    if one.shape != other.shape:
        return min(one.shape[-1], other.shape[-1])
    positions = np.nonzero((one != other).any(axis=(0, 1)))[0]
    return int(positions[0]) if len(positions) else None


def _check(sides: Sequence[str], *, dtype: str, **counts: int) -> None:
    for name in sides:
        if name not in peers.PEERS:
            check_baseline(name)
        elif reason := peers.unavailable():
            raise ValueError(reason)
    if dtype not in DTYPES:
        raise ValueError(f"unsupported dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    least = {"batch": 1, "prompt": 1, "new": 2, "threads": 1, "tp": 1, "rounds": 2}
    reasons = {"new": " (a decode step follows the first token)", "rounds": " (an interval needs two)"}
    for name, value in counts.items():
        if value < least[name]:
            raise ValueError(f"got {name} = {value}, expected at least {least[name]}{reasons.get(name, '')}")


def check_positions(config: ModelConfig, prompt: int, new: int) -> None:
    """ValueError when `new` tokens after `prompt` tokens need more positions than the model has."""
    if config.max_positions is not None and prompt + new > config.max_positions:
        raise ValueError(
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
