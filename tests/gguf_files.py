"""GGUF files of small models, written as llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from small_models import small_model
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from labkit.models.policies import policy_for

VOCAB, HI, END = 288, 256, 257  # tokens in all, and those of "Hi" and of an end
PIECES = ["▁", *"hiterx", "▁▁", "▁h", "hi", "▁hi", "re", "th", "▁th", "▁▁▁", "▁t", "the", "there", "▁there"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "use_sliding_window": False},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "use_sliding_window": False},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_inner": 256},
    "bloom": {"hidden_size": 64, "n_head": 4},
}
_ADD: dict[type, Callable[[gguf.GGUFWriter, str, Any], None]] = {
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    str: gguf.GGUFWriter.add_string,
    list: gguf.GGUFWriter.add_array,
}
for _sizes in (SIZES["llama"], SIZES["qwen2"], SIZES["qwen3"]):
    _sizes |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def gguf_model(name: str) -> PreTrainedModel:
    """A model whose matrices have whole groups of 32 inputs, and whose numbers float16 can hold."""
    model = small_model(name, vocab_size=VOCAB, **SIZES[name])
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
    """Writes a model with the matrices of its layers as `kind`. `kinds` has other types by GGUF's names.

    metadata: further values by key, in place of those written by default; None: without the key. extra: further
    tensors. tokenizer: writes the vocabulary. split: the tensors of a part; 0: one file. The first part is returned.
    """
    config = model.config
    name = architecture or config.model_type
    writer = gguf.GGUFWriter(path, name, split_max_tensors=split)
    _describe(writer, config)
    if tokenizer is None:
        _tokenizer(writer, tokens)
    else:
        tokenizer(writer)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            _ADD[type(value)](writer, key, value)
    for stored, tensor in (tensors_of(model) | dict(extra or {})).items():
        if stored in without:
            continue
        matrix = tensor.ndim == 2 and stored.startswith(("blk.", "token_embd.weight", "output.weight"))
        asked = (kinds or {}).get(stored, kind if matrix else "F32")
        number = GGMLQuantizationType[asked]
        numbers = tensor.numpy()
        if asked == "F16":
            writer.add_tensor(stored, numbers.astype(np.float16))
        elif asked == "F32":
            writer.add_tensor(stored, numbers)
        else:
            data = gguf.quants.quantize(numbers, number) if asked != "Q6_K" else _some_blocks(tensor, 210, 256)
            writer.add_tensor(stored, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*")) if split else path


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """By GGUF's names, in GGUF's order of rows."""
    config, policy = model.config, policy_for(model.config)
    architecture = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    found = {}
    for name, parameter in model.state_dict().items():
        spellings = (name, name.removeprefix("transformer."))
        found_names = [names.get_name(each, try_suffixes=(".weight", ".bias")) for each in spellings]
        stored = next((each for each in found_names if each), None)
        if stored is None or (stored == "output.weight" and config.tie_word_embeddings):
            continue
        tensor = parameter.detach().clone()
        if policy.transposed and tensor.ndim == 2 and ".h." in name:
            tensor = tensor.T.contiguous()
        if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if config.model_type == "bloom" and ".query_key_value." in name:
            tensor = tensor.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
        found[stored] = tensor.contiguous()
    return found


def _some_blocks(tensor: Tensor, size: int, numbers: int) -> np.ndarray:
    """Blocks of a type that gguf only reads: random bits with small scales."""
    blocks = np.random.default_rng(0).integers(0, 256, (tensor.numel() // numbers, size), dtype=np.uint8)
    blocks[:, -2:] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    return blocks.reshape(tensor.shape[0], -1)


def _describe(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_context_length(getattr(config, "max_position_embeddings", 192))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type in ("gpt2", "bloom"):
        inner = getattr(config, "n_inner", None) or 4 * config.hidden_size
        writer.add_feed_forward_length(inner)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(16)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _tokenizer(writer: gguf.GGUFWriter, tokens: int) -> None:
    known = [*gguf_letters(), "Hi"]
    listed = [*known, "<|end|>", *(f"<unused{index}>" for index in range(tokens - len(known) - 1))][:tokens]
    kinds = [gguf.TokenType.NORMAL] * len(known) + [gguf.TokenType.CONTROL] * (len(listed) - len(known))
    byte_level(listed, kinds, ["H i"], "default")(writer)
    writer.add_bos_token_id(END)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(END)
    writer.add_chat_template(TEMPLATE)


def byte_level(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], pre: str
) -> Callable[[gguf.GGUFWriter], None]:
    """Writes a vocabulary of GPT-2's kind, whose text is split by the rules of the name `pre`."""

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(kinds))
        writer.add_token_merges(list(merges))

    return write


def sentencepiece(writer: gguf.GGUFWriter) -> None:
    """Writes a vocabulary of LLaMA's kind: bytes, PIECES by falling score, and tokens of other kinds."""
    kinds = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<u>", "<|im_end|>"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    listed = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(PIECES)]
    writer.add_token_types([*listed, kinds.USER_DEFINED, kinds.NORMAL])
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(PIECES))] + [0.0] * 2)


def gguf_letters() -> list[str]:
    """The letter of each byte in a byte-level vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=tokens).logits.float()
