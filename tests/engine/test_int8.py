"""Engines with int8 weights. Everything else is as in a bfloat16 engine, so the bounds of bfloat16 and of quantisation
add up.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.models.engines import FEW, IMPLS, distance, fused, greedy, prompt, vanilla
from helpers.models.small_models import ALL_EXPERTS, DENSE, SMALL_CONFIGS, small_model
from helpers.sweeps import crossed, swept
from torch import Tensor
from transformers import PreTrainedModel

import labkit
from labkit.engine import InferenceEngine
from labkit.models.policies import policy_for
from labkit.models.shards import shard
from labkit.weights.quantise import Quantization, check_schemes

LOGITS = 0.15  # of the spread of the logits, root mean square
TEXT = Path(__file__).parents[2] / "LICENSE"
QUANT = {
    "rows": {},
    "groups": {"weight": {"q_groups": 4}},
    "head": {"lm_head": True},
    "asymmetric": {"weight": {"q_type": "asymmetric"}, "lm_head": {"q_groups": 2}},
    "flat": {"flat": {"groups": 4}},
}
FOUR = {"weight": {"num_bits": 4, "q_groups": 2, "q_type": "asymmetric"}, "lm_head": True}
quants = pytest.mark.parametrize("quant", QUANT.values(), ids=QUANT)


def int8(name: str, quant: dict[str, object] | None = None, impl: str = "cpp") -> InferenceEngine:
    return labkit.init_inference(vanilla(name), dtype=torch.int8, quant=quant or {}, impl=impl)


@pytest.mark.parametrize(("name", "impl", "quant"), crossed(SMALL_CONFIGS.keys(), IMPLS, QUANT))
@pytest.mark.usefixtures("poisoned")
def test_logits_of_prompt_and_steps_are_near_float32(name: str, impl: str, quant: dict[str, object]) -> None:
    model, ids = small_model(name, **ALL_EXPERTS.get(name, {})), prompt(3, 15)
    engine = labkit.init_inference(model, dtype=torch.int8, quant=quant, impl=impl)
    out = engine(ids[:, :12])
    steps = engine(ids[:, 12:], past_key_values=out.past_key_values).logits
    assert 0 < distance(torch.cat((out.logits, steps), dim=1), labkit.init_inference(model)(ids).logits) < LOGITS


def rounding(name: str) -> float:
    """The largest distance between two impls, which differ only by how rows and the cache are rounded. GPT-Neo is most
    sensitive, as it does not scale its scores.
    """
    return LOGITS if name == "gpt-neo" else 5e-2


@pytest.mark.parametrize(("name", "quant"), crossed(FEW, QUANT))
def test_both_impls_quantise_alike(name: str, quant: dict[str, object]) -> None:
    ids = prompt(2, 13)
    expected = int8(name, quant, "reference")(ids).logits
    assert distance(int8(name, quant)(ids).logits, expected) < rounding(name)


@pytest.mark.parametrize("name", swept(DENSE, FEW))  # rounding may change the choice of experts
@pytest.mark.usefixtures("poisoned")
def test_four_bits_are_the_same_in_both_impls(name: str) -> None:
    ids = prompt(2, 13)
    expected = int8(name, FOUR, "reference")(ids).logits
    assert distance(int8(name, FOUR)(ids).logits, expected) < rounding(name)
    assert distance(expected, fused(name)(ids).logits) < 1


@pytest.mark.parametrize("weight_options", [{"group_size": 64}, {"num_bits": 4, "group_size": 128}])
def test_groups_that_do_not_divide_a_matrix_are_named_with_what_does(weight_options: dict[str, int]) -> None:
    model = small_model(
        "llama", hidden_size=96, intermediate_size=192, num_attention_heads=3, num_key_value_heads=3, head_dim=32
    )
    with pytest.raises(ValueError, match=r"does not divide the 96 inputs of qkv.weight; expected 32, or q_groups=1"):
        labkit.init_inference(model, quant={"weight": weight_options})


@pytest.mark.parametrize(
    ("weight_options", "fitting"),
    [
        ({"q_groups": 7}, "1, 2, 3, 4, 6"),
        ({"q_groups": 10**9}, "1, 2, 3, 4, 6"),
        ({"q_groups": 72}, "1, 2, 3, 4, 6"),
        ({"num_bits": 4, "q_groups": 6}, "1, 2, 3"),
    ],
)
def test_groups_that_a_row_cannot_be_cut_into_are_refused(weight_options: dict[str, int], fitting: str) -> None:
    """Even if rounding to sizes that the kernels take would give fewer groups than requested."""
    with pytest.raises(ValueError, match=rf"the 72 inputs of qkv.weight into .* one of {fitting}"):
        int8("llama", {"weight": weight_options})


def test_a_cut_between_ranks_within_a_group_is_refused() -> None:
    model = small_model(
        "llama", hidden_size=192, intermediate_size=192, num_attention_heads=4, num_key_value_heads=4, head_dim=48
    )
    policy = policy_for(model.config)
    part = shard(policy.model_config(model.config), 4, 1)
    with pytest.raises(ValueError, match=r"groups of 64 inputs cannot be cut at input 48, between two ranks"):
        check_schemes(part, Quantization.model_validate({"weight": {"num_bits": 4, "group_size": 64}}))


def test_extra_groups_want_an_mlp_of_four_to_one() -> None:
    """DeepSpeed does not change the groups of any other matrix."""
    labkit.init_inference(small_model("gpt2"), quantization_setting=(True, 2))
    with pytest.raises(ValueError, match=r"doubles the groups of matrices whose sides are 4 to 1, and ff1.weight is"):
        labkit.init_inference(small_model("llama"), quantization_setting=(True, 2))


@pytest.mark.usefixtures("isa", "poisoned")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_instruction_set_gives_the_same_logits(name: str) -> None:
    ids = prompt(3, 13)
    assert distance(int8(name)(ids).logits, fused(name)(ids).logits) < LOGITS


@pytest.mark.parametrize("name", FEW)
def test_repeated_runs_are_bitwise_the_same(name: str) -> None:
    engine, ids = int8(name), prompt(3, 9)
    first = greedy(engine, ids, 20)
    assert all(torch.equal(greedy(engine, ids, 20), first) for _ in range(20))


def test_stage_by_stage_equals_one_call() -> None:
    engine, ids = int8("llama"), prompt(2, 9)
    with engine.module.runner.stage_by_stage():
        staged = engine(ids).logits
    assert distance(staged, engine(ids).logits) < 1e-5


@cache
def trained() -> tuple[PreTrainedModel, Tensor]:
    """A small model trained to continue a text, and tokens [1, 512] of that text that were not used in training."""
    source = labkit.resolve("tiny-llama")
    model, tokens = source.hf_model(torch.float32), source.tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[0]
    training_tokens, test_tokens = tokens[:-512], tokens[-512:]
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(120):
        starts = torch.randint(len(training_tokens) - 64, (16,), generator=generator)
        batch = torch.stack([training_tokens[start : start + 64] for start in starts])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), test_tokens[None]


@quants
def test_the_perplexity_of_a_text_changes_by_less_than_a_hundredth(quant: dict[str, object]) -> None:
    model, text = trained()
    losses = [
        labkit.init_inference(model, dtype=dtype, quant=options)(text, labels=text).loss
        for dtype, options in ((torch.float32, {}), (torch.int8, quant))
    ]
    assert losses[0] < 0.7 * torch.tensor(model.config.vocab_size).log(), "the model has learnt nothing"
    assert abs(torch.expm1(losses[1] - losses[0])) <= 0.01


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("quant", ["rows", "groups", "asymmetric"])
def test_weights_too_small_for_a_fine_scale_are_said_to_be_lost(
    quant: str, impl: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model("llama")
    small = model.model.layers[1].mlp.down_proj.weight
    small.data *= 1e-6
    with caplog.at_level("WARNING", logger="labkit"):
        labkit.init_inference(model, dtype=torch.int8, quant=QUANT[quant], impl=impl)
    (message,) = (record.getMessage() for record in caplog.records if "float16" in record.getMessage())
    assert message.startswith("layer 1, ff2.weight: 100.0% of its groups have weights so small that a scale in float16")
    assert message.endswith("to keep them, pass a floating dtype")


def test_small_weights_beside_large_ones_and_zeros_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model("llama")
    weight = model.model.layers[0].mlp.down_proj.weight.data
    weight[0] *= 1e-6
    weight[1] = 0
    with caplog.at_level("WARNING", logger="labkit"):
        labkit.init_inference(model, dtype=torch.int8)
    assert not [record for record in caplog.records if "float16" in record.getMessage()]
