"""Changes that a user made to a model take effect, or are refused by name; none is ignored silently."""

import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from helpers.models.encoders import in_groups
from helpers.models.engines import greedy, prompt
from helpers.models.small_models import small_model
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrizations, prune, weight_norm
from transformers import PreTrainedModel
from transformers.activations import ACT2FN, ClippedGELUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

import labkit
from labkit.system.errors import UserError

TIED = ("gpt2", "gptj-tied", "gpt-neox-sequential", "qwen2", "bloom", "opt")
Change = Callable[[PreTrainedModel], object]


class Doubled(nn.Linear):
    """A user's own linear, whose weights have the usual names."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def with_own_head(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Model with a head of its own, although its config says that the head is the embedding."""
    model = small_model(name)
    assert model.config.tie_word_embeddings
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    return model.to(dtype)


@pytest.mark.parametrize("impl", ["cpp", "reference"])
@pytest.mark.parametrize("name", TIED)
@torch.no_grad()
def test_a_head_of_its_own_is_kept_whatever_the_config_says(name: str, impl: str) -> None:
    model, ids = with_own_head(name), prompt(2, 7)
    engine = labkit.init_inference(model, impl=impl)
    torch.testing.assert_close(engine(ids).logits, model(ids).logits, atol=2e-3, rtol=1e-3)
    assert torch.equal(greedy(engine, ids, 6), greedy(model, ids, 6))
    assert model.config.tie_word_embeddings


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
@torch.no_grad()
def test_a_head_of_its_own_is_kept_in_every_type(dtype: str) -> None:
    for name in TIED:
        ids, model = prompt(1, 7), with_own_head(name)
        actual = labkit.init_inference(model, dtype=dtype)(ids).logits
        assert (actual - model(ids).logits).abs().max() < 0.5


def test_a_head_of_its_own_is_saved_with_the_model(tmp_path: Path) -> None:
    model, ids = with_own_head("qwen2"), prompt(1, 7)
    engine = labkit.init_inference(model, save_mp_checkpoint_path=tmp_path)
    assert torch.equal(labkit.init_inference(tmp_path)(ids).logits, engine(ids).logits)


def activation_field(model: PreTrainedModel) -> str:
    return next(name for name in ("activation_function", "hidden_act") if hasattr(model.config, name))


def activation_of(model: PreTrainedModel) -> str:
    name: str = getattr(model.config, activation_field(model))
    return name


def hooked(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 2 * output)


