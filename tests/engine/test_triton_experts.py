"""Mixtures of experts with impl="triton", in Triton's interpreter: prompts run op by op, decode steps as on a GPU."""

import sys
from functools import cache
from typing import Any

import pytest
import torch
from helpers.kernels.gpus import INTERPRETED
from helpers.kernels.ops import Draw, distance
from helpers.models.engines import error, greedy, profiled, prompt, result, shallow
from helpers.models.offloaded import least_resident_gb
from helpers.models.small_models import ALL_EXPERTS, small_model
from helpers.sweeps import crossed, swept

import labkit
from labkit.engine import InferenceEngine
from labkit.engine.runners.layer import OpMixture, ops
from labkit.kernels import LayerWeights, Router, gpu
from labkit.kernels.decode_step import MixtureMlp, SharedExpert
from labkit.kernels.decode_step.triton_mixture import TritonMixture
from labkit.kernels.layer import Mixture, Sum
from labkit.kernels.types import NO_NORM, AttentionParams, Linear, MlpWeights, QkvWeights
from labkit.system.errors import UnsupportedError

pytestmark = INTERPRETED
TOLERANCE = 1e-4  # of the range of the logits, compared with transformers in float32
MASK = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1] * 5])
PADDED = prompt(3, 5).where(MASK.bool(), 0)
MODELS = ("mixtral", "mixtral-windowed", "qwen2-moe", "qwen3-moe", "qwen3-moe-shares", "granite-moe", "gpt-oss")
CHOICE = (("route_logits", "route"), ("choose_experts", "route"))
PRODUCTS = (("experts_up", "experts"), ("experts_down", "experts"), ("experts_sum", "experts"))
SHARED = (("mlp_gemm", "mlp"), ("gemm", "mlp_out"), ("gemm", "mlp_out"), ("add_gated", "mlp_out"))


@cache
def engine_of(name: str) -> InferenceEngine:
    return labkit.init_inference(shallow(name, 2), impl="triton")


def of_mixture(engine: InferenceEngine) -> list[tuple[str, str]]:
    """The kernels of the latest step after the attention of layer 1, each with its stage."""
    nodes = [(node.kernel, node.stage.rpartition("/")[2]) for node in engine.graph_nodes if "layer.1" in node.stage]
    return nodes[nodes.index(("gemm", "attn_out")) + 1 :]


@pytest.mark.parametrize("name", swept(MODELS, ["mixtral", "qwen2-moe", "gpt-oss"]))
def test_tokens_equal_those_of_cpp_and_vanilla(name: str) -> None:
    """One sequence, and a padded batch of three, for which four are computed; and the kernels of the steps."""
    engine, model, shared = engine_of(name), shallow(name, 2), SHARED if name == "qwen2-moe" else ()
    cpp = labkit.init_inference(model, impl="cpp")
    tokens = greedy(engine, PADDED[2:], 3)
    assert of_mixture(engine) == [*CHOICE, *PRODUCTS, *shared]
    assert torch.equal(tokens, greedy(cpp, PADDED[2:], 3))
    tokens = greedy(engine, PADDED, 3, attention_mask=MASK)
    assert of_mixture(engine) == [*CHOICE, ("sort_choices", "experts"), *PRODUCTS, *shared]
    assert torch.equal(tokens, greedy(cpp, PADDED, 3, attention_mask=MASK))
    for row, visible in enumerate(MASK.bool()):
        assert torch.equal(tokens[row, 5:], greedy(model, PADDED[row, visible][None], 3)[0, -3:])


@pytest.mark.parametrize("name", swept(MODELS, ["qwen3-moe"]))
@pytest.mark.usefixtures("poisoned")
def test_logits_of_prompt_and_steps_equal_the_full_forward(name: str) -> None:
    model, text = engine_of(name).module, prompt(2, 14)
    cache = model.new_cache()
    logits = [result(model, text[:, :12], cache, keep=12)]
    logits += [result(model, text[:, index, None], cache, follows=True) for index in (12, 13)]
    with torch.no_grad():
        expected = shallow(name, 2)(text).logits
    assert error(torch.cat(logits, dim=1), expected) <= TOLERANCE


QUANTS: dict[str, dict[str, Any]] = {
    "int4": {"quant": {"weight": {"num_bits": 4, "q_groups": 2, "q_type": "asymmetric"}}},
    "int8": {"dtype": torch.int8},
    "fp16": {"dtype": torch.float16},
}


@pytest.mark.parametrize(("options", "name"), crossed(QUANTS, ["qwen2-moe", "mixtral"]))
def test_narrow_weights_equal_the_reference_on_the_same_weights(options: dict[str, Any], name: str) -> None:
    """They differ only by the rounding of rows and of the cache. All experts are chosen: rounding changes no choice."""
    model, text = small_model(name, num_hidden_layers=2, **ALL_EXPERTS[name]), prompt(2, 5)
    logits = []
    for impl in ("reference", "triton"):
        module = labkit.init_inference(model, impl=impl, **options).module
        cache = module.new_cache()
        prefill = result(module, text[:, :4], cache, keep=4)
        logits.append(torch.cat((prefill, result(module, text[:, 4:], cache, follows=True)), dim=1).float())
    expected, actual = logits
    assert 0 < (actual - expected).square().mean().sqrt() / expected.std() < 5e-2


