"""Experts on different ranks: what each rank reads, and how long it waits for the others."""

from __future__ import annotations

from labkit.launcher.spawn import launch
from labkit.studies.expert_runs import skewed_engine, steps_of
from labkit.studies.experts_study import RankOfExperts
from labkit.system.progress import Progress
from labkit.weights.resolve import resolve

BATCH = 4


def experts_on_ranks(model: str, dtype: str, skew: float, ranks: int, progress: Progress) -> tuple[RankOfExperts, ...]:
    """Decode steps of BATCH sequences on ranks of one thread, each with its part of the experts; empty for one rank."""
    if ranks == 1:
        return ()
    progress(0, 1, f"experts on {ranks} ranks")
    found = launch(on_rank, model, dtype, skew, ranks, tp_size=ranks, threads=1, echo=lambda line: None)
    return tuple(found)


def on_rank(model: str, dtype: str, skew: float, ranks: int) -> RankOfExperts:
    """What this rank reads, and its times."""
    options = {"tensor_parallel": {"tp_size": ranks}, "moe": {"ep_size": ranks}}
    engine = skewed_engine(resolve(model, any_architecture=True), dtype, skew, **options)
    own, steps = engine.weights.mixtures[0].own, steps_of(engine, engine.model_config, BATCH)
    return RankOfExperts(first=own.start, end=own.stop, steps=steps)
