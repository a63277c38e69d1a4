"""Models without a row: transformers' code with packed linears gives transformers' results."""

from typing import Any

import pytest
import torch
from helpers.models.any_models import any_model, padded_tokens, texts
from helpers.sweeps import swept
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.models.qwen3_5 import modeling_qwen3_5

import labkit
from labkit.engine.engine import InjectedEngine
from labkit.engine.injected.experts import ExpertsApart, InjectedExperts
from labkit.engine.injected.inject import inject
from labkit.engine.injected.single_tokens import attention
from labkit.models.observed.calls import distance
from labkit.system.errors import UserError
from labkit.weights.quantise import Quantization

MODELS = ("falcon", "phimoe", "deepseek_v3", "mamba", "qwen3_5_text", "nemotron_h", "gpt_oss", "opt")
FLOATS = Quantization()


@pytest.mark.parametrize("name", swept(list(MODELS), ["falcon", "phimoe"]))
def test_tokens_are_transformers_own(name: str) -> None:
    model = any_model(name)
    injected = inject(model, torch.float32, FLOATS)
    assert injected.replaced
    assert torch.equal(texts(injected.model), texts(model))


def test_an_encoder_with_a_decoder_gives_its_own_tokens() -> None:
    config = T5Config(
        vocab_size=128,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).eval()
    engine = labkit.init_inference(model, dtype=torch.float32)
    assert isinstance(engine, InjectedEngine)
    assert torch.equal(texts(engine), texts(model))


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"dtype": torch.bfloat16}, 0.03),
        ({"dtype": torch.float16}, 0.01),
        ({"dtype": torch.int8}, 0.05),
        ({"quant": {"weight": {"num_bits": 4, "group_size": 32}}}, 0.5),
    ],
)
def test_other_types_stay_near(options: dict[str, Any], most: float) -> None:
    model = any_model("persimmon")
    ids, mask = padded_tokens()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[mask.bool()]
        logits = labkit.init_inference(model, **options)(ids, attention_mask=mask).logits[mask.bool()]
    assert 0 < distance(logits, expected) < most


def test_the_engine_says_its_level_and_what_was_replaced() -> None:
    engine = labkit.init_inference(any_model("phimoe"), dtype=torch.float32)
    assert (engine.level, engine.impl) == ("hooks", "cpp")
    assert isinstance(engine, InjectedEngine)
    assert "a router that no row describes" in engine.why
    heads = "model.layers.*.self_attn"
    assert f"4 x joined linears: {heads}.q_proj, {heads}.k_proj, {heads}.v_proj" in engine.replaced
    assert repr(engine).startswith("InjectedEngine(\n  level=hooks, impl=cpp\n")