def test_streamed_layers_with_experts_equal_resident_ones() -> None:
    model, offload = shallow("qwen2-moe", 3), {"device": "cpu", "slots": 2}
    least = least_resident_gb(model, offload, impl="triton")
    streamed = labkit.init_inference(model, impl="triton", offload=offload | {"resident_gb": least})
    assert streamed.streamed is not None
    resident = labkit.init_inference(model, impl="triton")
    assert torch.equal(greedy(streamed, prompt(2, 4), 3), greedy(resident, prompt(2, 4), 3))


def test_profilers_see_the_stages_of_a_mixture() -> None:
    messages = profiled(lambda: greedy(engine_of("qwen2-moe"), prompt(1, 4), 2))
    stages = ["qkv", "attention", "attn_out", "route", "experts", "mlp", "mlp_out"]
    assert [text for text in messages if "decode/layer.0" in text] == [f"decode/layer.0/{name}" for name in stages]
    prefill = [text.rpartition("/")[2] for text in messages if "prefill/layer.0" in text]
    assert prefill == [*stages, "residual"]


def mixture_layer(*, gated: bool, shared: bool, output_norms: bool) -> LayerWeights:
    """A layer whose mixture alone is used: four experts, of which a row passes two."""
    draw, hidden = Draw(), 24

    def linear(outputs: int, inputs: int) -> Linear:
        return draw.linear(outputs, inputs, bias=False)[0]

    norms = [draw.norm("rms" if output_norms else "none", hidden) for _ in range(2)]
    one = SharedExpert(
        MlpWeights(NO_NORM, linear(20, hidden), "silu", gated=True),
        linear(hidden, 10),
        linear(1, hidden) if gated else None,
    )
    mixture = MixtureMlp(
        Router(draw.norm("rms", hidden), linear(4, hidden), 2, True, norms[0]),
        own=range(4),
        ups=linear(4 * 2 * 16, hidden),
        outs=linear(4 * hidden, 16),
        activation="silu",
        gated=True,
        hidden=hidden,
        out_norm=norms[1],
        shared=one if shared else None,
    )
    qkv = QkvWeights(NO_NORM, linear(1, hidden))
    return LayerWeights(qkv, AttentionParams(1.0), linear(hidden, 1), draw.normal(hidden), mixture)


def passed(mixture: Mixture, total: Sum) -> Sum:
    routed, total = mixture.route(total)
    total = mixture.experts(routed, total)
    return mixture.mlp_out(mixture.mlp(routed), routed, total) if mixture.shares_one else total


@pytest.mark.parametrize("output_norms", [False, True], ids=["", "output norms"])
@pytest.mark.parametrize(("shared", "gated"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_a_step_s_mixture_equals_that_of_the_reference_ops(
    rows: int, shared: bool, gated: bool, output_norms: bool
) -> None:
    layer, draw = mixture_layer(gated=gated, shared=shared, output_norms=output_norms), Draw(seed=1)
    residual, product = draw.normal(rows, 24), draw.normal(rows, 24)
    assert isinstance(layer.mlp, MixtureMlp)
    assert layer.attn_bias is not None
    expected = passed(OpMixture(ops("reference", 1), layer.mlp, layer.attn_bias), Sum(residual, (product,)))
    buffer, act = torch.empty(rows, 24), torch.empty(rows, 10)
    mixture = TritonMixture.of(layer, gpu.Launcher(), buffer, act)
    assert mixture is not None
    # without a norm the attention's output is in the residual
    given = Sum(residual, (product,)) if output_norms else Sum(residual + product + layer.attn_bias)
    actual = passed(mixture, given)
    assert len(actual.products) == output_norms
    if output_norms:
        assert distance(actual.residual, expected.residual) <= 1e-5
        assert distance(actual.products[0], expected.products[0]) <= 1e-5
    else:
        assert actual.residual is buffer
        assert distance(buffer, expected.residual + expected.products[0]) <= 1e-5


def refusal(name: str) -> str:
    with pytest.raises(UnsupportedError) as refused:
        labkit.init_inference(shallow(name, 1), impl="triton")
    return str(refused.value)


def test_what_the_kernels_lack_is_refused_by_name_and_runs_in_hooks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = "norms over all heads together are not in the Triton kernels yet"
    assert refusal("olmoe") == f"{norms}; pass impl='cpp'"
    assert labkit.init_inference(shallow("mixtral", 1), impl="triton").impl == "triton"
    monkeypatch.setattr(sys.modules["labkit.engine.init_inference"], "chosen_impl", lambda requested: "triton")
    engine = labkit.init_inference(shallow("olmoe", 1))
    assert engine.level == "hooks"
    assert norms in engine.why
