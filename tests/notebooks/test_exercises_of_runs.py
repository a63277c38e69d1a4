"""Checks of exercises about the run: its model, its batch, and its bandwidth as printed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.studies.comparisons import comparison

from labkit.harness.records import Measurement
from labkit.harness.regions.case import layer_case
from labkit.harness.roofline import decode_bytes, region_bytes
from labkit.models.policies import model_config_of
from labkit.models.presets import PRESETS
from labkit.notebooks.exercises import BATCH, CONTEXT, check_batches, check_limit, check_sums
from labkit.notebooks.prediction_exercise import check_predicted
from labkit.stages import Stage
from labkit.weights.resolve import resolve

READ_MB = decode_bytes(model_config_of(PRESETS["gpt2"].hf_config), torch.bfloat16, BATCH, CONTEXT) / 1e6


def kernel_study() -> Any:
    """The part of a study that `check_batches` reads."""
    case = layer_case("tiny-llama", batch=4, context=32, threads=1, layers=1)
    return SimpleNamespace(regions=(SimpleNamespace(case=case),))


def test_predictions_about_the_batch_are_judged_by_the_bytes_of_the_run() -> None:
    config, context = model_config_of(resolve("tiny-llama").hf_config), 32

    def growth(region: Stage) -> float:
        bytes_of_1, bytes_of_8 = (region_bytes(config, region, torch.float32, batch, context) for batch in (1, 8))
        return bytes_of_8 / bytes_of_1

    mlp, attention = growth(Stage.MLP), growth(Stage.ATTENTION)
    assert mlp < 1.5 < attention
    right = check_batches(kernel_study(), mlp, attention).data
    assert right.count("**right**") == 2
    wrong = check_batches(kernel_study(), 8, 1.0).data
    assert "reads the weights once" in wrong
    assert "keys and values of its own" in wrong
    assert check_batches(kernel_study(), None, "many").data.count("not") >= 2


def test_yours_means_the_model_of_the_run() -> None:
    text = check_sums("tiny-gptj", {"yours": 1, "tiny-llama": 2}, None).data
    assert text.count("**right**") == 2
    assert "a layer of tiny-gptj" in text


@pytest.mark.parametrize("digits", [0, 1])
def test_a_limit_computed_from_the_printed_bandwidth_is_right(digits: int) -> None:
    record = comparison()
    slow = record.model_copy(update={side: _at(getattr(record, side), 24.4) for side in ("baseline", "candidate")})
    assert slow.read_bandwidth_gb_s == pytest.approx(24.4)
    text = check_limit(slow, 1.0, READ_MB / round(24.4, digits)).data
    assert "least ms per step: **right**" in text


def _at(side: Measurement, gb_s: float) -> Measurement:
    runs = tuple(run.model_copy(update={"bandwidth_gb_s": (gb_s, gb_s)}) for run in side.runs)
    return side.model_copy(update={"runs": runs})


@pytest.mark.parametrize(
    ("factor", "message"),
    [(1.0, "**right**"), (1.14, "**right**"), (0.5, "not yet: you predicted"), (None, "not answered yet")],
)
def test_predictions_are_judged_by_a_run_in_bfloat16(factor: float | None, message: str) -> None:
    record = comparison()
    assert "this run is in float32" in check_predicted(record, 1.0, 1.0).data
    sides = {name: _in_bfloat16(getattr(record, name)) for name in ("baseline", "candidate")}
    in_bfloat16 = record.model_copy(update=sides)
    times = (of.per_token_ms for of in sides.values())
    text = check_predicted(in_bfloat16, *(factor and factor * time for time in times)).data
    assert text.count(message) == 2


def _in_bfloat16(side: Measurement) -> Measurement:
    return side.model_copy(update={"case": side.case.model_copy(update={"dtype": "bfloat16"})})
