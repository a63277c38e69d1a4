"""The pieces of both sides that do the same work, under the same columns."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from labkit.nsys.analysis.side import Side
from labkit.nsys.analysis.stage_table import ORDER
from labkit.nsys.analysis.work import NO_STAGE
from labkit.nsys.arrays import Floats
from labkit.nsys.trace import TraceError
from labkit.stages import Stage

JOINED = {stage.value: stage.value.split("+") for stage in Stage if "+" in stage.value}
ALL_LAYERS = -2


@dataclass(frozen=True)
class Aligned:
    """The figures of both sides (vanilla, fused) under the same columns, with a row per step."""

    keys: list[tuple[int, str]]  # columns of `count` and `own_ms`: layer and stage of the pieces that compute
    stages: list[str]  # columns of `stage_ms`
    count: tuple[Floats, Floats]
    own_ms: tuple[Floats, Floats]
    stage_ms: tuple[Floats, Floats]


def align(vanilla: Side, fused: Side) -> Aligned:
    """Brings two sides under the same columns. TraceError where no stage is on both sides.

    If one side runs two stages as one ("qkv+mlp"), the other side's two stages are added up. A stage that runs in the
    same layers on both sides is compared layer by layer, any other stage over all layers.
    """
    sides = (vanilla, fused)
    names = joined({NO_STAGE}.union(*(side.stage_ms.columns for side in sides)))
    stages_of = [{names[stage] for stage in side.stage_ms.columns} for side in sides]
    if not stages_of[0] & stages_of[1] - {NO_STAGE}:
        listing = " and ".join(
            f"{side.name}: {', '.join(_in_order(stages - {NO_STAGE})) or 'none'}"
            for side, stages in zip(sides, stages_of, strict=True)
        )
        raise TraceError(
            f"the two captures share no stage ({listing}); expected the same stages on both sides: "
            "annotate the vanilla model (labkit.engine.vanilla.annotate), or capture both with `labkit profile`"
        )
    layers = [_layers(side, names) for side in sides]
    unequal = {stage for stage in stages_of[0] & stages_of[1] if layers[0].get(stage) != layers[1].get(stage)}

    def key(layer: int, stage: str) -> tuple[int, str]:
        return (ALL_LAYERS if names[stage] in unequal else layer), names[stage]

    keys = sorted({key(*column) for side in sides for column in side.own_ms.columns if column[1] != NO_STAGE})
    stages = _in_order(stages_of[0] | stages_of[1])

    def by_key(frame: pd.DataFrame) -> Floats:
        return _summed(frame, [key(*column) for column in frame], keys)

    def by_stage(frame: pd.DataFrame) -> Floats:
        return _summed(frame, [names[stage] for stage in frame], stages)

    return Aligned(
        keys=keys,
        stages=stages,
        count=(by_key(vanilla.count), by_key(fused.count)),
        own_ms=(by_key(vanilla.own_ms), by_key(fused.own_ms)),
        stage_ms=(by_stage(vanilla.stage_ms), by_stage(fused.stage_ms)),
    )


def joined(stages: Iterable[str]) -> dict[str, str]:
    """The name under which each of `stages` is compared: "qkv" becomes "qkv+mlp" if that is among them."""
    present = set(stages)
    names = {stage: stage for stage in present}
    for whole in present & set(JOINED):
        names |= dict.fromkeys(JOINED[whole], whole)
    return names


def _in_order(stages: Iterable[str]) -> list[str]:
    return sorted(stages, key=ORDER.__getitem__)


def _layers(side: Side, names: dict[str, str]) -> dict[str, set[int]]:
    layers: dict[str, set[int]] = {}
    for layer, stage in side.own_ms.columns:
        layers.setdefault(names[stage], set()).add(layer)
    return layers


def _summed(frame: pd.DataFrame, names: Sequence[Hashable], columns: Sequence[Hashable]) -> Floats:
    """The columns of `frame` under their new `names`, added up where names are equal. Names not in `columns` drop."""
    places = {column: place for place, column in enumerate(columns)}
    result = np.zeros((len(frame), len(columns)))
    for name, values in zip(names, frame.to_numpy(np.float64).T, strict=True):
        if name in places:
            result[:, places[name]] += values
    return result
