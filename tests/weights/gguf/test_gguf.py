"""GGUF files have the tensors of their models, keep their codes unchanged, and have their faults named."""

from math import log
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from helpers.models.gguf_descriptions import DERIVED
from helpers.models.gguf_files import END, HI, SIZES, TEMPLATE, VOCAB, gguf_model, logits_of, tensors_of, write_gguf
from helpers.models.gguf_mixtures import MIXTURES
from helpers.sweeps import swept
from transformers import AutoModelForCausalLM

from labkit.engine import init_inference
from labkit.harness.stored_weights import StoredWeights, stored_by
from labkit.kernels.gemm import unpack_rows
from labkit.kernels.types import Linear
from labkit.models.shards import Cut
from labkit.system.errors import UserError
from labkit.weights.gguf.tensors import GgufTensors
from labkit.weights.resolve import resolve

TOKENS = torch.arange(1, 21)[None]
BLOCKS = {"Q8_0": "int8-32", "Q4_0": "int4-32-symmetric", "Q4_1": "int4-32"}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", [*SIZES, *MIXTURES])
def test_a_file_has_the_tensors_of_its_model(name: str, tmp_path: Path) -> None:
    model = gguf_model(name)
    source = resolve(write_gguf(tmp_path / "model.gguf", model))
    read = source.hf_model(torch.float32).state_dict()
    assert not [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, read[key])]
    engine = init_inference(source, replace_with_kernel_inject=True)
    assert engine.dtype == torch.float32
    assert torch.allclose(logits_of(engine, TOKENS), logits_of(model, TOKENS), atol=1e-4)


@pytest.mark.parametrize("name", swept([*DERIVED], ["gemma3", "granite"]))
def test_a_file_of_a_derived_row_is_its_model(name: str, tmp_path: Path) -> None:
    model = gguf_model(name)
    source = resolve(write_gguf(tmp_path / "model.gguf", model))
    assert source.hf_config.architectures == [type(model).__name__]
    engine = init_inference(source, replace_with_kernel_inject=True)
    assert engine.level == "derived row"
    expected = logits_of(model, TOKENS)
    assert torch.allclose(logits_of(source.hf_model(torch.float32), TOKENS), expected, atol=1e-4)
    assert torch.allclose(logits_of(engine, TOKENS), expected, atol=1e-3)


def test_a_long_rope_has_other_factors_in_long_texts(tmp_path: Path) -> None:
    model = gguf_model("phi4-mini")
    source = resolve(write_gguf(tmp_path / "model.gguf", model))
    rope = source.hf_config.rope_parameters
    assert rope.pop("attention_factor") == pytest.approx((1 + log(16) / log(32)) ** 0.5)
    assert rope == {name: value for name, value in model.config.rope_parameters.items() if name != "type"}
    engine, ids = init_inference(source), torch.randint(0, 256, (1, 28), generator=torch.Generator().manual_seed(0))
    assert (engine.level, engine.model_config.short_positions) == ("derived row", 32)
    texts = [side.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None) for side in (engine, model)]
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("extra", "without", "metadata", "message"),
    [
        (
            {},
            ["rope_factors_short.weight"],
            {},
            "longrope with the tensors rope_factors_short.weight and rope_factors_",
        ),
        (
            {"rope_factors_long.weight": torch.ones(12)},
            [],
            {},
            r"rope_factors_long.weight is F32 \[12\], expected F32 \[9\]",
        ),
        ({"rope_factors_long.weight": torch.zeros(9)}, [], {}, r"rope_factors_long.weight holds 0.0, expected finite"),
        ({"rope_freqs.weight": torch.ones(9)}, [], {}, "has rope_freqs.weight and longrope scaling"),
        ({}, [], {"phi3.rope.scaling.type": "yarn"}, "phi3.rope.scaling.attn_factor is not supported with 'yarn'"),
        ({}, [], {"phi3.rope.scaling.attn_factor": -1.0}, "attn_factor is -1.0, expected a number above 0"),
        (
            {},
            [],
            {"phi3.rope.scaling.original_context_length": None},
            "has no phi3.rope.scaling.original_context_length",
        ),
    ],
)
def test_factors_that_make_no_long_rope_are_said(
    extra: dict[str, torch.Tensor], without: list[str], metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "model.gguf", gguf_model("phi4-mini"), extra=extra, without=without, metadata=metadata)
    with pytest.raises(UserError, match=message):
        resolve(file)


