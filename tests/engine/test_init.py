"""What `init_inference` does to its model, and which models it refuses."""

import copy
import re
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.models.engines import FEW, IMPLS, few_models, greedy, prompt, vanilla
from helpers.models.small_models import small_model
from torch import nn
from transformers import ElectraConfig, GPT2Config, GPT2Model, PreTrainedModel

import labkit
from labkit.engine.runners.layer import FusedLayer
from labkit.kernels import build
from labkit.models.policies import policy_for
from labkit.ops.transformer.inference import DeepSpeedTransformerInference

WIDE = {"n_embd": 64, "n_head": 4, "vocab_size": 128}  # sizes that need no padding, which would copy weights


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FEW)
def test_the_original_model_stays_what_it_was(name: str, impl: str) -> None:
    model, ids = small_model(name), prompt(2, 7)
    config, generation = copy.deepcopy(model.config.to_dict()), model.generation_config.to_dict()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    expected = greedy(model, ids, 8)
    engine = labkit.init_inference(model, impl=impl)
    engine.generation_config.max_new_tokens = 3
    engine.config.use_cache = False
    greedy(engine, ids, 8)
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(greedy(model, ids, 8), expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["gpt2", "gptj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_engine_keeps_no_part_of_the_original(name: str, impl: str, dtype: torch.dtype) -> None:
    model, ids = small_model(name, dtype=dtype, **WIDE), prompt(1, 7) % 128
    engine = labkit.init_inference(model, impl=impl)
    expected = engine(ids).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(engine(ids).logits, expected)


@pytest.mark.parametrize("impl", IMPLS)
@few_models
def test_a_consumed_model_is_empty_and_its_engine_whole(name: str, impl: str) -> None:
    model, ids = small_model(name), prompt(2, 7)
    engine = labkit.init_inference(model, impl=impl, consume_model=True)
    assert not any(parameter.numel() for parameter in model.parameters())
    assert torch.equal(greedy(engine, ids, 8), greedy(vanilla(name), ids, 8))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["gpt2", "gpt-neox-parallel", "llama"])
def test_tensors_of_a_source_are_read_once_and_let_go(name: str, impl: str) -> None:
    """A checkpoint may be larger than memory, so at most one layer's tensors are alive at a time."""
    tensors = vanilla(name).state_dict()
    alive: list[weakref.ref[torch.Tensor]] = []
    reads: Counter[str] = Counter()
    most_alive = 0

    class Source:
        hf_config = vanilla(name).config

        def names(self) -> set[str]:
            return set(tensors)

        def get(self, key: str, dtype: torch.dtype | None = None, cut: object = None) -> torch.Tensor:
            nonlocal most_alive
            most_alive = max(most_alive, sum(ref() is not None for ref in alive))
            reads[key] += 1
            tensor = tensors[key].to(dtype, copy=True)
            alive.append(weakref.ref(tensor))
            return tensor

    engine = labkit.init_inference(Source(), impl=impl)
    assert set(reads.values()) == {1}
    assert most_alive <= len(reads) // 3
    assert not any(ref() is not None for ref in alive)
    assert torch.equal(greedy(engine, prompt(2, 7), 8), greedy(vanilla(name), prompt(2, 7), 8))


def damaged(damage: str) -> PreTrainedModel:
    model = small_model("llama")
    down = model.model.layers[2].mlp.down_proj
    with torch.no_grad():
        if damage == "nan":
            down.weight[3, 4] = float("nan")
        elif damage == "infinite":
            model.model.norm.weight[3] = -float("inf")
        elif damage == "missing":
            model.model.layers[2].mlp.down_proj = nn.Identity()
        elif damage == "extra":
            model.model.layers[1].mlp.gate2 = nn.Linear(3, 3)
        else:
            model.model.layers[2].mlp.down_proj = nn.Linear(99, 72, bias=False)
    return model


DAMAGES = {
    "nan": r"model\.layers\.2\.mlp\.down_proj\.weight holds values that are not finite",
    "infinite": r"model\.norm\.weight holds values that are not finite",
    "missing": r"model\.layers\.2\.mlp\.down_proj\.weight",
    "extra": r"model\.layers\.1\.mlp\.gate2",
    "misshapen": r"model\.layers\.2\.mlp\.down_proj\.weight.*\[72, 99\]",
}


@pytest.mark.parametrize("consume", [False, True], ids=["", "consume"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_refused_by_tensor_and_left_as_it_was(damage: str, consume: bool) -> None:
    model = damaged(damage)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=DAMAGES[damage]):
        labkit.init_inference(model, consume_model=consume)
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value.nan_to_num(), weights[key].nan_to_num()) for key, value in model.state_dict().items())


