"""GGUF files of small models, laid out as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from helpers.models.gguf_descriptions import (
    DERIVED,
    architecture_of,
    describe,
    long_rope_factors,
    stored_rows,
)
from helpers.models.gguf_mixtures import CHOICE_BIAS, DERIVED_MIXTURES, MIXTURES, stored_experts
from helpers.models.small_models import randomised, small_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from labkit.models.policies import policy_for

VOCAB, HI, END = 288, 256, 257  # number of tokens; token of "Hi"; token that ends a text
PIECES = ["▁", *"hiterx", "▁▁", "▁h", "hi", "▁hi", "re", "th", "▁th", "▁▁▁", "▁t", "the", "there", "▁there"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "use_sliding_window": False},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "use_sliding_window": False},
    "gemma2": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_inner": 256},
    "bloom": {"hidden_size": 64, "n_head": 4},
}
SPECIALS = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
_ADD: dict[type, Callable[[gguf.GGUFWriter, str, Any], None]] = {
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    str: gguf.GGUFWriter.add_string,
    list: gguf.GGUFWriter.add_array,
}
for _sizes in (SIZES["llama"], SIZES["qwen2"], SIZES["qwen3"], SIZES["gemma2"]):
    _sizes |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def gguf_model(name: str) -> PreTrainedModel:
    """Model whose matrices have whole groups of 32 inputs, and whose numbers fit float16 exactly."""
    if name in SIZES:
        model = small_model(name, vocab_size=VOCAB, **SIZES[name])
    else:
        model_type, sizes = (DERIVED | MIXTURES | DERIVED_MIXTURES)[name]
        config = AutoConfig.for_model(model_type, vocab_size=VOCAB, **SPECIALS, **sizes)
        model = randomised(AutoModelForCausalLM.from_config(config))
    for index, (buffer_name, buffer) in enumerate(model.named_buffers()):
        if buffer_name.endswith(CHOICE_BIAS):
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(index)) * 0.1)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    return model


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str = "F32",
    *,
    kinds: dict[str, str] | None = None,
    without: Collection[str] = (),
    architecture: str | None = None,
    tokens: int = VOCAB,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Tensor] | None = None,
    split: int = 0,
) -> Path:
    """Writes a model; returns the path of its first part.

    `kind` is the type of the layers' matrices, and `kinds` has other types by the tensors' GGUF names.
    `metadata` has values by key, which replace those written by default; None removes the key.
    `extra` has further tensors. `tokenizer` writes the vocabulary.
    `split` is the number of tensors in a part; 0 writes one file.
    """
    config = model.config
    name = architecture or architecture_of(config)
    writer = gguf.GGUFWriter(path, name, split_max_tensors=split)
    describe(writer, config)
    if tokenizer is None:
        _tokenizer(writer, tokens)
    else:
        tokenizer(writer)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            _ADD[type(value)](writer, key, value)
    for stored, tensor in (tensors_of(model) | long_rope_factors(config) | dict(extra or {})).items():
        if stored in without:
            continue
        matrix = (
            tensor.ndim >= 2
            and "gate_inp" not in stored
            and not stored.endswith(".bias")
            and stored.startswith(("blk.", "token_embd.weight", "output.weight"))
        )
        type_name = (kinds or {}).get(stored, kind if matrix else "F32")
        quantization = GGMLQuantizationType[type_name]
        numbers = tensor.numpy()
        if type_name == "F16":
            writer.add_tensor(stored, numbers.astype(np.float16))
        elif type_name == "F32":
            writer.add_tensor(stored, numbers)
        else:
            data = (
                gguf.quants.quantize(numbers, quantization) if type_name != "Q6_K" else _some_blocks(tensor, 210, 256)
            )
            writer.add_tensor(stored, data, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*")) if split else path


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors of the model by GGUF's names, with rows in GGUF's order."""
    config, policy = model.config, policy_for(model.config)
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture_of(config))
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = {}
    for name, parameter in stored_experts(model.state_dict()).items():
        spellings = (name, name.removeprefix("transformer."))
        gguf_names = [names.get_name(spelling, try_suffixes=(".weight", ".bias")) for spelling in spellings]
        stored = next((gguf_name for gguf_name in gguf_names if gguf_name), None)
        if stored is None or (stored == "output.weight" and config.tie_word_embeddings):
            continue
        tensor = parameter.detach().clone()
        if policy.transposed and tensor.ndim == 2 and ".h." in name:
            tensor = tensor.T.contiguous()
        tensor = stored_rows(config, name, tensor)
        tensors[stored] = tensor.contiguous()
    return tensors


def _some_blocks(tensor: Tensor, size: int, numbers: int) -> np.ndarray:
    """Blocks of a type that gguf can read but not write: random bits with small scales."""
    blocks = np.random.default_rng(0).integers(0, 256, (tensor.numel() // numbers, size), dtype=np.uint8)
    blocks[:, -2:] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    return blocks.reshape(tensor.shape[0], -1)


def _tokenizer(writer: gguf.GGUFWriter, tokens: int) -> None:
    words = [*gguf_letters(), "Hi"]
    vocabulary = [*words, "<|end|>", *(f"<unused{index}>" for index in range(tokens - len(words) - 1))][:tokens]
    kinds = [gguf.TokenType.NORMAL] * len(words) + [gguf.TokenType.CONTROL] * (len(vocabulary) - len(words))
    byte_level(vocabulary, kinds, ["H i"], "default")(writer)
    writer.add_bos_token_id(END)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(END)
    writer.add_chat_template(TEMPLATE)


def byte_level(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], pre: str
) -> Callable[[gguf.GGUFWriter], None]:
    """Returns a function that writes a GPT-2 vocabulary, whose text is split by the rules named `pre`."""

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(kinds))
        writer.add_token_merges(list(merges))

    return write


def sentencepiece(writer: gguf.GGUFWriter) -> None:
    """Writes a LLaMA vocabulary: bytes, PIECES in order of falling scores, and tokens of other kinds."""
    kinds = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<u>", "<|im_end|>"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(PIECES)]
    writer.add_token_types([*types, kinds.USER_DEFINED, kinds.NORMAL])
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(PIECES))] + [0.0] * 2)


def gguf_letters() -> list[str]:
    """Letter of each byte in a byte-level vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=tokens).logits.float()
