"""Regions unfused and fused: all sides compute the same, every weight counts once, and records are complete."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models.small_models import DENSE, small_config
from helpers.sweeps import crossed, sweep
from torch import Tensor

from labkit.harness import load_records
from labkit.harness.regions import measure as measuring
from labkit.harness.regions.case import layer_case
from labkit.harness.regions.clocks import RegionClock
from labkit.harness.regions.layer_stack import LayerStack, layer_stack
from labkit.harness.regions.measure import LayerBench, measure_regions, save_regions
from labkit.harness.regions.random_layers import layers_beyond_caches, tensors_of
from labkit.harness.regions.records import LayerCase, RegionMeasurement
from labkit.harness.regions.sides import FUSED, ONE_CALL, OWN_GEMM, SDPA, UNFUSED
from labkit.harness.regions.vocabulary import OP_OF, REGIONS, RUNGS
from labkit.harness.turns import calls as call_epochs
from labkit.harness.turns.looks import FEWEST_PAIRS
from labkit.harness.turns.placing import place_anew
from labkit.models.config import ModelConfig
from labkit.models.policies import model_config_of
from labkit.stages import FUSED_REGIONS, Stage
from labkit.statistics.sequential import centre
from labkit.system.errors import UserError

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 2e-2, "int8": 0.1}
each_model = pytest.mark.parametrize("name", DENSE)


def config_of(name: str) -> ModelConfig:
    return model_config_of(small_config(name))


def stack_of(name: str, dtype: str = "float32", batch: int = 2) -> LayerStack:
    case = LayerCase(impl="cpp", model=name, dtype=dtype, batch=batch, context=11, threads=2, layers=2)
    return layer_stack(config_of(name), case)


def results(stack: LayerStack) -> dict[str, Tensor]:
    with torch.inference_mode():
        return {side.name: side.step(RegionClock().around).float() for side in stack.sides}


@pytest.mark.parametrize(("name", "dtype"), crossed(DENSE, TOLERANCES.keys()))
def test_all_sides_compute_the_same(name: str, dtype: str) -> None:
    outputs = results(stack_of(name, dtype))
    scale = outputs[UNFUSED].abs().max()
    for side, hidden in outputs.items():
        assert not hidden.isnan().any()
        assert float((hidden - outputs[UNFUSED]).abs().max() / scale) < TOLERANCES[dtype], side


@each_model
def test_every_region_of_every_layer_is_timed(name: str) -> None:
    stack = stack_of(name)
    assert stack.one_call is not None
    for times in (*(side.times() for side in stack.sides), stack.side(FUSED).times(warm=True), stack.one_call.times()):
        assert set(times) == set(REGIONS)
        for calls in times.values():
            assert len(calls) == 2
            assert min(calls) >= 0


def test_the_unfused_sequence_is_counted_op_by_op() -> None:
    """The regions of gpt2 with hidden size 60 in float32, counted by hand."""
    counted = stack_of("gpt2", batch=1).counted()
    row, matrix = 4 * 60, 4 * 60 * 60
    assert counted[Stage.RESIDUAL].ops == ["add", "add"]  # bias, residual
    assert counted[Stage.RESIDUAL].bytes == 2 * 3 * row
    assert len(counted[Stage.ATTN_OUT].ops) == 1
    assert counted[Stage.ATTN_OUT].bytes == row + matrix + row
    assert counted[Stage.QKV].ops[0] == "native_layer_norm"
    assert counted[Stage.QKV].ops[-2:] == ["copy_", "copy_"]  # two appends to the cache
    assert counted[Stage.QKV].bytes > 3 * matrix
    assert counted[Stage.MLP].ops[:3] == ["add", "add", "native_layer_norm"]
    assert counted[Stage.MLP].ops[-1] == "gelu"
    assert "_softmax" in counted[Stage.ATTENTION].ops


def test_rotary_and_a_gate_are_more_ops() -> None:
    plain, llama = (stack_of(name, batch=1).counted() for name in ("gpt2", "llama"))
    assert len(llama[Stage.QKV].ops) > len(plain[Stage.QKV].ops) + 6


def test_the_layers_do_not_fit_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config_of("gpt2"), hidden_size=768, intermediate_size=3072)
    size = 4 * sum(math.prod(shape) for shape in config.layer_shapes().values())
    monkeypatch.setattr("labkit.harness.regions.random_layers.last_level_cache", lambda: 64 << 20)
    count = layers_beyond_caches(config, torch.float32)
    assert (count - 1) * size < 2 * (64 << 20) <= count * size
    assert layers_beyond_caches(config, torch.bfloat16) > count


def test_layers_that_do_not_fit_in_memory_are_refused() -> None:
    huge = replace(config_of("gpt2"), hidden_size=60_000, intermediate_size=1_000_000)
    with pytest.raises(ValueError, match=r"two layers of \d+\.\d GB, .* use a smaller shape or dtype"):
        layers_beyond_caches(huge, torch.float32)


@pytest.mark.parametrize(("name", "dtype"), crossed(DENSE, TOLERANCES.keys()))
def test_every_rung_of_the_ladder_computes_the_same(name: str, dtype: str) -> None:
    stack = stack_of(name, dtype)
    expected = results(stack)[UNFUSED]
    for fused in RUNGS.values():
        with torch.inference_mode():
            actual = stack.with_fused(fused).step(RegionClock().around).float()
        assert float((actual - expected).abs().max() / expected.abs().max()) < TOLERANCES[dtype], fused


@sweep
def test_the_ladder_is_timed_rung_by_rung() -> None:
    ladder = LayerBench(layer_case("tiny-gpt2", context=9, threads=1, layers=2)).ladder(rounds=3)
    assert ladder.rungs == (*RUNGS, ONE_CALL)
    assert (ladder.unit, ladder.count) == ("epoch", 3)
    assert all(
        len(samples) == len(ladder.epochs) and min(samples) > 0 and len(ladder.samples_us(rung)) == 3
        for rung, samples in ladder.rounds_us.items()
    )
    assert ladder.ratio("unfused").value == 1


def test_the_ladder_fuses_one_region_after_another_and_the_products_last() -> None:
    """Kept records use these names of the rungs."""
    assert list(RUNGS) == [
        "unfused", "+ 1 QKV", "+ 2 attention", "+ 3 MLP", "+ 4 bias and residual", "+ own GEMM between"
    ]  # fmt: skip
    assert list(RUNGS.values()) == [(), *(FUSED_REGIONS[:count] for count in range(1, 5)), REGIONS]


def test_a_fused_region_brings_its_own_weights_and_nothing_else() -> None:
    stack = stack_of("llama")
    slow, fast = (stack.side(name) for name in (UNFUSED, FUSED))
    for region, op in OP_OF.items():
        partly_fused = stack.with_fused((region,))
        fused_ops = {name for name, op in partly_fused.ops.items() if op is fast.ops[name]}
        assert fused_ops == {op}
        assert (partly_fused.layers[0].qkv is fast.layers[0].qkv) == (region is Stage.QKV)
        assert (partly_fused.layers[0].dense.out is slow.layers[0].dense.out) == (region is not Stage.ATTN_OUT)


def test_the_weights_of_all_sides_are_placed_anew() -> None:
    stack = stack_of("llama")
    placed = {tensor.data_ptr() for tensor in stack.tensors}
    for side in stack.sides:
        for layer, cache in zip(side.layers, side.caches, strict=True):
            assert {cache.keys.data_ptr(), cache.values.data_ptr()} <= placed
            assert {tensor.data_ptr() for tensor in tensors_of(layer)} <= placed
    assert len(placed) > 2 * len(stack.counted())


def test_a_step_gives_the_same_result_from_new_memory() -> None:
    config = replace(config_of("llama"), hidden_size=512, intermediate_size=2048)
    case = LayerCase(impl="cpp", model="llama", dtype="float32", batch=1, context=11, threads=2, layers=2)
    stack = layer_stack(config, case)
    before = results(stack)
    placed = place_anew(stack.tensors)
    assert placed.total > 2**20
    assert placed.anew == (sys.platform == "linux")
    for side, hidden in results(stack).items():
        assert torch.equal(hidden, before[side]), side


class Nobody:
    """Other programs that use no processor."""

    def __init__(self) -> None:
        self.cores: list[float] = []

    def end_round(self) -> None:
        self.cores.append(0.0)

    def end(self) -> None:
        return


def test_regions_are_measured_until_their_gains_are_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up clock: the fused sides take a third of the time, in every region but one in which epochs scatter."""
    bench = LayerBench(layer_case("tiny-gpt2", context=9, threads=1, layers=2))
    ended: list[int] = []  # epochs

    def timer(name: str, us: float) -> Any:
        def times() -> Any:
            place = [1.0, 1.6, 1.2][len(ended)] if len(ended) < 3 else 1.5
            regions = {region: [round(1e3 * us)] for region in REGIONS}
            return {name: regions | {Stage.MLP: [round(1e3 * us * (place if name == UNFUSED else 1.0))]}}

        return times

    def end_epoch() -> Any:
        ended.append(1)
        return {}

    monkeypatch.setattr(call_epochs, "OthersByRound", Nobody)
    monkeypatch.setattr(call_epochs, "place_probe_anew", lambda: None)
    timers = [timer(UNFUSED, 30.0), timer(FUSED, 10.0), timer(ONE_CALL, 10.0)]
    monkeypatch.setattr(bench, "_timers", lambda: (timers, [end_epoch]))
    monkeypatch.setattr(measuring, "probe_turn", lambda threads, device: {})
    labels: list[str] = []
    (decided,) = bench.regions(["qkv"])
    assert decided.looks == (3,)
    assert decided.gain.value == pytest.approx(3)
    assert decided.verdict == "FASTER"
    ended.clear()
    qkv, mlp = bench.regions(["qkv", "mlp"], budget_s=1e9, progress=lambda done, total, label: labels.append(label))
    assert qkv.looks == mlp.looks
    assert mlp.count > 3
    assert mlp.verdict != "UNDECIDED"
    assert "undecided are mlp " in labels[4]
    assert not any("qkv" in label for label in labels)


