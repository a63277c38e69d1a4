"""BERT, RoBERTa and DistilBERT on the fused kernels give the answers of the vanilla models, with their own heads."""

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models.encoders import CONFIGS, FLOAT32, IDS, MASKS, TASKS, answer, assert_same, fused, in_groups, vanilla
from helpers.models.engines import IMPLS, distance, profiled
from helpers.sweeps import swept
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast, pipeline

import labkit
from labkit.engine.hf import encoder
from labkit.engine.hf.encoder import FusedEncoder
from labkit.engine.runners.layer import FusedLayer
from labkit.kernels import gpu
from labkit.kernels.codes import quantize
from labkit.kernels.decode_step import STAGES_PER_LAYER
from labkit.kernels.types import Linear
from labkit.models.encoder_policies import ENCODERS
from labkit.stages import Phase, Stage, message
from labkit.weights.precision import precision_of

WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "big", "small", "red", "today")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GROUPS: dict[str, dict[str, Any]] = {
    "int8-64": {"group": 64, "bits": 8},
    "int4-64": {"group": 64, "bits": 4, "asymmetric": True},
    "int4-32-symmetric": {"group": 32, "bits": 4},
}
each_model = pytest.mark.parametrize("name", CONFIGS)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("task", TASKS)
@each_model
@pytest.mark.usefixtures("poisoned")
def test_outputs_equal_vanilla_however_a_batch_is_padded(name: str, task: str, impl: str) -> None:
    engine = fused(name, task, impl)
    assert type(engine.module) is type(vanilla(name, task))
    for mask in MASKS.values():
        assert_same(answer(engine, mask), answer(vanilla(name, task), mask), mask)


@each_model
@pytest.mark.usefixtures("isa", "poisoned")
def test_every_instruction_set_and_any_number_of_threads_give_the_same(name: str) -> None:
    torch.set_num_threads(3)
    engine = labkit.init_inference(vanilla(name), impl="cpp")
    for kind in ("none", "scattered"):
        assert_same(answer(engine, MASKS[kind]), answer(vanilla(name), MASKS[kind]), MASKS[kind])


@each_model
def test_one_token_is_a_sequence_too(name: str) -> None:
    with torch.no_grad():
        assert_same(fused(name)(IDS[:1, :1]), vanilla(name)(IDS[:1, :1]))


@each_model
def test_large_batches_go_through_in_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "CHUNK_ROWS", 2 * IDS.shape[1])
    engine = labkit.init_inference(vanilla(name), impl="cpp")
    for kind in ("none", "scattered"):
        assert_same(answer(engine, MASKS[kind]), answer(vanilla(name), MASKS[kind]), MASKS[kind])
    assert {time.calls for time in engine.stage_times()} == {4}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("task", ["base", "fill-mask"])
@each_model
def test_hidden_states_equal_vanilla(name: str, task: str, impl: str) -> None:
    """By every way to request them, even if the model returned hidden states before."""
    model, mask = copy.deepcopy(vanilla(name, task)), MASKS["right"]
    assert mask is not None
    expected = answer(model, mask, output_hidden_states=True)
    engine = labkit.init_inference(model, impl=impl)
    output = answer(engine, mask, output_hidden_states=True)
    as_tuple = answer(engine, mask, output_hidden_states=True, return_dict=False)
    engine.config.output_hidden_states = True
    for hidden_states in (output.hidden_states, as_tuple[-1], answer(engine, mask).hidden_states):
        assert len(hidden_states) == len(expected.hidden_states) == 4
        for actual, vanilla_states in zip(hidden_states, expected.hidden_states, strict=True):
            assert (actual - vanilla_states)[mask.bool()].abs().max() <= FLOAT32
    engine.config.output_hidden_states = False
    assert answer(engine, mask).get("hidden_states") is None


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@each_model
def test_half_precision_is_as_near_to_float32_as_vanilla_is(name: str, dtype: torch.dtype, impl: str) -> None:
    """Both round weights, keys, values and the rows of the head, so their noise is equally large but independent. A
    quarter more is allowed; a wrong bias or scale costs many times as much.
    """
    mask = MASKS["scattered"]
    assert mask is not None
    expected = answer(vanilla(name, "fill-mask"), mask).logits[mask.bool()]
    vanilla_logits = answer(copy.deepcopy(vanilla(name, "fill-mask")).to(dtype), mask).logits[mask.bool()]
    actual = answer(fused(name, "fill-mask", impl, dtype), mask).logits[mask.bool()]
    assert actual.dtype == dtype
    assert 0 < distance(actual, expected) <= 1.25 * distance(vanilla_logits, expected)


