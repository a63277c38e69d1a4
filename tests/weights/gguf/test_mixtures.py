"""GGUF files of mixtures of experts whose rows are derived: dense layers, shared experts, biases of the choice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.gguf_files import gguf_model, logits_of, write_gguf
from helpers.models.gguf_mixtures import CHOICE_BIAS, DERIVED_MIXTURES
from helpers.sweeps import swept
from torch import Tensor

from labkit.engine import init_inference
from labkit.kernels.gemm import unpack_rows
from labkit.kernels.types import Linear
from labkit.models.policies import policy_for
from labkit.models.shards import Cut, cut_of, shard
from labkit.system.errors import UserError
from labkit.weights.gguf.tensors import GgufTensors, NativeWeights
from labkit.weights.resolve import resolve

TOKENS = torch.arange(1, 41)[None]
NAMES = swept([*DERIVED_MIXTURES], ["glm-4.5", "ernie-4.5"])
CODED = swept([*DERIVED_MIXTURES], ["glm-4.5", "granite-moe-shared"])
# MiniMax-M2 has norms over all heads, which cannot be cut.
CUT = swept([name for name in DERIVED_MIXTURES if name != "minimax-m2"], ["glm-4.5", "granite-moe-shared"])
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_a_derived_mixture_is_its_model(name: str, tmp_path: Path) -> None:
    model = gguf_model(name)
    source = resolve(write_gguf(tmp_path / "model.gguf", model))
    read = source.hf_model(torch.float32).state_dict()
    assert not [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, read[key])]
    engine = init_inference(source)
    assert engine.level == "derived row"
    logits, expected = logits_of(engine, TOKENS), logits_of(model, TOKENS)
    assert float((logits - expected).norm() / expected.norm()) < 1e-4
    texts = [side.generate(TOKENS, max_new_tokens=8, do_sample=False, eos_token_id=None) for side in (engine, model)]
    assert torch.equal(*texts)


def of_file(tensors: GgufTensors) -> Callable[[str, Cut | None], Tensor]:
    return lambda name, cut: tensors.get(name, torch.float32, cut)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", CODED)
def test_codes_of_experts_stay_as_they_are(name: str, kind: str, tmp_path: Path) -> None:
    tensors = resolve(write_gguf(tmp_path / "model.gguf", gguf_model(name), kind)).weights
    assert isinstance(tensors, GgufTensors)
    config = policy_for(tensors.file.config).model_config(tensors.file.config)
    native = NativeWeights(tensors, shard(config))
    for index in range(config.num_layers):
        for role, expected in tensors.policy.layer_tensors(shard(config), index, of_file(tensors)).items():
            weight = native.load(role, index, lambda shape, dtype: torch.empty(shape, dtype=dtype))
            if isinstance(weight, Tensor):
                assert torch.equal(weight, expected)
                continue
            assert isinstance(weight, Linear)
            router = role == "router.weight"  # a file has it in floats
            assert torch.equal(
                unpack_rows(weight, torch.arange(weight.outputs)), expected.bfloat16().float() if router else expected
            )
            assert router or weight.bits == int(kind[1]), role


@pytest.mark.parametrize("name", CUT)
def test_each_rank_reads_its_part_of_a_file(name: str, tmp_path: Path) -> None:
    model = gguf_model(name)
    tensors = resolve(write_gguf(tmp_path / "model.gguf", model)).weights
    assert isinstance(tensors, GgufTensors)
    policy, stored = policy_for(model.config), model.state_dict()
    config = policy.model_config(model.config)
    of_model: Callable[[str, Cut | None], Tensor] = lambda key, cut: cut_of(key, stored[key], cut)  # noqa: E731
    for rank in range(2):
        part = shard(config, 2, rank)
        for index in range(config.num_layers):
            expected = policy.layer_tensors(part, index, of_model)
            read = tensors.policy.layer_tensors(part, index, of_file(tensors))
            assert not [key for key in expected if not torch.equal(read[key], expected[key])]


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    """A converter counts them as layers of the model."""
    model = gguf_model("glm-4.5-air")
    layer = {f"blk.4.{name}.weight": torch.ones(96) for name in ("attn_norm", "nextn.enorm", "nextn.hnorm")}
    counts = {"glm4moe.block_count": 5, "glm4moe.nextn_predict_layers": 1}
    file = write_gguf(tmp_path / "model.gguf", model, extra=layer, metadata=counts)
    source = resolve(file)
    assert source.hf_config.num_hidden_layers == 4
    assert torch.allclose(logits_of(source.hf_model(torch.float32), TOKENS), logits_of(model, TOKENS), atol=1e-4)
    other = {"blk.5.attn_norm.weight": torch.ones(96)}
    file = write_gguf(tmp_path / "other.gguf", model, extra=layer | other, metadata=counts)
    with pytest.raises(UserError, match=r"do not fit Glm4MoeForCausalLM with 4 layers \(.*blk.5.attn_norm.weight"):
        resolve(file)


def test_keys_that_a_file_may_lack(tmp_path: Path) -> None:
    """llama.cpp's defaults: sigmoids as scores, which are neither divided by their sum nor scaled."""
    lacking = ("expert_gating_func", "expert_weights_norm", "expert_weights_scale", "expert_group_count")
    file = write_gguf(
        tmp_path / "model.gguf", gguf_model("glm-4.5-air"), metadata={f"glm4moe.{key}": None for key in lacking}
    )
    config = resolve(file).hf_config
    assert (config.norm_topk_prob, config.routed_scaling_factor, config.n_group) == (False, 1.0, 1)


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("glm-4.5-air", {"expert_feed_forward_length": None}, "has no glm4moe.expert_feed_forward_length"),
        ("glm-4.5-air", {"expert_count": None}, "has no glm4moe.expert_count"),
        ("glm-4.5-air", {"expert_count": 5}, r"blk.\d.\S* is of shape \[6.*, expected \[(5|320|480)"),
        ("glm-4.5-air", {"expert_count": 1 << 31}, "n_routed_experts = 2147483648; expected an integer from 1 to"),
        ("glm-4.5-air", {"expert_used_count": 7}, "expert_used_count is 7 with 6 experts; expected at most 6"),
        ("glm-4.5-air", {"leading_dense_block_count": 4}, "leading_dense_block_count is 4; expected less than the 4"),
        ("glm-4.5-air", {"leading_dense_block_count": 2}, "3 missing: blk.1.ffn_down.weight"),
        ("glm-4.5-air", {"nextn_predict_layers": 4}, "nextn_predict_layers is 4; expected less than .*block_count, 4"),
        ("glm-4.5-air", {"nextn_predict_layers": 1 << 31}, "nextn_predict_layers is 2147483648; expected less than"),
        ("glm-4.5-air", {"expert_gating_func": 1}, "expert_gating_func is 1; expected 2, sigmoid"),
        ("glm-4.5-air", {"expert_weights_norm": 1}, "expert_weights_norm is 1, expected true or false"),
        ("glm-4.5-air", {"expert_group_count": 2}, "glm4moe.expert_group_count, which is not supported"),
        ("glm-4.5-air", {"expert_shared_count": 2}, r"shexp.weight is of shape \[.*, expected \[.*128"),
        ("ernie-4.5", {"expert_gating_func": 2}, "expert_gating_func is 2; expected 1, softmax"),
        ("ernie-4.5", {"expert_shared_feed_forward_length": 32}, "is 32; expected 64, 2 times the width of an expert"),
        ("exaone", {"attention.sliding_window_pattern": [True] * 4}, "has windows of 4 of 5 layers"),
        ("exaone", {"attention.sliding_window": None}, "has no exaone-moe.attention.sliding_window"),
        ("granite-moe-shared", {"expert_shared_feed_forward_length": None}, "ffn_down_shexp.weight"),
    ],
)
def test_metadata_that_describes_no_mixture_is_said(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = gguf_model(name)
    prefix = {"glm-4.5-air": "glm4moe", "ernie-4.5": "ernie4_5-moe", "exaone": "exaone-moe"}.get(name, "granitemoe")
    changed = {f"{prefix}.{key}": value for key, value in metadata.items()}
    with pytest.raises(UserError, match=message):
        resolve(write_gguf(tmp_path / "model.gguf", model, metadata=changed))


@pytest.mark.parametrize("stored", ["blk.2.ffn_up_exps.weight", "blk.1.exp_probs_b.bias", "blk.0.ffn_gate.weight"])
def test_a_missing_tensor_of_a_mixture_is_named(stored: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", gguf_model("glm-4.5-air"), without=[stored])
    with pytest.raises(UserError, match=f"1 missing: {stored}"):
        resolve(file)


@pytest.mark.parametrize(
    ("stored", "shape", "expected"),
    [
        ("blk.2.ffn_up_exps.weight", (6, 32, 96), r"\[384, 96\]"),
        ("blk.2.ffn_up_exps.weight", (4, 96, 96), r"\[384, 96\]"),
        ("blk.1.exp_probs_b.bias", (4,), r"\[6\]"),
        ("blk.1.exp_probs_b.bias", (2, 3), r"\[6\]"),
        ("blk.3.ffn_gate_shexp.weight", (96, 64), r"\[64, 96\]"),
    ],
)
def test_a_tensor_of_a_mixture_of_another_shape_is_named(
    stored: str, shape: tuple[int, ...], expected: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "model.gguf", gguf_model("glm-4.5-air"), extra={stored: torch.zeros(shape)})
    with pytest.raises(UserError, match=rf"{stored} is of shape \[{shape[0]}.*, expected {expected}"):
        resolve(file)


def test_a_bias_of_the_choice_may_be_a_matrix_of_one_row(tmp_path: Path) -> None:
    """As ERNIE's class has it, and so its files; others have a vector."""
    model = gguf_model("glm-4.5-air")
    name = f"model.layers.1.mlp.gate.{CHOICE_BIAS}"
    rows = {"blk.1.exp_probs_b.bias": model.state_dict()[name][None]}
    read = resolve(write_gguf(tmp_path / "model.gguf", model, extra=rows)).hf_model(torch.float32).state_dict()
    assert torch.equal(read[name], model.state_dict()[name])