def test_a_precision_goes_on_after_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = LayerBench(layer_case("tiny-gpt2", context=9, threads=1, layers=2))
    random = np.random.default_rng(0)
    monkeypatch.setattr(measuring, "probe_turn", lambda threads, device: {})
    monkeypatch.setattr(measuring, "_stamped_us", lambda stack: 20.0)
    monkeypatch.setattr(measuring, "RUNGS", {"unfused": ()})
    monkeypatch.setattr(measuring, "_wall_us", lambda run: 60.0 * np.exp(0.02 * random.standard_normal()))
    monkeypatch.setattr(call_epochs, "OthersByRound", Nobody)
    monkeypatch.setattr(call_epochs, "place_probe_anew", lambda: None)
    ladder = bench.ladder(precision=0.02, budget_s=1e9)
    assert ladder.gain.high / ladder.gain.low <= 1.02
    assert len(ladder.looks) > 1


SMALL: dict[str, Any] = {"batch": 1, "context": 9, "threads": 1, "rounds": 3, "layers": 2}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[RegionMeasurement, ...], Path]:
    folder = tmp_path_factory.mktemp("runs")
    rows = measure_regions("tiny-llama", **SMALL)
    save_regions(rows, folder)
    return rows, folder


def test_the_four_fused_regions_are_measured(measured: tuple[tuple[RegionMeasurement, ...], Path]) -> None:
    rows, _ = measured
    assert [row.region for row in rows] == list(FUSED_REGIONS)
    for row in rows:
        figures = row.as_dict()
        assert figures["ratio_low"] <= figures["ratio"] <= figures["ratio_high"]
        logs = np.log(np.array(row.rounds_us[UNFUSED]) / np.array(row.rounds_us[FUSED]))
        of_epochs = [centre(logs[np.array(row.epochs) == epoch]) for epoch in range(3)]
        assert figures["ratio"] == pytest.approx(np.exp(np.mean(of_epochs)))
        assert (figures["unit"], figures["count"]) == ("epoch", 3)
        assert figures["published"] == {"qkv": 1.5, "attention": 2.9, "mlp": 3.0, "residual": 1.2}[row.region]
        assert "DeepSpeed" in figures["published_source"]
        assert all(len(samples) == len(row.epochs) for samples in row.rounds_us.values())
        assert all(len(samples) == SMALL["rounds"] for samples in row.warm_us.values())
        assert np.bincount(row.epochs).min() >= FEWEST_PAIRS
        assert row.bandwidth_gb_s is None or len(row.bandwidth_gb_s) == len(row.epochs)


