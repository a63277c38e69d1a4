"""Contents of a slicing plan, and models that are refused during planning."""

from typing import Any

import pytest
import torch
from helpers.models.sliced_models import ENCODERS, MODELS, WIDE, logits, seeded, t5_config
from torch import Tensor, nn
from transformers import (
    BloomForCausalLM,
    LlamaForCausalLM,
    MptForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    T5ForConditionalGeneration,
)
from transformers.models.t5.modeling_t5 import T5Block

from labkit.engine.parallel.slicing import Kind, Role, RoleSource, SlicingPlan, plan_slicing
from labkit.system.errors import UserError

T5_ROWS = ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")


class MixedHeads(nn.Module):
    """LLaMA's attention with talking heads: every head influences every output."""

    def __init__(self, attention: Any, heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj, self.heads = attention.o_proj, heads
        self.talk = nn.Parameter(torch.randn(heads, heads))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        q, k, v = (
            proj(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = torch.einsum("bhqk,hg->bgqk", (q @ k.transpose(-1, -2)).softmax(-1), self.talk)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), None


class UnreadMLP(nn.Module):
    """An MLP with a linear whose output only the block's output reads."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.unread = nn.Linear(WIDE["hidden_size"], WIDE["hidden_size"])

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.gate_proj(x).sigmoid() * self.up_proj(x))
        return down + self.unread(x)


class NormalisedMLP(nn.Module):
    """An MLP with a norm between its matrices, which mixes the features."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.up_proj, self.down_proj = mlp.up_proj, mlp.down_proj
        self.norm = nn.LayerNorm(WIDE["intermediate_size"])

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.norm(self.up_proj(x)))
        return down


def all_heads_llama() -> LlamaForCausalLM:
    _, config = MODELS["llama"]()
    config.num_key_value_heads, config.head_dim = 6, 8
    return LlamaForCausalLM(config)


def roles(plan: SlicingPlan, block: int) -> dict[str, str]:
    return {name: role.value for name, role in plan.blocks[block].roles.items()}


def test_a_plan_says_what_is_cut_and_why() -> None:
    plan = plan_slicing(seeded("falcon-new"), 4)
    assert str(plan) == (
        "FalconForCausalLM over 4 ranks, 4 all-reduces; row-parallel linears from the flow of data, each cut proved on "
        "a block with random weights\n"
        "FalconDecoderLayer (2 like transformer.h.0): 2 all-reduces per layer\n"
        "  attention: self_attention.query_key_value by columns, self_attention.dense by rows (fused by KV head); "
        "heads 2/2/1/1, KV heads 1/2/1/1; self_attention.num_heads 6 -> 2/2/1/1, "
        "self_attention.num_kv_heads 2 -> 1/2/1/1\n"
        "  feed-forward: mlp.dense_h_to_4h by columns, mlp.dense_4h_to_h by rows (by feature)"
    )


def test_every_linear_of_a_layer_has_a_role() -> None:
    plan = plan_slicing(seeded("deepseek"), 2)
    assert roles(plan, 1) == {
        "self_attn.q_a_proj": "replicated",
        "self_attn.q_b_proj": "column",
        "self_attn.kv_a_proj_with_mqa": "replicated",
        "self_attn.kv_b_proj": "column",
        "self_attn.o_proj": "row",
        "mlp.shared_experts.gate_proj": "column",
        "mlp.shared_experts.up_proj": "column",
        "mlp.shared_experts.down_proj": "row",
    }
    assert plan.roles["model.layers.1.self_attn.o_proj"] == Role.ROW
    assert [unit.kind for unit in plan.blocks[1].units] == [Kind.ATTENTION, Kind.FEATURES, Kind.EXPERTS]


def test_tables_per_head_are_cut_wherever_they_come_from() -> None:
    first, later, *_ = plan_slicing(seeded("t5"), 2).blocks
    assert [cut.name for cut in first.units[0].tensors] == ["layer.0.SelfAttention.relative_attention_bias.weight"]
    assert [cut.argument for cut in later.units[0].arguments] == ["position_bias"]
    bloom = plan_slicing(seeded("bloom"), 2).blocks[0].units[0]
    assert [(cut.argument, cut.heads_at) for cut in bloom.arguments] == [("alibi", "batch")]


def test_experts_are_cut_where_that_is_proved_and_whole_otherwise() -> None:
    mixtral = plan_slicing(seeded("mixtral"), 2).blocks[0]
    assert [cut.name for cut in mixtral.units[1].tensors] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    gpt_oss = plan_slicing(seeded("gpt-oss"), 2).blocks[0]  # the output biases of its experts would be added twice
    assert gpt_oss.replicated == ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def test_a_policy_gives_what_is_found_without_one() -> None:
    model = seeded("t5")
    automatic, by_policy = plan_slicing(model, 3), plan_slicing(model, 3, {T5Block: T5_ROWS})
    assert by_policy.blocks == automatic.blocks
    assert by_policy.chosen_by == "injection_policy"
    assert plan_slicing(model, 3, {"T5Block": list(T5_ROWS)}) == by_policy


def test_transformers_plan_comes_before_the_flow_of_data() -> None:
    named, unnamed = plan_slicing(seeded("llama"), 2), plan_slicing(seeded("gpt2"), 2)
    assert named.chosen_by == "transformers' plan"
    assert unnamed.chosen_by == "the flow of data"
    policy = {"LlamaDecoderLayer": ("self_attn.o_proj", "mlp.down_proj")}
    by_policy = plan_slicing(seeded("llama"), 2, policy)
    assert by_policy.chosen_by == "injection_policy"
    assert by_policy.blocks == named.blocks


def test_units_say_their_source_where_transformers_plan_names_only_some() -> None:
    model = seeded("llama")
    model.tp_plan = {name: style for name, style in model.tp_plan.items() if "mlp" in name}
    plan = plan_slicing(model, 2)
    attention, mlp = plan.blocks[0].units
    assert (attention.sources, mlp.sources) == ((RoleSource.FLOW,), (RoleSource.TRANSFORMERS,))
    assert plan.chosen_by == "the flow of data and transformers' plan"
    assert "(by feature); from transformers' plan" in str(plan)
    assert plan == plan_slicing(seeded("llama"), 2)


@pytest.mark.parametrize(
    ("wrong", "style", "why"),
    [
        ("self_attn.q_proj", "rowwise", "its input does not come from other linears"),
        ("mlp.down_proj", "colwise", "its input comes from mlp.gate_proj, mlp.up_proj, and its output joins"),
        ("mlp.unread", "colwise", "no row-parallel linear reads its output"),
    ],
)
def test_a_wrong_role_in_transformers_plan_is_not_followed_and_named(wrong: str, style: str, why: str) -> None:
    model = all_heads_llama()
    for layer in model.model.layers:
        layer.mlp = UnreadMLP(layer.mlp)
    right = plan_slicing(model, 2)
    model.tp_plan = model.tp_plan | {f"model.layers.*.{wrong}": style}
    plan = plan_slicing(model, 2)
    assert f"transformers' plan makes {wrong}" in str(plan)
    assert why in plan.blocks[0].not_followed[0]
    assert plan.roles == right.roles


def test_errors_of_a_model_that_cannot_run_are_explained() -> None:
    model = seeded("gpt2")
    model.transformer.h[1].mlp.c_fc = nn.Linear(7, 7)
    with pytest.raises(
        UserError, match=r"GPT2LMHeadModel can't be run on a few tokens \(RuntimeError: .*pass example="
    ):
        plan_slicing(model, 2)


def test_the_precision_of_the_weights_does_not_change_the_plan() -> None:
    model = seeded("gemma3")
    assert plan_slicing(model, 3) == plan_slicing(seeded("gemma3").to(torch.bfloat16), 3)


@pytest.mark.parametrize("name", ["t5", "bert"])
def test_planning_leaves_the_model_as_it_was(name: str) -> None:
    model = seeded(name).train()
    original = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    plan_slicing(model, 2)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not [module for module in model.modules() if module._forward_pre_hooks or module._forward_hooks]
    assert all(torch.equal(value, original[key]) for key, value in model.state_dict().items())
    assert torch.isfinite(logits(name, model)).all()


def test_names_near_a_wrong_one_are_offered() -> None:
    model = seeded("t5")
    with pytest.raises(ValueError, match=r"no linear of T5Block .*'SelfAttn\.o'.*did you mean .*'SelfAttention\.o'"):
        plan_slicing(model, 2, {T5Block: (*T5_ROWS, "SelfAttn.o")})
    with pytest.raises(ValueError, match=r"no such block; did you mean 'T5Block'\? It has .*T5Attention"):
        plan_slicing(model, 2, {"T5Blok": T5_ROWS})


def test_a_policy_that_would_compute_something_else_is_refused() -> None:
    model = seeded("t5")
    with pytest.raises(ValueError, match=r"leaves out layer\.1\.EncDecAttention\.o of T5Block"):
        plan_slicing(model, 2, {T5Block: ("SelfAttention.o", "DenseReluDense.wo")})
    with pytest.raises(ValueError, match=r"makes layer\.0\.SelfAttention\.q of T5Block row-parallel, but"):
        plan_slicing(model, 2, {T5Block: (*T5_ROWS, "SelfAttention.q")})


@pytest.mark.parametrize(
    ("name", "ranks", "largest"),
    [("t5", 6, 5), ("marian", 5, 4), ("gemma", 7, 6), ("falcon-mqa", 8, 6), ("gpt2", 9, 5)],
)
def test_more_ranks_than_heads_names_the_largest_degree(name: str, ranks: int, largest: int) -> None:
    with pytest.raises(ValueError, match=f"by {ranks} ranks; the largest degree that works is {largest}$"):
        plan_slicing(seeded(name), ranks)
    assert plan_slicing(seeded(name), largest).tp_size == largest


def test_attention_that_mixes_heads_stays_whole_and_is_named() -> None:
    model = all_heads_llama()
    model.model.layers[1].self_attn = MixedHeads(model.model.layers[1].self_attn, heads=6)
    plan = plan_slicing(model, 2)
    assert "model.layers.1.self_attn (MixedHeads) can't be shared by 2 ranks" in str(plan)
    assert {plan.roles[name] for name in plan.roles if "layers.1.self_attn" in name} == {Role.WHOLE}
    assert plan.roles["model.layers.0.self_attn.q_proj"] == Role.COLUMN


def test_an_mlp_that_mixes_features_stays_whole_and_is_named() -> None:
    model = all_heads_llama()
    model.model.layers[0].mlp = NormalisedMLP(model.model.layers[0].mlp)
    plan = plan_slicing(model, 3)
    assert "model.layers.0.mlp (NormalisedMLP) can't be shared by 3 ranks" in str(plan)


def test_norms_over_all_heads_leave_attention_whole() -> None:
    plan = plan_slicing(Olmo2ForCausalLM(Olmo2Config(**WIDE, num_key_value_heads=3)), 2)
    assert [unit.kind for unit in plan.blocks[0].units] == [Kind.FEATURES]


def test_what_a_policy_names_is_refused_if_it_cannot_be_cut() -> None:
    model = Olmo2ForCausalLM(Olmo2Config(**WIDE, num_key_value_heads=3))
    with pytest.raises(ValueError, match=r"self_attn \(Olmo2Attention\) can't be shared by 2 ranks"):
        plan_slicing(model, 2, {"Olmo2DecoderLayer": ("self_attn.o_proj", "mlp.down_proj")})


def test_a_model_without_layers_or_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="has no list of layers; name its layer class"):
        plan_slicing(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2)
    with torch.device("meta"):
        empty = T5ForConditionalGeneration(t5_config())
    with pytest.raises(ValueError, match="meta device; load them"):
        plan_slicing(empty, 2)


