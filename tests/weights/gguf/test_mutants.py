"""Mutants of a GGUF file are read, or refused in one line: none crashes, hangs, or raises another error."""

import math
import struct
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import hypothesis.strategies as st
import pytest
import torch
from helpers.models.gguf_descriptions import DERIVED, architecture_of
from helpers.models.gguf_files import gguf_model, sentencepiece, write_gguf
from helpers.models.gguf_mixtures import DERIVED_MIXTURES
from helpers.sweeps import sweep
from hypothesis import HealthCheck, given, settings

from labkit.system.errors import UserError
from labkit.weights.resolve import resolve

HANGS_S = 10.0
few = settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
many = settings(few, max_examples=400)
pytestmark = pytest.mark.usefixtures("one_thread")


def examine(file: Path) -> bool:
    """Whether the file can be read. Reads everything that users see of it."""
    start = time.perf_counter()
    try:
        source = resolve(file)
        vocabulary = source.hf_config.vocab_size
        shapes = {name: source.get(name, torch.float32).shape for name in source.names()}
        assert {name for name, shape in shapes.items() if vocabulary in shape}
        config = source.generation_config
        assert config is not None
        ends = config.eos_token_id
        tokens = source.tokenizer("Hi, 12 é\n  there")["input_ids"]
        source.tokenizer.decode(tokens)
        assert all(token < vocabulary for token in [*tokens, *([ends] if isinstance(ends, int) else ends or [])])
        return True
    except UserError as error:
        refusal = str(error)
    finally:
        assert time.perf_counter() - start < HANGS_S
    assert len(refusal) < 4000
    assert "\n" not in refusal
    return False


model = cache(partial(gguf_model, "llama"))
model_of = cache(gguf_model)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """Path of mutants, bytes of a whole file, and size of its header."""
    folder = tmp_path_factory.mktemp("mutants")
    whole = write_gguf(folder / "whole.gguf", model(), "Q4_1").read_bytes()
    assert examine(folder / "whole.gguf")
    return folder / "mutant.gguf", whole, gguf.GGUFReader(folder / "whole.gguf").data_offset


SIZES = st.sampled_from([0, 1, 2, 7, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1])
CHANGES = st.one_of(
    st.tuples(st.just("put"), st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("put"), SIZES.map(lambda size: struct.pack("<Q", size))),
    st.tuples(st.just("put"), SIZES.map(lambda size: struct.pack("<I", size & 0xFFFFFFFF))),
    st.tuples(st.just("insert"), st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("remove"), st.integers(1, 40).map(bytes)),
    st.tuples(st.just("cut"), st.just(b"")),
)
EDITS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), CHANGES), min_size=1, max_size=3)


def edited(whole: bytes, header: int, edits: list[tuple[float, tuple[str, bytes]]]) -> bytes:
    """Edits the first 300 bytes, the table of tensors at the end of the header, or the part between, equally often."""
    data = bytearray(whole)
    for share, (kind, new) in edits:
        part, inside = divmod(share * 3, 1)
        begin, end = ((0, 300), (300, header - 2000), (header - 2000, header))[int(part)]
        position = min(begin + int(inside * (end - begin)), len(data))
        if kind == "cut":
            del data[position:]
        else:
            data[position : position + (0 if kind == "insert" else len(new))] = b"" if kind == "remove" else new
    return bytes(data)


def check_bytes(original: Any, edits: Any) -> None:
    file, whole, header = original
    file.unlink(missing_ok=True)  # a mapped file is never overwritten
    file.write_bytes(edited(whole, header, edits))
    examine(file)


@few
@given(EDITS)
def test_a_file_with_changed_bytes_is_read_or_refused(original: Any, edits: Any) -> None:
    check_bytes(original, edits)


@sweep
@pytest.mark.timeout(1800)
@many
@given(EDITS)
def test_many_files_with_changed_bytes_are_read_or_refused(original: Any, edits: Any) -> None:
    check_bytes(original, edits)