def test_each_region_has_the_sides_that_differ_in_it(measured: tuple[tuple[RegionMeasurement, ...], Path]) -> None:
    always = {UNFUSED, FUSED, ONE_CALL}
    extra = {"qkv": {OWN_GEMM}, "mlp": {OWN_GEMM}, "attention": {SDPA}, "residual": set()}
    for row in measured[0]:
        assert set(row.rounds_us) == always | extra[row.region]


def test_what_was_measured_is_read_back_as_it_was(measured: tuple[tuple[RegionMeasurement, ...], Path]) -> None:
    rows, folder = measured
    assert load_records(folder) == list(rows)


def test_the_share_of_the_limit_is_that_of_the_bytes(measured: tuple[tuple[RegionMeasurement, ...], Path]) -> None:
    for row in measured[0]:
        if row.region == Stage.RESIDUAL:
            assert row.floor_share(FUSED) is None
            continue
        known = row.model_copy(update={"bandwidth_gb_s": (10.0,) * 3, "bytes": 50_000})
        known = known.model_copy(update={"rounds_us": {FUSED: (10.0, 20.0, 40.0)}})
        assert known.floor_share(FUSED) == pytest.approx(0.25)
        assert known.model_copy(update={"bandwidth_gb_s": None}).floor_share(FUSED) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"regions": ["qvk"]},
            r"unknown op 'qvk' \(did you mean 'qkv'\?\); expected one of qkv, attention, attn_out, mlp",
        ),
        ({"impl": "cuda"}, "unknown impl 'cuda'; expected one of cpp"),
        ({"dtype": "float64"}, "unsupported dtype 'float64'; expected one of float32, bfloat16, float16, int8"),
        ({"model": "gpt-17"}, "gpt-17"),
        ({"batch": 0}, "got batch = 0, expected at least 1"),
        ({"rounds": 1}, "got rounds = 1, expected at least 2"),
        ({"budget_s": 0}, "got budget_s = 0"),
        ({"precision": -0.1}, "got precision = -0.1"),
        ({"threads": 0}, "got threads = 0, expected at least 1"),
        ({"model": "gpt2", "context": 1024}, "more than gpt2's 1024 positions; use a shorter context"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mistake_is_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_regions(**({"model": "tiny-gpt2"} | SMALL | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regions": ["qvk"]}, r"unknown op 'qvk' \(did you mean 'qkv'\?\); expected one of qkv"),
        ({"rounds": 1}, "got rounds = 1, expected at least 2"),
        ({"batch": 0}, "got batch = 0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_is_waited_for_or_built(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "wait_until_quiet", lambda *_, **__: pytest.fail("it waited"))
    monkeypatch.setattr(measuring, "LayerBench", lambda case: pytest.fail("it built the layers"))
    with pytest.raises(ValueError, match=message):
        measure_regions("tiny-gpt2", wait_quiet_s=5, output=tmp_path / "runs", **changes)
    assert not (tmp_path / "runs").exists()


def test_a_model_with_experts_is_refused() -> None:
    with pytest.raises(UserError, match=r"MixtralForCausalLM has experts, .*; expected a dense model, such as llama"):
        stack_of("mixtral")