@pytest.mark.parametrize("quant", [{}, {"weight": {"q_groups": 4}}], ids=["rows", "groups"])
@each_model
def test_int8_is_near_float32_and_both_impls_quantise_alike(name: str, quant: dict[str, Any]) -> None:
    """A weight is off by up to 1/254 of the largest weight of its row, which is about 0.6 % of the spread of all
    weights. Three layers of six such products each, and rounded rows, add up to less than 5 %. The two impls differ
    only by rounded rows.
    """
    expected = answer(vanilla(name)).last_hidden_state
    cpp, reference = (
        answer(labkit.init_inference(vanilla(name), dtype=torch.int8, quant=quant, impl=impl)).last_hidden_state
        for impl in IMPLS
    )
    assert cpp.dtype == torch.bfloat16
    assert 0 < distance(cpp, expected) < 0.05
    assert distance(cpp, reference) < 0.02


@pytest.mark.parametrize(("precision", "settings"), GROUPS.items())
@pytest.mark.parametrize("impl", IMPLS)
@each_model
def test_groups_of_few_bits_compute_what_their_codes_stand_for(
    name: str, impl: str, precision: str, settings: dict[str, Any]
) -> None:
    model, group = in_groups(name), settings["group"]
    engine = labkit.init_inference(model, impl=impl, **precision_of(precision).options)
    for linear in (module for module in model.modules() if type(module) is nn.Linear):
        codes, scales = quantize(linear.weight.data, **settings)
        outputs, inputs = linear.weight.shape
        linear.weight.data = Linear(codes, None, outputs, inputs, "rows", scales, group, settings["bits"]).floats()
    assert 0 < distance(answer(engine).last_hidden_state, answer(model).last_hidden_state) < 0.02


@pytest.mark.skipif(not gpu.interpreted(), reason="runs in Triton's interpreter; set TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", swept(list(CONFIGS), ["bert"]))
@pytest.mark.parametrize("dtype", swept({"fp32": torch.float32, "int8": torch.int8}, ["fp32"]))
def test_triton_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    mask = MASKS["scattered"]
    assert mask is not None
    actual, expected = (
        answer(fused(name, "base", impl, dtype), mask).last_hidden_state for impl in ("triton", "reference")
    )
    assert distance(actual[mask.bool()], expected[mask.bool()]) <= (1e-5 if dtype == torch.float32 else 0.02)


def test_repeated_runs_are_bitwise_the_same() -> None:
    engine = fused("bert")
    first = answer(engine, MASKS["right"]).last_hidden_state
    assert all(torch.equal(answer(engine, MASKS["right"]).last_hidden_state, first) for _ in range(20))


@each_model
def test_the_original_model_stays_what_it_was(name: str) -> None:
    model = copy.deepcopy(vanilla(name, "fill-mask"))
    config, weights = model.config.to_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    kind, expected = model.config._attn_implementation, answer(model).logits
    engine = labkit.init_inference(model, dtype=torch.bfloat16)
    engine.config.output_hidden_states = True
    answer(engine)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == kind
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(answer(model).logits, expected)


@pytest.mark.parametrize("impl", IMPLS)
@each_model
def test_the_engine_keeps_no_part_of_the_original(name: str, impl: str) -> None:
    model = copy.deepcopy(vanilla(name, "fill-mask"))
    engine = labkit.init_inference(model, impl=impl)
    expected = answer(engine).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(answer(engine).logits, expected)


@pytest.mark.parametrize("impl", IMPLS)
@each_model
def test_a_consumed_model_becomes_the_engines_own(name: str, impl: str) -> None:
    model = copy.deepcopy(vanilla(name, "fill-mask"))
    layers = model.base_model.get_submodule(ENCODERS[type(model.base_model).__name__].layers)
    engine = labkit.init_inference(model, impl=impl, consume_model=True)
    assert engine.module is model
    assert not any(parameter.numel() for parameter in layers.parameters())
    assert_same(answer(engine), answer(vanilla(name, "fill-mask")))


@each_model
def test_fused_layers_stand_where_the_layers_stood(name: str) -> None:
    model, engine = vanilla(name, "fill-mask"), fused(name, "fill-mask")
    policy = ENCODERS[type(model.base_model).__name__]
    layers = list(engine.module.base_model.get_submodule(policy.layers))
    assert len(layers) == 3
    assert all(isinstance(layer, FusedLayer) for layer in layers)
    assert isinstance(engine.fused, FusedEncoder)
    for path in (policy.tokens, policy.positions, policy.embed_norm, policy.project_in):
        assert path is None or engine.module.base_model.get_submodule(path)