KEYS = """general.architecture general.alignment split.count split.no llama.context_length llama.embedding_length
llama.block_count llama.feed_forward_length llama.attention.head_count llama.attention.head_count_kv llama.vocab_size
llama.attention.layer_norm_rms_epsilon llama.attention.key_length llama.attention.value_length llama.rope.freq_base
llama.rope.dimension_count llama.rope.scaling.type llama.rope.scaling.factor llama.rope.scaling.original_context_length
llama.rope.scaling.yarn_beta_fast llama.rope.scaling.yarn_attn_factor llama.rope.scale_linear llama.expert_count
tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens tokenizer.ggml.token_type tokenizer.ggml.merges
tokenizer.ggml.scores tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id tokenizer.ggml.eot_token_id
tokenizer.ggml.unknown_token_id tokenizer.ggml.padding_token_id tokenizer.ggml.add_bos_token
tokenizer.ggml.add_eos_token tokenizer.ggml.add_space_prefix tokenizer.chat_template"""
TEXTS = st.one_of(
    st.sampled_from(["yarn", "linear", "qwen2", "gpt2", "llama", "smollm", "a b", "H i", "Hi"]), st.text()
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 400),
    st.sampled_from([0, 1 << 20, (1 << 31) - 1, (1 << 32) - 1]),
    st.floats(width=32),
    st.sampled_from([0.0, 1.0, 1e-30, 1e30, math.nan, math.inf, -1.0]),
    TEXTS,
    st.lists(TEXTS, min_size=1, max_size=6),
    st.lists(st.integers(0, 6), min_size=1, max_size=300),
    st.lists(st.floats(width=32), min_size=1, max_size=300),
)
METADATA = st.dictionaries(st.sampled_from(KEYS.split()), VALUES, min_size=1, max_size=3)
SHAPES = st.lists(st.sampled_from([0, 1, 8, 16, 32, 64, 96]), min_size=1, max_size=3)
EXTRA: st.SearchStrategy[dict[str, torch.Tensor]] = st.one_of(
    st.just({}), st.fixed_dictionaries({"rope_freqs.weight": SHAPES.map(lambda shape: torch.ones(shape))})
)


def check_metadata(original: Any, metadata: Any, extra: Any, spm: bool) -> None:
    file = original[0]
    file.unlink(missing_ok=True)
    try:
        vocabulary = sentencepiece if spm else None
        write_gguf(file, model(), metadata=metadata, extra=extra, tokenizer=vocabulary)
    except (ValueError, UnicodeError, struct.error):  # the writer refuses it
        return
    examine(file)


@few
@given(METADATA, EXTRA, st.booleans())
def test_a_file_with_other_metadata_is_read_or_refused(original: Any, metadata: Any, extra: Any, spm: bool) -> None:
    check_metadata(original, metadata, extra, spm)


@sweep
@pytest.mark.timeout(1800)
@many
@given(METADATA, EXTRA, st.booleans())
def test_many_files_with_other_metadata_are_read_or_refused(
    original: Any, metadata: Any, extra: Any, spm: bool
) -> None:
    check_metadata(original, metadata, extra, spm)


ARCHITECTURE_KEYS = """context_length embedding_length block_count feed_forward_length attention.head_count vocab_size
attention.head_count_kv attention.layer_norm_rms_epsilon attention.layer_norm_epsilon attention.key_length
attention.value_length attention.sliding_window attention.sliding_window_pattern attention.scale logit_scale
embedding_scale residual_scale final_logit_softcapping rope.freq_base rope.freq_base_swa rope.dimension_count
rope.scaling.type rope.scaling.factor rope.scaling.original_context_length use_parallel_residual expert_count
expert_used_count expert_feed_forward_length expert_shared_feed_forward_length expert_shared_count expert_gating_func
expert_weights_scale expert_weights_norm expert_group_count leading_dense_block_count nextn_predict_layers
interleave_moe_layer_step"""
CHANGED = st.dictionaries(st.sampled_from(ARCHITECTURE_KEYS.split()), VALUES, min_size=1, max_size=2)


def check_architecture(original: Any, name: str, changed: dict[str, Any]) -> None:
    """Only the model's own metadata changes, so that the reader of its architecture meets it."""
    file, of = original[0], model_of(name)
    file.unlink(missing_ok=True)
    try:
        metadata = {f"{architecture_of(of.config)}.{key}": value for key, value in changed.items()}
        write_gguf(file, of, metadata=metadata)
    except (ValueError, UnicodeError, struct.error):
        return
    examine(file)


@few
@given(st.sampled_from(["gemma3", "granite", "glm-4.5-air"]), CHANGED)
def test_derived_rows_with_other_metadata_are_read_or_refused(original: Any, name: str, changed: Any) -> None:
    check_architecture(original, name, changed)


@sweep
@pytest.mark.timeout(1800)
@many
@given(st.sampled_from([*DERIVED, *DERIVED_MIXTURES]), CHANGED)
def test_many_derived_rows_with_other_metadata_are_read_or_refused(original: Any, name: str, changed: Any) -> None:
    check_architecture(original, name, changed)
