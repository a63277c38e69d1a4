"""The physical limit: each device has its probe, and every byte and FLOP of a step is counted once, in its op."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.models.small_models import SMALL_CONFIGS, WINDOW, WITH_EXPERTS, small_config
from transformers import GPT2Config

from labkit.harness import roofline
from labkit.harness.roofline import (
    ONLY_WAY,
    count_work,
    decode_bytes,
    decode_flops,
    layer_shape,
    prefill_flops,
    probe_bandwidth,
    probe_turn,
    rates_of_epoch,
    region_bytes,
    region_flops,
)
from labkit.kernels.layer_ops import Pass, layer_cases
from labkit.kernels.probe import Way
from labkit.kernels.shapes import REAL, LayerShape
from labkit.models.config import ModelConfig
from labkit.models.policies import POLICIES, model_config_of
from labkit.models.presets import PRESETS
from labkit.stages import Stage

# One sequence with 129 tokens, the new one included: bytes of a step in float32, bfloat16 and int8, FLOPs of a step,
# FLOPs of a prompt of that length. The figures are older than the counts of the ops.
COUNTED = {
    "gpt2": (504_130_560, 252_065_280, 128_676_770, 251_819_520, 22_299_440_640),
    "llama-shape": (1_389_764_608, 694_882_304, 354_361_856, 694_779_904, 80_426_401_792),
    "bloom-560m": (2_262_224_896, 1_131_112_448, 572_840_960, 1_130_463_232, 79_251_472_384),
    "gpt-j-6b": (23_496_151_936, 11_748_075_968, 5_905_792_672, 11_746_344_960, 1_458_642_812_928),
    "opt-350m": (1_341_757_440, 670_878_720, 342_322_880, 670_236_672, 78_925_463_552),
    "gpt-neo-125m": (504_019_968, 252_009_984, 128_649_122, 251_819_520, 22_299_440_640),
    "qwen3-0.6b": (2_413_793_280, 1_206_896_640, 611_837_696, 1_221_558_272, 115_858_178_048),
    "mistral-7b": (28_476_473_344, 14_238_236_672, 7_130_388_992, 14_288_420_864, 1_805_323_337_728),
}
# The same for three sequences of 5,000 tokens, which is more than the windows of these models.
COUNTED_LONG = {
    "gpt-neo-125m": (1_075_792_896, 537_896_448, 414_532_514, 1_031_827_968, 3_308_583_522_816),
    "mistral-7b": (31_663_915_008, 15_831_957_504, 8_724_101_632, 49_104_814_080, 228_401_778_524_160),
}
each_model = pytest.mark.parametrize("name", SMALL_CONFIGS)


def small(name: str, **overrides: Any) -> ModelConfig:
    return model_config_of(small_config(name, **overrides))


def some_dense(name: str) -> ModelConfig:
    """The config of a small mixture of three layers, the first one with an MLP instead of experts."""
    return replace(small(name), dense_layers=(True, False, False), dense_size=100)


def preset(name: str) -> ModelConfig:
    return model_config_of(PRESETS[name].hf_config)


def counts(config: ModelConfig, batch: int, context: int) -> tuple[int, ...]:
    types = (torch.float32, torch.bfloat16, torch.int8)
    read = (decode_bytes(config, dtype, batch, context) for dtype in types)
    return *read, decode_flops(config, batch, context), prefill_flops(config, batch, context)


@pytest.mark.parametrize("name", COUNTED)
def test_the_figures_of_known_models_stay_what_they_were(name: str) -> None:
    assert counts(preset(name), 1, 129) == COUNTED[name]


@pytest.mark.parametrize("name", COUNTED_LONG)
def test_the_figures_of_known_models_past_their_windows_stay_too(name: str) -> None:
    assert counts(preset(name), 3, 5000) == COUNTED_LONG[name]


def test_a_step_reads_what_one_counts_by_hand() -> None:
    """GPT-2 has 12 layers of width 768, a tied head of 50257 rows, and positions that are looked up."""
    config = POLICIES["GPT2LMHeadModel"].model_config(GPT2Config())
    matrices = 12 * 12 * 768**2 + 50257 * 768
    vectors = 12 * (2 * 2 + 3 + 1 + 4 + 1) * 768 + 2 * 768
    assert config.weight_bytes(torch.float32) == 4 * (matrices + vectors + 1024 * 768)
    assert config.kv_bytes_per_token(torch.float32) == 4 * 2 * 12 * 768
    looked_up = 3 * 2 * 768
    kv = 3 * 100 * config.kv_bytes_per_token(torch.float32)
    assert decode_bytes(config, torch.float32, batch=3, context=100) == 4 * (matrices + vectors + looked_up) + kv
    assert decode_flops(config, batch=3, context=100) == 3 * (2 * matrices + 12 * 4 * 100 * 768)
    steps = sum(decode_flops(config, 1, context) for context in range(1, 11))
    assert prefill_flops(config, 1, 10) == steps - 9 * 2 * 50257 * 768


def numbers_of_experts(config: ModelConfig) -> int:
    """Returns how many numbers the matrices and biases of a layer's experts have."""
    return sum(
        math.prod(shape) for name, shape in config.layer_shapes().items() if name.split(".")[0] in ("ff1", "ff2")
    )