def test_every_row_has_a_small_model() -> None:
    assert {type(vanilla(name)).__name__ for name in CONFIGS} == set(ENCODERS)


@each_model
def test_the_engine_has_the_attributes_of_a_model(name: str) -> None:
    engine = fused(name, "fill-mask", dtype=torch.int8)
    assert engine.config.hidden_size == engine.model_config.hidden_size == 60
    assert engine.dtype == torch.bfloat16
    assert engine.device == torch.device("cpu")
    assert engine.impl == "cpp"
    assert engine.graph_nodes == ()
    assert engine.base_model_prefix == name
    assert not engine.can_generate()
    with pytest.raises(TypeError, match="ForMaskedLM is an encoder and generates no text; call the engine itself"):
        engine.generate(IDS)


def test_labels_give_the_loss() -> None:
    labels = torch.tensor([0, 2, 1])
    task = "text-classification"
    losses = [answer(model, labels=labels).loss for model in (fused("bert", task), vanilla("bert", task))]
    assert abs(losses[0] - losses[1]) <= FLOAT32


def expected_stages(layers: int) -> list[str]:
    """Stages of each layer. The last layer's second norm runs on its own, as one more residual stage."""
    inner = [message(Phase.PREFILL, Stage(stage), layer) for layer in range(layers) for stage in STAGES_PER_LAYER]
    return [*inner, message(Phase.PREFILL, Stage.RESIDUAL, layers - 1)]


@pytest.mark.parametrize("impl", IMPLS)
@each_model
def test_torch_profiler_sees_every_stage_of_every_layer(name: str, impl: str) -> None:
    outputs: list[Any] = []
    assert profiled(lambda: outputs.append(answer(fused(name, impl=impl)))) == expected_stages(3)
    assert_same(outputs[0], answer(fused(name, impl=impl)))


def test_stage_times_are_those_of_the_layers() -> None:
    engine = labkit.init_inference(vanilla("bert"), impl="cpp")
    engine.profile_model_time()
    answer(engine)
    answer(engine)
    times, wall_ms = engine.stage_times(), sum(engine.model_times())
    assert [message(entry.phase, entry.stage, entry.layer) for entry in times] == expected_stages(3)[:-1]
    assert all(entry.calls == 2 and entry.total_ms >= 0 for entry in times)
    assert 0 < sum(entry.total_ms for entry in times) <= wall_ms
    assert engine.stage_times() == []


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    vocabulary |= {f"word{index}": index for index in range(len(vocabulary), 131)}
    word_level = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    word_level.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if name == "bert" else [])]
    return PreTrainedTokenizerFast(tokenizer_object=word_level, model_input_names=inputs, model_max_length=64, **names)


TEXTS = {
    "fill-mask": ["the [MASK] sat on the mat", "a small cat and a [MASK] dog ran under the red tree today"],
    "token-classification": ["the cat sat on the mat", "a dog ran happily under the big tree and ate"],
    "text-classification": ["the cat sat", "a small cat and a big dog ran under the red tree today"],
}


def assert_alike(actual: Any, expected: Any) -> None:
    """Compares answers of a pipeline: scores within the bound, everything else exactly."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_alike(actual[key], expected[key])
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_alike(actual_item, expected_item)
    else:
        assert actual == (
            pytest.approx(expected, abs=FLOAT32) if isinstance(expected, float | np.floating) else expected
        )


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("task", TEXTS)
@each_model
def test_a_pipeline_answers_as_with_the_vanilla_model(name: str, task: str, batch_size: int) -> None:
    pipe = pipeline(task, model=vanilla(name, task), tokenizer=tokenizer(name), batch_size=batch_size)
    expected = pipe(TEXTS[task])
    pipe.model = fused(name, task)
    assert_alike(pipe(TEXTS[task]), expected)


@each_model
def test_question_answering_finds_the_same_words(name: str) -> None:
    questions = ["a cat sat", "the big red dog ran under the tree"]
    inputs = tokenizer(name)(questions, ["the dog saw a cat today"] * 2, padding=True, return_tensors="pt")
    with torch.no_grad():
        outputs = [
            model(**inputs) for model in (fused(name, "question-answering"), vanilla(name, "question-answering"))
        ]
    assert_same(outputs[0], outputs[1], inputs.attention_mask)
    for logits in ("start_logits", "end_logits"):
        hidden = inputs.attention_mask == 0
        fused_words, vanilla_words = (output[logits].masked_fill(hidden, -1e9).argmax(1) for output in outputs)
        assert torch.equal(fused_words, vanilla_words)