def test_the_original_stays_as_it_is() -> None:
    model = any_model("falcon")
    before, tokens = {name: tensor.clone() for name, tensor in model.state_dict().items()}, texts(model)
    inject(model, torch.bfloat16, FLOATS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(texts(model), tokens)


def test_a_consumed_model_has_no_packed_weights_any_more() -> None:
    model = any_model("falcon")
    expected = texts(model)
    injected = inject(model, torch.float32, FLOATS, consume=True)
    assert model.transformer.h[0].mlp.dense_h_to_4h.weight.numel() == 0
    assert torch.equal(texts(injected.model), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_model_has_no_packed_weights_any_more(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that an embedding keeps is not freed."""
    if not tied:
        monkeypatch.setattr("labkit.engine.injected.inject._embedding_scale", lambda embedding: None)
    loaded: list[PreTrainedModel] = []

    def load() -> PreTrainedModel:
        loaded.append(any_model("falcon"))
        return loaded[-1]

    injected = inject(load, torch.float32, FLOATS)
    assert loaded[-1].transformer.h[0].mlp.dense_h_to_4h.weight.numel() == 0
    assert (loaded[-1].lm_head.weight.numel() == 0) is tied
    assert torch.equal(texts(injected.model), texts(any_model("falcon")))


def test_tied_weights_are_in_memory_once() -> None:
    injected = inject(any_model("falcon"), torch.float32, FLOATS)
    kinds = [made.kind for made in injected.replaced]
    assert kinds.count("head") == kinds.count("embedding") == 1
    assert "transformer.word_embeddings.weight" not in dict(injected.model.named_parameters())


def test_a_hooked_linear_stays_and_is_named() -> None:
    model = any_model("falcon")
    linear = model.transformer.h[1].self_attention.dense
    linear.register_forward_hook(lambda module, args, output: output * 2)
    injected = inject(model, torch.float32, FLOATS)
    assert "has the forward hook" in injected.left["transformer.h.1.self_attention.dense"]
    assert torch.equal(texts(injected.model), texts(model))


def test_a_linear_that_may_choose_experts_is_not_quantised() -> None:
    small = any_model("qwen3_5_text", linear_num_value_heads=2, linear_num_key_heads=2)
    injected = inject(small, torch.int8, FLOATS)
    layer = injected.model.model.layers[0].linear_attn
    assert [part.matrices[0].scales is None for part in (layer.in_proj_a, layer.in_proj_b)] == [True, True]
    assert [part.matrices[0].scales is None for part in (layer.in_proj_qkv, layer.out_proj)] == [False, False]


@pytest.mark.parametrize("name", ["phimoe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_experts_are_packed(name: str, dtype: torch.dtype) -> None:
    """GPT-OSS stores transposed matrices with biases, and has an activation of its own."""
    injected = inject(any_model(name), dtype, FLOATS)
    mixtures = [made for made in injected.replaced if made.kind == "experts"]
    assert len(mixtures) == injected.model.config.num_hidden_layers
    experts = injected.model.get_submodule(mixtures[0].paths[0])
    assert isinstance(experts, InjectedExperts if name == "phimoe" else ExpertsApart)
    assert (experts.matrices[0].scales is None) == dtype.is_floating_point
    assert not any(tensor.dim() == 3 for tensor in injected.model.parameters())


def test_a_mixture_that_computes_something_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(type(any_model("phimoe").model.layers[0].mlp.experts)):  # type: ignore[misc]
        def forward(self, *args: Any) -> torch.Tensor:
            return super().forward(*args) * 2

    model = any_model("phimoe")
    model.model.layers[1].mlp.experts.__class__ = Doubled
    injected = inject(model, torch.float32, FLOATS)
    assert [made.kind for made in injected.replaced].count("experts") == 3
    assert type(injected.model.model.layers[1].mlp.experts) is Doubled
    assert torch.equal(texts(injected.model), texts(model))
    monkeypatch.setattr("labkit.engine.injected.experts.StackedExperts.activation", lambda stacked: "relu")
    injected = inject(model, torch.float32, FLOATS)
    assert "outputs differ" in injected.left["model.layers.0.mlp.experts"]
    assert torch.equal(texts(injected.model), texts(model))


def test_experts_of_a_loaded_or_consumed_model_are_freed() -> None:
    loaded = any_model("phimoe")
    for source, options in ((lambda: loaded, {}), (any_model("phimoe"), {"consume": True})):
        injected = inject(source, torch.float32, FLOATS, **options)
        model = loaded if callable(source) and not isinstance(source, PreTrainedModel) else source
        assert all(not tensor.numel() for tensor in model.model.layers[0].mlp.experts.parameters())
        assert torch.equal(texts(injected.model), texts(any_model("phimoe")))


def small_qwen3() -> PreTrainedModel:
    """A model whose heads have a size that the kernel takes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_single_tokens_runs_on_the_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_qwen3()
    injected = inject(model, dtype, FLOATS)
    assert [made.kind for made in injected.replaced].count("attention") == 2
    contexts: list[int] = []

    def counted(queries: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        contexts.append(len(queries))
        return attention(queries, *args, **kwargs)

    monkeypatch.setattr("labkit.engine.injected.single_tokens.attention", counted)
    tokens = texts(injected.model)
    assert contexts == [2] * 2 * 7
    if dtype == torch.float32:
        assert torch.equal(tokens, texts(model))


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_attention_that_the_kernel_does_not_take_stays(name: str) -> None:
    """GPT-OSS has sinks; DeepSeek's keys and values have different sizes."""
    injected = inject(any_model(name), torch.float32, FLOATS)
    assert "attention" not in {made.kind for made in injected.replaced}


HYBRID = any_model("qwen3_5_text")
FUNCTIONS = ("causal_conv1d_update", "torch_recurrent_gated_delta_rule")


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, True), (torch.bfloat16, False)])
def test_norms_and_single_tokens_of_linear_attention_run_on_the_kernels(dtype: torch.dtype, kept: bool) -> None:
    injected = inject(HYBRID, dtype, FLOATS)
    kinds = {made.kind for made in injected.replaced}
    assert {"norm", "gated norm", *FUNCTIONS} <= kinds
    assert "forward" not in vars(HYBRID.model.layers[0].linear_attn)
    if kept:
        assert torch.equal(texts(injected.model), texts(HYBRID))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_computes_something_else_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(modeling_qwen3_5, name)

    def other(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return result * 1.01 if isinstance(result, torch.Tensor) else (result[0] * 1.01, result[1])

    monkeypatch.setattr(modeling_qwen3_5, name, other)
    injected = inject(HYBRID, torch.float32, FLOATS)
    assert {made.kind for made in injected.replaced} & set(FUNCTIONS) == set(FUNCTIONS) - {name}
    assert torch.equal(texts(injected.model), texts(HYBRID))


def test_a_norm_that_computes_something_else_stays() -> None:
    class Halved(type(HYBRID.model.norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 2

    Halved.__module__ = type(HYBRID.model.norm).__module__
    model = any_model("qwen3_5_text")
    model.model.norm.__class__ = Halved
    injected = inject(model, torch.float32, FLOATS)
    assert type(injected.model.model.norm) is Halved
    assert torch.equal(texts(injected.model), texts(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": torch.int8}, "kv_dtype needs a row, and PhimoeForCausalLM has none"),
        ({"offload": {"device": "nvme", "nvme_path": "/tmp"}}, "offload"),
        ({"pipeline_parallel": {"pp_size": 2}}, "pipeline_parallel needs a row"),
        ({"impl": "reference"}, "run on the C\\+\\+ kernels; leave impl"),
        ({"quantization_setting": 4}, "quantization_setting needs a row"),
    ],
)
def test_options_that_need_a_row_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        labkit.init_inference(any_model("phimoe"), **options)


def test_weights_without_memory_are_refused() -> None:
    with pytest.raises(UserError, match=r"has no memory .* load the weights first"):
        labkit.init_inference(any_model("phimoe").to("meta"))