def hooked_before(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def other_forward(model: PreTrainedModel) -> None:
    original = model.model.layers[2].self_attn.o_proj.forward
    model.model.layers[2].self_attn.o_proj.forward = lambda x: 2 * original(x)


class Doubling(accelerate.hooks.ModelHook):
    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return 2 * output


def hooked_by_accelerate(model: PreTrainedModel) -> None:
    accelerate.hooks.add_hook_to_module(model.model.layers[0].mlp, Doubling())


def hooked_by_accelerate_too(model: PreTrainedModel) -> None:
    dispatched(model)
    accelerate.hooks.add_hook_to_module(model.model.layers[0].mlp, Doubling(), append=True)


def other_forward_after_dispatch(model: PreTrainedModel) -> None:
    dispatched(model)
    other_forward(model)


def other_class(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.__class__ = Doubled


def other_activation(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def other_scale(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.scaling *= 2


def other_epsilon(model: PreTrainedModel) -> None:
    model.model.norm.variance_epsilon = 0.1


def adapted(model: PreTrainedModel) -> None:
    """Adapts a linear in place, as peft does."""
    linear = model.model.layers[0].self_attn.q_proj
    wrapper = nn.Module()
    wrapper.base_layer, wrapper.lora_A, wrapper.lora_B = linear, nn.ModuleDict(), nn.ModuleDict()
    wrapper.lora_A["default"], wrapper.lora_B["default"] = nn.Linear(72, 4, False), nn.Linear(4, 120, False)
    model.model.layers[0].self_attn.q_proj = wrapper


def offloaded(model: PreTrainedModel) -> None:
    accelerate.cpu_offload(model)


def sparse(model: PreTrainedModel) -> None:
    linear = model.model.layers[1].mlp.down_proj
    linear.weight = nn.Parameter(linear.weight.detach().to_sparse())


def normed(model: PreTrainedModel) -> None:
    parametrizations.weight_norm(model.model.layers[1].mlp.down_proj)


def normed_as_before(model: PreTrainedModel) -> None:
    with pytest.warns(FutureWarning):
        weight_norm(model.model.layers[1].mlp.down_proj)


def pruned(model: PreTrainedModel) -> None:
    prune.l1_unstructured(model.model.layers[1].mlp.down_proj, "weight", 0.5)


REFUSED: dict[Change, str] = {
    hooked: r"model\.layers\.1\.mlp has the forward hook hooked\.<locals>\.<lambda>, which the kernels would leave out",
    hooked_before: r"lm_head has the forward hook hooked_before",
    other_forward: r"model\.layers\.2\.self_attn\.o_proj has a forward that replaces its own",
    hooked_by_accelerate: r"model\.layers\.0\.mlp has a forward that replaces its own",
    hooked_by_accelerate_too: r"model\.layers\.0\.mlp has a forward that replaces its own",
    other_forward_after_dispatch: r"model\.layers\.2\.self_attn\.o_proj has a forward that replaces its own",
    other_class: r"model\.layers\.0\.mlp\.up_proj is a Doubled of .*test_changed_models",
    other_activation: r"model\.layers\.1\.mlp\.act_fn computes ReLU \(the config's activation: silu\)",
    other_scale: r"model\.layers\.1\.self_attn\.scaling is 0.447214 \(the config's: 0.223607\)",
    other_epsilon: r"model\.norm\.variance_epsilon is 0.1 \(the config's: 1e-06\)",
    adapted: r"an adapter of peft is not merged into them: call merge_and_unload\(\)",
    offloaded: r"weight has no numbers in this LlamaForCausalLM \(it is on the meta device, .* accelerate has off",
    sparse: r"model\.layers\.1\.mlp\.down_proj\.weight is stored as torch\.sparse_coo .*; expected a dense tensor",
    normed: "a parametrization such as weight norm is not folded into them: call .*remove_parametrizations",
    normed_as_before: r"a parametrization such as weight norm is not folded into them: .*remove_weight_norm\(module\)",
    pruned: r"pruning is not folded into them: call torch\.nn\.utils\.prune\.remove",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_change_that_the_kernels_would_leave_out_is_refused_by_name(change: Change) -> None:
    model = small_model("llama")
    change(model)
    with pytest.raises(UserError, match=REFUSED[change]):
        labkit.init_inference(model)


OTHER_ACTIVATIONS: dict[str, list[nn.Module]] = {
    "opt": [nn.ReLU6(), nn.LeakyReLU(1e-4), nn.GLU(), *(nn.Hardtanh(0, most) for most in (0.1, 4.0, 31.0, 9e4))],
    "gpt2": [nn.GELU(), *(ClippedGELUActivation(-10, most) for most in (6.0, 10.0, 9e4))],
    "llama": [nn.Hardswish(), nn.Sequential(nn.SiLU(), nn.SiLU()), nn.Sequential(nn.SiLU(), nn.Hardtanh(-1, 9e4))],
}


@pytest.mark.parametrize("name", OTHER_ACTIVATIONS)
def test_an_activation_that_differs_anywhere_is_refused(name: str) -> None:
    model = small_model(name)
    path = next(path for path, module in model.named_modules() if type(module) is type(ACT2FN[activation_of(model)]))
    parent, _, attribute = path.rpartition(".")
    for other in OTHER_ACTIVATIONS[name]:
        setattr(model.get_submodule(parent), attribute, other)
        with pytest.raises(UserError, match=rf"{re.escape(path)}\S* computes \w+ \(the config's activation: "):
            labkit.init_inference(model)


def test_an_activation_of_another_class_that_computes_the_same_is_none() -> None:
    model, plain, ids = small_model("llama"), small_model("llama"), prompt(1, 7)
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU())
    model.model.layers[1].mlp.act_fn = nn.SiLU()
    assert torch.equal(labkit.init_inference(model)(ids).logits, labkit.init_inference(plain)(ids).logits)


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_a_global_hook_is_refused_by_name(register: Callable[[Any], Any]) -> None:
    def doubled(module: nn.Module, *values: Any) -> None: ...

    handle = register(doubled)
    try:
        for model in (small_model("llama"), in_groups("bert")):
            with pytest.raises(
                UserError, match=r"torch\.nn\.Module has the global forward hook .*doubled.*: remove the"
            ):
                labkit.init_inference(model)
    finally:
        handle.remove()


@torch.no_grad()
def test_a_loss_of_the_user_is_taken() -> None:
    model, ids = small_model("gpt2"), prompt(2, 7)
    model.loss_function = lambda logits, labels, vocab_size, **others: (logits.mean() + labels.sum()) * vocab_size
    engine = labkit.init_inference(model)
    torch.testing.assert_close(engine(ids, labels=ids).loss, model(ids, labels=ids).loss)


@pytest.mark.parametrize("disguise", [lambda original: lambda forward: forward, wraps], ids=["plain", "wrapped"])
def test_a_forward_that_a_class_was_given_is_refused(disguise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama")
    original = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", disguise(original)(lambda module, x: 2 * original(module, x)))
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp has a forward that replaces its own"):
        labkit.init_inference(model)


def compiled(model: PreTrainedModel) -> None:
    model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
    model.model.layers[1] = torch.compile(model.model.layers[1])  # type: ignore[assignment]


def dispatched(model: PreTrainedModel) -> None:
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def looked_into(model: PreTrainedModel) -> None:
    """Collects hidden states, for which transformers installs hooks that stay."""
    model(prompt(1, 3), output_hidden_states=True)


def resized(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(140, mean_resizing=False)


@pytest.mark.parametrize("consume", [False, True], ids=["", "consume"])
@pytest.mark.parametrize("change", [compiled, dispatched, looked_into, resized], ids=lambda change: change.__name__)
def test_a_change_that_computes_the_same_is_none(change: Change, consume: bool) -> None:
    plain, model, ids = small_model("llama"), small_model("llama"), prompt(1, 7)
    change(model)
    plain.resize_token_embeddings(model.config.vocab_size, mean_resizing=False)
    plain.load_state_dict({name.replace("_orig_mod.", ""): tensor for name, tensor in model.state_dict().items()})
    actual = labkit.init_inference(model, consume_model=consume)(ids).logits
    assert torch.equal(actual, labkit.init_inference(plain)(ids).logits)
    assert not consume or not any(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gpt-neo", "gpt-neox-parallel", "opt", "qwen3"])
def test_a_config_that_was_changed_after_the_model_was_made_is_refused(name: str) -> None:
    model = small_model(name)
    setattr(model.config, activation_field(model), "relu" if activation_of(model) != "relu" else "silu")
    with pytest.raises(UserError, match=r"(act|gelu_impl|act_fn|activation_fn) computes \w+ \(the config's activation"):
        labkit.init_inference(model)


def test_hooks_on_the_layers_of_an_encoder_are_refused_and_others_kept() -> None:
    model = in_groups("bert")
    model.embeddings.register_forward_hook(lambda module, args, output: 2 * output)
    ids = prompt(1, 7)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
    actual = labkit.init_inference(model)(ids).last_hidden_state
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    model.encoder.layer[1].output.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(UserError, match=r"encoder\.layer\.1\.output has the forward hook"):
        labkit.init_inference(model)


@pytest.mark.parametrize(
    "kind", [np.int64, torch.tensor, lambda token: np.array([token, 9]), lambda token: [np.int64(token)]]
)
def test_an_end_of_text_of_any_integer_type_ends_texts_and_is_saved(kind: Callable[[int], Any], tmp_path: Path) -> None:
    model, ids = small_model("gpt2"), prompt(2, 7)
    end = int(greedy(model, ids, 8)[0, 10])
    model.generation_config.eos_token_id = kind(end)
    engine = labkit.init_inference(model, save_mp_checkpoint_path=tmp_path)
    generated = engine.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(generated, model.generate(ids, max_new_tokens=8, do_sample=False))
    assert not generated[0, -1]
    saved = labkit.resolve(tmp_path).generation_config
    assert saved is not None
    assert saved.eos_token_id in (end, [end], [end, 9])


@pytest.mark.parametrize("beams", [1, 2])
def test_a_pad_token_of_minus_one_is_none(beams: int) -> None:
    """LLaMA configs have it. After its end, a text is filled with the token that ended it."""
    model, ids = small_model("llama"), prompt(2, 7)
    end = int(greedy(model, ids, 8)[0, 10])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": end, "num_beams": beams}
    expected = model.generate(ids, pad_token_id=end, **options)
    model.generation_config.pad_token_id = -1
    engine = labkit.init_inference(model)
    assert torch.equal(engine.generate(ids, **options), expected)
    with pytest.raises(UserError, match="pad_token_id = 131; the model's vocabulary is 0 to 130: pass the id of one"):
        engine.generate(ids, pad_token_id=131, **options)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gpt-neox-parallel", "bloom", "opt", "llama", "qwen2"])
def test_a_decoder_without_its_head_is_refused_with_the_cause(name: str) -> None:
    model = small_model(name)
    parts = [model.base_model, *([model.model.decoder] if name == "opt" else [])]
    for part in parts:
        with pytest.raises(
            UserError, match="this is a decoder without its head: pass the whole model, a " + type(model).__name__
        ):
            labkit.init_inference(part)


def test_a_model_with_other_layers_than_its_config_is_told_so() -> None:
    model = small_model("llama")
    del model.model.layers[2]
    with pytest.raises(UserError, match="; check that the weights and the config belong together"):
        labkit.init_inference(model)


def test_a_name_stands_for_its_model() -> None:
    engine, ids = labkit.init_inference("tiny-gpt2"), prompt(1, 7)
    assert torch.equal(engine(ids).logits, labkit.init_inference(labkit.resolve("tiny-gpt2"))(ids).logits)
    with pytest.raises(UserError, match="unknown model 'tiny-gpt'"):
        labkit.init_inference("tiny-gpt")