def test_a_type_without_room_for_a_weight_is_named_and_the_model_left_as_it_was() -> None:
    model = small_model("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[3, 4] = 1e5
    words = r"layers\.2\.mlp\.down_proj\.weight holds numbers beyond 65504, the largest of torch\.float16; use "
    for consume in (False, True):
        with pytest.raises(ValueError, match=words):
            labkit.init_inference(model, dtype=torch.float16, consume_model=consume)
    assert all(parameter.numel() for parameter in model.parameters())


def test_a_checkpoint_for_a_config_without_a_row_is_refused_with_the_reason() -> None:
    config = ElectraConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    with pytest.raises(
        ValueError, match=r"no row .* ElectraConfig \(more embeddings .*\); pass the transformers model"
    ):
        labkit.init_inference(config, checkpoint="somewhere")


def test_a_model_without_its_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the tensors do not fit GPT2LMHeadModel .*missing.*extra"):
        labkit.init_inference(GPT2Model(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=20)))


@pytest.mark.parametrize("value", [nn.Linear(2, 2), 7, None])
def test_what_is_no_model_is_refused(value: object) -> None:
    with pytest.raises(
        TypeError, match=f"expected a transformers model or a labkit ModelSource, got {type(value).__name__}"
    ):
        labkit.init_inference(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [labkit.init_inference, torch.compile])
def test_what_is_made_of_a_model_is_refused(wrap: Callable[[PreTrainedModel], nn.Module]) -> None:
    with pytest.raises(TypeError, match=r"expected a transformers model or .*, got (DecoderEngine|OptimizedModule)"):
        labkit.init_inference(wrap(vanilla("gpt2")))  # type: ignore[arg-type]


def test_a_model_of_another_float_type_needs_a_dtype() -> None:
    model = small_model("gpt2", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"the model is torch\.float64; pass dtype=torch\.float32"):
        labkit.init_inference(model)
    assert labkit.init_inference(model, dtype=torch.float32).dtype == torch.float32


def test_heads_that_are_too_wide_for_the_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim is 520; the cpp kernels take up to 512"):
        labkit.init_inference(small_model("gpt2", n_embd=520, n_head=1))


@few_models
def test_fused_layers_stand_where_the_layers_stood(name: str) -> None:
    model = vanilla(name)
    path, layers = policy_for(model.config).layers, model.config.num_hidden_layers
    stack = labkit.init_inference(model).module.get_submodule(path)
    assert len(stack) == layers
    assert all(isinstance(layer, DeepSpeedTransformerInference) for layer in stack)
    assert DeepSpeedTransformerInference is FusedLayer


def test_a_checkpoints_generation_config_is_the_engines(tmp_path: Path) -> None:
    model = small_model("gpt2")
    model.generation_config.eos_token_id = [7, 9]
    model.save_pretrained(tmp_path)
    assert labkit.init_inference(labkit.resolve(tmp_path)).generation_config.eos_token_id == [7, 9]


def test_the_engine_has_the_attributes_of_a_model() -> None:
    model = vanilla("gpt2")
    engine = labkit.init_inference(model)
    assert engine.config.to_diff_dict() == engine.module.config.to_diff_dict()
    assert engine.config.hidden_size == model.config.hidden_size
    assert engine.generation_config.to_dict() == model.generation_config.to_dict()
    assert engine.device == engine.module.device == torch.device("cpu")
    assert engine.dtype == torch.float32
    assert engine.can_generate()
    assert engine.main_input_name == "input_ids"
    assert engine.model_config.num_layers == 3
    assert not hasattr(engine, "no_such_attribute")


@pytest.mark.parametrize(
    "call", [lambda engine: engine(prompt(1, 2)), lambda engine: engine.config, lambda engine: engine.stage_times()]
)
def test_a_destroyed_engine_says_so(call: Callable[[labkit.InferenceEngine], object]) -> None:
    engine = labkit.init_inference(vanilla("gpt2"))
    for _ in range(2):
        engine.destroy()
    with pytest.raises(RuntimeError, match="this engine was destroyed; call init_inference again for a new one"):
        call(engine)


@pytest.mark.parametrize("obstacle", ["no compiler", "compiler fails"])
def test_without_kernels_the_reference_runs_and_says_so(
    obstacle: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path_factory.mktemp("nothing")
    monkeypatch.setenv("LABKIT_CACHE", str(folder))
    monkeypatch.setattr(build, "_in_use", {})  # else a library of the half second before is used
    if obstacle == "no compiler":
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(folder))
        words = r"no g\+\+ or clang\+\+ on the PATH"
    else:
        monkeypatch.setenv("CXX", "/bin/false")
        words = "false could not compile the kernels"
    engine = labkit.init_inference(vanilla("llama"), impl="auto")
    assert engine.impl == "reference"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "labkit"]
    assert re.search(f"the reference kernels run, which are slow: .*{words}", line)
    ids = prompt(2, 7)
    assert torch.equal(greedy(engine, ids, 8), greedy(vanilla("llama"), ids, 8))
    with pytest.raises(build.BuildError, match=words):
        labkit.init_inference(vanilla("llama"), impl="cpp")


def test_auto_means_the_kernels_where_they_can_be_built() -> None:
    assert labkit.init_inference(vanilla("gpt2")).impl == "cpp"