@pytest.mark.parametrize("kind", ["F16", "BF16", *BLOCKS])
def test_dequantised_tensors_are_those_that_transformers_reads(kind: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", gguf_model("llama"), kind)
    vanilla = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).state_dict()
    source = resolve(file)
    assert not [key for key in source.names() if not torch.equal(source.get(key, torch.float32), vanilla[key])]


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_floats_are_loaded_in_the_type_of_the_file(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = resolve(write_gguf(tmp_path / "model.gguf", gguf_model("qwen2"), kind))
    assert init_inference(source, replace_with_kernel_inject=True).dtype == dtype


def floats(matrix: Linear) -> torch.Tensor:
    return unpack_rows(matrix, torch.arange(matrix.outputs))


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("name", [*SIZES, *MIXTURES])
def test_codes_stay_as_they_are(name: str, kind: str, tmp_path: Path) -> None:
    """Even after a transposition and a reordering of rows, and in the LM head."""
    model = gguf_model(name)
    if name in MIXTURES:
        model.config.num_experts_per_tok = 6  # all: rounding changes no choice
    source = resolve(write_gguf(tmp_path / "model.gguf", model, kind))
    exact = init_inference(source, dtype=torch.float32, replace_with_kernel_inject=True).weights
    engine = init_inference(source, replace_with_kernel_inject=True)
    stored = stored_by(engine)
    assert isinstance(stored, StoredWeights)
    assert stored.name == stored.head == BLOCKS[kind]
    for layer, expected_layer in zip(engine.weights.layers, exact.layers, strict=True):
        for role, matrix in layer.matrices.items():
            expected = floats(expected_layer.matrices[role])
            chooses = role in ("router.weight", "shared_gate.weight")  # a file has them in floats
            assert torch.equal(floats(matrix), expected.bfloat16().float() if chooses else expected), role
    assert engine.weights.head is not None
    assert exact.head is not None
    assert torch.equal(floats(engine.weights.head.matrix), floats(exact.head.matrix))
    logits, expected = logits_of(engine, TOKENS), logits_of(source.hf_model(torch.float32), TOKENS)
    assert float((logits - expected).norm() / expected.norm()) < 0.05  # prompts use bfloat16 products


def test_a_saved_engine_keeps_the_codes(tmp_path: Path) -> None:
    source = resolve(write_gguf(tmp_path / "model.gguf", gguf_model("llama"), "Q4_1"))
    engine = init_inference(source, save_mp_checkpoint_path=tmp_path / "saved")
    again = init_inference(resolve(tmp_path / "saved"))
    assert torch.equal(logits_of(again, TOKENS), logits_of(engine, TOKENS))


def test_types_may_differ_from_matrix_to_matrix(tmp_path: Path) -> None:
    """q, k and v have different types, so their joined matrix has none and is quantised again."""
    kinds = {"blk.0.attn_k.weight": "Q8_0", "blk.1.ffn_down.weight": "F32", "token_embd.weight": "F16"}
    source = resolve(write_gguf(tmp_path / "model.gguf", gguf_model("llama"), "Q4_1", kinds=kinds))
    engine = init_inference(source, replace_with_kernel_inject=True)
    first, second = (layer.matrices for layer in engine.weights.layers)
    assert (first["qkv.weight"].bits, second["qkv.weight"].bits, second["ff2.weight"].scales) == (8, 4, None)
    logits, expected = logits_of(engine, TOKENS), logits_of(source.hf_model(torch.float32), TOKENS)
    assert float((logits - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize(
    "kinds",
    [{"blk.1.ffn_down.weight": "Q8_0"}, {"output.weight": "Q4_0"}, {"blk.0.attn_output.weight": "Q4_1"}],
    ids=str,
)
def test_one_matrix_alone_may_have_codes(kinds: dict[str, str], tmp_path: Path) -> None:
    source = resolve(write_gguf(tmp_path / "model.gguf", gguf_model("llama"), kinds=kinds))
    logits, expected = (logits_of(model, TOKENS) for model in (init_inference(source), source.hf_model(torch.float32)))
    assert float((logits - expected).norm() / expected.norm()) < 0.05


def test_other_codes_are_dequantised_and_said_to_be(tmp_path: Path) -> None:
    """Q6_K has blocks of 256 numbers, which is the number of inputs of this matrix."""
    model = gguf_model("gpt2")
    file = write_gguf(tmp_path / "model.gguf", model, "Q8_0", kinds={"blk.1.ffn_down.weight": "Q6_K"})
    source = resolve(file)
    assert source.origin == f"GGUF file {file} (1 in Q6_K: dequantised)"
    tensor = next(item for item in gguf.GGUFReader(file).tensors if item.name == "blk.1.ffn_down.weight")
    expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, GGMLQuantizationType.Q6_K))
    assert torch.equal(source.get("transformer.h.1.mlp.c_proj.weight"), expected.T)
    matrix = init_inference(source, replace_with_kernel_inject=True).weights.layers[1].matrices["ff2.weight"]
    assert (matrix.bits, matrix.group) == (8, 32)
    requantised = init_inference(
        source, quant={"weight": {"num_bits": 4, "group_size": 64}}, replace_with_kernel_inject=True
    )
    assert stored_by(requantised).name == "int4-row-symmetric"  # type: ignore[union-attr]


def test_tokenizer_template_and_end_are_those_of_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = resolve(write_gguf(tmp_path / "model.gguf", gguf_model("llama")))
    assert source.tokenizer("Hi!")["input_ids"] == [HI, source.tokenizer.convert_tokens_to_ids("!")]
    assert source.tokenizer.chat_template == TEMPLATE
    assert source.tokenizer.padding_side == "left"
    assert source.generation_config is not None
    assert source.generation_config.eos_token_id == END
    assert capfd.readouterr() == ("", "")


def test_an_end_of_turn_ends_what_is_generated(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", gguf_model("llama"), metadata={"tokenizer.ggml.eot_token_id": HI})
    source = resolve(file)
    assert source.ends == {HI, END}
    engine = init_inference(source, replace_with_kernel_inject=True)
    text = engine.generate(TOKENS, max_new_tokens=9, do_sample=False, sequence_bias={(HI,): 1e4})
    assert text[0, TOKENS.shape[1] :].tolist() == [HI]


def test_a_cut_between_ranks_takes_whole_groups(tmp_path: Path) -> None:
    tensors = resolve(write_gguf(tmp_path / "model.gguf", gguf_model("bloom"), "Q4_1")).weights
    assert isinstance(tensors, GgufTensors)
    name = "transformer.h.0.self_attention.dense.weight"
    second = Cut(1, ((32, 64),), 64)
    assert torch.equal(tensors.codes(name, second), tensors.codes(name, None)[:, 32:])
    assert torch.equal(tensors.scales(name, second), tensors.scales(name, None)[:, 1:])
    with pytest.raises(UserError, match=r"groups of 32 inputs of .* cannot be cut"):
        tensors.scales(name, Cut(1, ((16, 32),), 64))


def edited(file: Path, position: int, new: bytes) -> Path:
    data = bytearray(file.read_bytes())
    data[position : position + len(new)] = new
    file.write_bytes(data)
    return file


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", gguf_model("llama"), "Q4_1")


@pytest.mark.parametrize(
    ("position", "new", "message"),
    [
        (0, b"GGML", 'begins with "GGML", expected "GGUF": it is no GGUF file'),
        (4, b"\x01\0\0\0", "is of GGUF version 1; expected 2 or 3"),
        (8, b"\xff" * 8, "is damaged or cut off"),
    ],
)
def test_a_damaged_header_is_said(position: int, new: bytes, message: str, llama: Path) -> None:
    with pytest.raises(UserError, match=message):
        resolve(edited(llama, position, new))


@pytest.mark.parametrize("length", [*range(1, 26), 3000, -10])
def test_a_file_that_is_cut_off_is_said(length: int, llama: Path) -> None:
    llama.write_bytes(llama.read_bytes()[:length])
    with pytest.raises(UserError, match=r"is cut off after \d bytes|is damaged or cut off"):
        resolve(llama)


def test_an_empty_file_is_said(llama: Path) -> None:
    llama.write_bytes(b"")
    with pytest.raises(UserError, match="is empty"):
        resolve(llama)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        resolve(tmp_path / "none.gguf")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", gguf_model("llama"), architecture="mamba")
    with pytest.raises(UserError, match="is of architecture 'mamba'; expected one of llama, qwen2, qwen3, gemma2"):
        resolve(file)


def test_an_unknown_type_is_named(llama: Path) -> None:
    """The type of a tensor comes after its name and its sizes."""
    name = b"blk.1.ffn_up.weight"
    position = llama.read_bytes().index(name) + len(name) + 4 + 2 * 8
    with pytest.raises(UserError, match=f"'{name.decode()}' is of the unknown type 99"):
        resolve(edited(llama, position, (99).to_bytes(4, "little")))


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", gguf_model("llama"), without=[name])
    with pytest.raises(UserError, match=f"1 missing: {name}"):
        resolve(file)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    model = gguf_model("qwen2")
    model.model.layers[0].mlp.up_proj.weight.data = torch.zeros(32, 64)
    with pytest.raises(UserError, match=r"blk.0.ffn_up.weight is of shape \[32, 64\], expected \[96, 64\]"):
        resolve(write_gguf(tmp_path / "model.gguf", model, "Q8_0"))


@pytest.mark.parametrize("stored", ["token_embd.weight", "blk.0.attn_q.weight", "output.weight"])
def test_a_matrix_with_one_dimension_is_named(stored: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", gguf_model("llama"), extra={stored: torch.zeros(64)})
    with pytest.raises(UserError, match=rf"{stored} is of shape \[64\], expected "):
        resolve(file)


def test_a_vector_of_codes_is_named(tmp_path: Path) -> None:
    """Otherwise its rows would be reordered and cut between ranks as if each byte of a block were a number."""
    vector = "blk.0.attn_qkv.bias"
    file = write_gguf(tmp_path / "model.gguf", gguf_model("bloom"), kinds={vector: "Q8_0"})
    with pytest.raises(UserError, match=f"the vector {vector} is stored as Q8_0; expected F32, F16, BF16"):
        resolve(file)


def test_infinities_are_refused(tmp_path: Path) -> None:
    model = gguf_model("llama")
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = float("inf")
    with pytest.raises(UserError, match=r"model.layers.1.mlp.down_proj.weight|ff2"):
        init_inference(resolve(write_gguf(tmp_path / "model.gguf", model)), replace_with_kernel_inject=True)


def test_a_tokenizer_of_another_model_is_said(tmp_path: Path) -> None:
    source = resolve(write_gguf(tmp_path / "model.gguf", gguf_model("llama"), tokens=VOCAB + 5))
    with pytest.raises(UserError, match=f"has {VOCAB + 5} tokens, the model {VOCAB}; they do not belong together"):
        _ = source.tokenizer


def test_every_tensor_is_written_by_the_helper() -> None:
    """Names unknown to gguf would be left out silently."""
    for name in SIZES:
        model = gguf_model(name)
        tied = int(model.config.tie_word_embeddings)
        assert len(tensors_of(model)) == len(model.state_dict()) - tied