def test_quantised_weights_are_refused() -> None:
    model = seeded("opt")
    model.model.decoder.layers[1].fc1.weight = nn.Parameter(torch.zeros(52, 40, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"model\.decoder\.layers\.1\.fc1 has weights of torch\.int8"):
        plan_slicing(model, 2)


def test_a_model_that_does_not_take_tokens_wants_an_example() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    with pytest.raises(ValueError, match="it has no config\\); pass example="):
        plan_slicing(Layers(), 2)
    plan = plan_slicing(Layers(), 2, example={"x": torch.randn(3, 5, 6)})
    assert roles(plan, 0) == {"0": "column", "2": "row"}


@pytest.mark.parametrize("heads", [2, 3, 5, 7, 11])
@pytest.mark.parametrize("model_class", [BloomForCausalLM, MptForCausalLM, LlamaForCausalLM])
def test_any_number_of_heads_is_told_from_batch_and_length(model_class: Any, heads: int) -> None:
    config = model_class.config_class(vocab_size=99, hidden_size=8 * heads, num_attention_heads=heads)
    config.num_hidden_layers, config.intermediate_size, config.num_key_value_heads = 1, 16, heads
    unit = plan_slicing(model_class(config), 2).blocks[0].units[0]
    assert len(unit.arguments) == (model_class is not LlamaForCausalLM)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_have_two_all_reduces_per_layer(name: str) -> None:
    assert plan_slicing(seeded(name), 2).all_reduces == 4
