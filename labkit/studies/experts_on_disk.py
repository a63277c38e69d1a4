"""Experts on the disk: the time of a token by the part of the experts that memory holds."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Annotated, TypeAlias

from labkit.engine.offload.experts import memory_for
from labkit.engine.offload.options import SLOTS_PER_CHOICE
from labkit.engine.offload.prepared import prepared
from labkit.harness.disk import read_rate_gb_s
from labkit.harness.expert_reads import ExpertReads
from labkit.harness.timing import TokenClock
from labkit.kernels.expert_store import ExpertCounts
from labkit.models.config import ModelConfig
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.stages import Phase, Stage
from labkit.studies.expert_runs import draw_text, prompt_of, skewed, skewed_engine, step_ms
from labkit.studies.experts_study import ExpertsInMemory
from labkit.studies.settings import StudySetting
from labkit.system.collective import alone
from labkit.system.comma_list import listed, listed_counts
from labkit.system.errors import UserError
from labkit.system.owned_folder import owned_folder
from labkit.system.progress import Progress
from labkit.weights.source import ModelSource
from labkit.weights.spec import WeightSpec

TEXTS, PROMPT, NEW = 8, 4, 4  # a random model chooses alike within a text, so there are several short ones
STEPS = TEXTS * (NEW - 1)
EXPECTED = "percentages below 100, such as '25,50,75', or nothing"


def parse_percentages(text: str) -> tuple[int, ...]:
    """The percentages in "25,50", in increasing order; empty for no text. UserError for anything else."""
    percentages = listed_counts("in_memory", text, EXPECTED) if listed(text) else ()
    if percentages and percentages[-1] >= 100:
        raise UserError(f"got in_memory = {text!r}, expected {EXPECTED}")
    return percentages


InMemory: TypeAlias = Annotated[
    str,
    StudySetting(
        "percent of the experts that memory holds, the others on the disk; empty: leaves it out",
        check=parse_percentages,
    ),
]


def experts_on_disk(
    source: ModelSource,
    config: ModelConfig,
    dtype: str,
    skew: float,
    percentages: Sequence[int],
    output: Path,
    progress: Progress,
) -> tuple[ExpertsInMemory, ...]:
    """Decode steps of one sequence, for each part of the experts in memory. The file of the experts is in a folder in
    `output`, which is removed in the end. Parts that are too small for the engine are left out.
    """
    if not percentages:
        return ()
    assert config.experts is not None
    total = config.num_layers * config.experts.count
    spec = WeightSpec.of(source.hf_config, FLOAT_DTYPES[dtype])
    least, found = SLOTS_PER_CHOICE * config.experts.chosen, []
    with owned_folder("labkit-experts-", output) as folder:
        progress(0, len(percentages), "writing the experts to the disk")
        source = skewed(source, skew)
        saved = prepared(spec, source, source.hf_config, folder, alone)
        for done, percentage in enumerate(percentages):
            progress(done, len(percentages), f"{percentage} % of the experts in memory")
            experts = ceil(total * percentage / 100)
            if experts >= least:
                offload = {"path": folder, "resident_gb": memory_for(spec, saved, experts) / 1e9}
                found += _measured(source, config, dtype, offload)
    return tuple(found)


def _measured(
    source: ModelSource, config: ModelConfig, dtype: str, offload: dict[str, object]
) -> list[ExpertsInMemory]:
    """Texts of an engine with this offload, after as many others; empty if all experts fit into that memory, as in a
    tiny model may.
    """
    engine = skewed_engine(source, dtype, 0.0, offload=offload)
    store = engine.expert_store
    if store is None:
        return []
    before, after = list[ExpertCounts](), list[ExpertCounts]()
    texts = prompt_of(config, 2 * TEXTS, PROMPT).split(1)
    for text in texts[:TEXTS]:
        draw_text(engine, text, NEW)
    engine.stage_times()
    rates = [read_rate_gb_s(store.path)]
    for text in texts[TEXTS:]:
        draw_text(engine, text, NEW, TokenClock(at_first=lambda: before.append(store.counts)))
        after.append(store.counts)
    rates.append(read_rate_gb_s(store.path))
    reads = ExpertReads.sum_of(ExpertReads.of(end.since(begin)) for begin, end in zip(before, after, strict=True))
    assert reads is not None
    times = [time for time in engine.stage_times() if time.phase is Phase.DECODE]
    engine.destroy()
    return [
        ExpertsInMemory(
            experts=store.slots,
            of=store.layers * store.per_layer,
            step_ms=step_ms(times, *Stage) / STEPS,
            wait_ms=step_ms(times, Stage.FETCH) / STEPS,
            read_mb=reads.read_mb / STEPS,
            reads=reads,
            disk_gb_s=sum(rates) / len(rates),
        )
    ]