SOME_DENSE = {f"{name} with an MLP": some_dense(name) for name in ("qwen2-moe", "qwen3-moe", "mixtral")}


@pytest.mark.parametrize("name", [*SMALL_CONFIGS, *SOME_DENSE])
def test_every_weight_of_every_architecture_is_counted_once(name: str) -> None:
    """Embedding and positions count by looked-up rows; a tied head counts whole, since it is multiplied."""
    config = SOME_DENSE[name] if name in SOME_DENSE else small(name)
    read = config.weight_bytes(torch.float32)
    looked_up = config.vocab_size * config.embedding_size * (0 if config.tied_head else 1)
    looked_up += config.top_shapes().get("positions.weight", (0,))[0] * config.hidden_size
    rows = config.embedding_size + (config.hidden_size if config.position == "learned" else 0)
    cache = config.kv_bytes_per_token(torch.float32)
    if experts := config.experts:
        of_all = numbers_of_experts(config)
        mixtures = sum(map(config.has_experts, range(config.num_layers)))
        read -= 4 * mixtures * of_all * (experts.count - experts.chosen) // experts.count
    assert decode_bytes(config, torch.float32, batch=1, context=1) == read + 4 * (rows - looked_up) + cache


@pytest.mark.parametrize("config", SOME_DENSE.values(), ids=SOME_DENSE)
def test_each_kind_of_layer_computes_its_own_products(config: ModelConfig) -> None:
    kinds = [replace(config.with_layers(layers), dense_layers=()) for layers in ([1, 2], [0])]
    kinds[1] = replace(kinds[1], experts=None, intermediate_size=100, dense_size=0)
    head = 2 * config.embedding_size * config.vocab_size
    assert decode_flops(config, 1, 9) == sum(decode_flops(kind, 1, 9) for kind in kinds) - head
    both = (region_flops(config, stage, 3, 9) for stage in (Stage.EXPERTS, Stage.MLP))
    apart = [[region_flops(kind, stage, 3, 9) for kind in kinds] for stage in (Stage.EXPERTS, Stage.MLP)]
    assert list(both) == [(2 * mixture + dense) // 3 for mixture, dense in apart]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_many_rows_read_all_experts_and_few_rows_those_that_they_choose(name: str) -> None:
    config = small(name)
    assert config.experts is not None
    share = config.experts.chosen / config.experts.count
    read = [region_bytes(config, Stage.EXPERTS, torch.float32, batch, 7) for batch in (1, 2, 5, 10_000)]
    assert read[-1] == 4 * numbers_of_experts(config)
    for rows, some in zip((1, 2, 5), read, strict=False):
        assert some == round(read[-1] * (1 - (1 - share) ** rows))
    flops = [region_flops(config, Stage.EXPERTS, batch, 7) for batch in (1, 5)]
    assert flops[1] == 5 * flops[0] == 5 * 2 * 3 * config.experts.chosen * config.hidden_size * config.intermediate_size


@each_model
def test_the_regions_of_a_layer_come_to_its_share_of_a_step(name: str) -> None:
    """Uses float32, where vectors have the same size for the fused ops as for the model."""
    config, batch, context = small(name), 3, 40
    one_layer, two_layers = (
        replace(config, num_layers=n, windows=(9,) * n, attention_scales=(1.0,) * n) for n in (1, 2)
    )
    regions = [Stage(stage) for stage in layer_cases(layer_shape(config), Pass(context))]
    expected = [decode_bytes(config, torch.float32, batch, context + 1) for config in (one_layer, two_layers)]
    assert (
        sum(region_bytes(one_layer, region, torch.float32, batch, context) for region in regions)
        == expected[1] - expected[0]
    )
    expected = [decode_flops(config, batch, context + 1) for config in (one_layer, two_layers)]
    assert sum(region_flops(one_layer, region, batch, context) for region in regions) == expected[1] - expected[0]


def test_a_window_limits_what_a_step_reads_and_computes() -> None:
    config = small("mistral", sliding_window=WINDOW)
    assert set(config.windows) == {WINDOW}
    assert decode_bytes(config, torch.float32, 1, 100) == decode_bytes(config, torch.float32, 1, WINDOW)
    assert decode_flops(config, 1, 100) == decode_flops(config, 1, WINDOW)
    within, far = (
        (region_flops(config, *case), region_bytes(config, Stage.ATTENTION, torch.float32, *case[1:]))
        for case in ((Stage.ATTENTION, 1, WINDOW - 1), (Stage.ATTENTION, 1, 10**6))
    )
    assert within == far


def test_layers_with_and_without_a_window_are_averaged() -> None:
    narrow, wide, both = (
        replace(small("gpt-neo"), num_layers=2, attention_scales=(1.0, 1.0), windows=windows)
        for windows in ((9, 9), (None, None), (9, None))
    )
    flops = [region_flops(config, Stage.ATTENTION, 1, 100) for config in (narrow, wide, both)]
    assert flops[2] == (flops[0] + flops[1]) / 2


@pytest.mark.parametrize("shape", REAL, ids=lambda shape: shape.model)
def test_the_real_shapes_of_the_ops_are_those_of_the_presets(shape: LayerShape) -> None:
    assert replace(layer_shape(preset(shape.model)), model=shape.model) == shape


def test_work_is_the_mean_over_the_contexts_of_the_steps() -> None:
    config = small("mistral")
    work = count_work(config, torch.bfloat16, 2, 5, 4)
    steps = [decode_bytes(config, torch.bfloat16, 2, context) for context in (6, 7, 8)]
    assert work.decode_bytes == sum(steps) / 3
    assert work.floor_ms(2.0) == pytest.approx(work.decode_bytes / 2e9 * 1e3)
    assert work.kv_bytes == 2 * 9 * config.kv_bytes_per_token(torch.bfloat16)


def test_an_int8_cache_takes_a_byte_for_a_number_and_two_for_a_scale() -> None:
    config = small("gpt2")
    plain, int8 = (count_work(config, torch.bfloat16, 2, 5, 4, kv_dtype) for kv_dtype in (None, torch.int8))
    heads = config.num_layers * 2 * config.num_kv_heads
    assert plain.kv_bytes - int8.kv_bytes == 2 * 9 * heads * (config.head_dim - 2)
    assert plain.decode_bytes - int8.decode_bytes == 2 * 7 * heads * (config.head_dim - 2)


def test_the_probe_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "unavailable", lambda: None)
    monkeypatch.setattr(roofline, "read_bandwidth_gb_s", lambda threads, seconds: 10.0 * threads)
    monkeypatch.setattr("labkit.kernels.gpu_probe.read_bandwidth_gb_s", lambda seconds: 4e3)
    monkeypatch.setattr("labkit.kernels.gpu.unavailable", lambda: None)
    monkeypatch.setattr("labkit.kernels.gpu.interpreted", lambda: False)
    assert probe_bandwidth(3) == 30
    assert probe_bandwidth(3, torch.device("cuda", 0)) == 4e3
    assert probe_turn(3, torch.device("cuda", 0)) == {ONLY_WAY: 4e3}
    assert probe_bandwidth(3, torch.device("meta")) is None
    monkeypatch.setattr("labkit.kernels.gpu.interpreted", lambda: True)
    assert probe_bandwidth(3, torch.device("cuda", 0)) is None
    assert probe_turn(3, torch.device("cuda", 0)) == {}


def test_an_epoch_has_the_rates_of_the_way_that_was_fastest_over_all_of_it() -> None:
    steady, other = Way(0, 1), Way(1, 2)
    turns = [{steady: 20.0, other: 19.0}, {steady: 21.0, other: 30.0}, {steady: 22.0, other: 18.0}]
    assert rates_of_epoch(turns, 3) == [20.0, 21.0, 22.0]
    assert rates_of_epoch([{}, {}], 3) == [None, None]


@each_model
def test_a_step_with_a_longer_context_takes_longer_by_its_tokens(name: str) -> None:
    work, new = count_work(small(name), torch.float32, 2, 20, 9), 9
    last = (new - 2) / 2  # of the steps of a run, counted from the average one
    longest = decode_bytes(small(name), torch.float32, 2, 20 + new - 1)
    if all(window is None or window > 20 + new for window in small(name).windows):
        assert work.floor_ms(1.0, None, last) == pytest.approx(longest / 1e6)
        assert work.floor_ms(1.0, None, last) > work.floor_ms(1.0)
