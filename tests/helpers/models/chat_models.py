"""Small random models to chat with: bytes are the tokens, and the chat template has a few letters."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from helpers.models.small_models import TOKENS, randomised, small_model
from transformers import AutoModelForCausalLM, PhimoeConfig, PreTrainedModel, PreTrainedTokenizerBase

from labkit.models.tokenizer import END_OF_TEXT, byte_tokenizer

VOCABULARY = END_OF_TEXT + 44  # the bytes, the end of a text, and made-up words that no text is tokenized into
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
LETTERS = range(ord(" "), ord("~") + 1)  # tokenizing a text of these letters gives the generated tokens again


def chat_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer(VOCABULARY)
    tokenizer.chat_template = template
    return tokenizer


@cache
def chat_model(name: str = "llama", *, only_letters: bool = False, layers: int = 3) -> PreTrainedModel:
    """only_letters: the model generates only letters and the end of a text."""
    model = small_model(name, vocab_size=VOCABULARY, eos_token_id=END_OF_TEXT, num_hidden_layers=layers)
    if only_letters:
        suppressed = set(range(VOCABULARY)) - {*LETTERS, END_OF_TEXT}
        model.generation_config.suppress_tokens = sorted(suppressed)
    return model


@cache
def chat_model_without_a_row() -> PreTrainedModel:
    """A mixture of experts with a router that no row has."""
    config = PhimoeConfig(
        **(TOKENS | {"vocab_size": VOCABULARY, "eos_token_id": END_OF_TEXT}),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    return randomised(AutoModelForCausalLM.from_config(config))


def chat_checkpoint(
    folder: Path, *, template: str | None = TEMPLATE, layers: int = 3, model: PreTrainedModel | None = None
) -> Path:
    """Saves a model and its tokenizer in `folder`; returns it. model: None: `chat_model` with `layers` layers."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    (model or chat_model(layers=layers)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
