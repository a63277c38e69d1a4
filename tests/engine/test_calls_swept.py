"""Random calls with all shapes of models, dtypes, positions and keywords: the result equals transformers', or an error
says what was wrong.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.models.engines import distance
from helpers.models.small_models import small_model
from helpers.sweeps import sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import labkit
from labkit.engine import InferenceEngine
from labkit.system.errors import UserError

VOCABULARY = 131
BOUNDS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 0.15, "int8": 0.25}  # of the spread of the logits
ANY = (ValueError, TypeError, IndexError, AttributeError, RuntimeError, AssertionError)
REFUSED = (ValueError, TypeError, AttributeError)
SHAPES: dict[str, Callable[[int, int, int], dict[str, int]]] = {
    "gpt2": lambda heads, size, wide: {"n_head": heads, "n_embd": heads * size, "n_inner": wide},
    "gptj": lambda heads, size, wide: {"n_head": heads, "n_embd": 2 * heads * size, "n_inner": wide, "rotary_dim": 2},
    "gpt-neox-sequential": lambda heads, size, wide: {
        "num_attention_heads": heads, "hidden_size": 2 * heads * size, "intermediate_size": wide,
    },
    "bloom": lambda heads, size, wide: {"n_head": heads, "hidden_size": heads * size},
    "opt": lambda heads, size, wide: {
        "num_attention_heads": heads, "hidden_size": heads * size, "ffn_dim": wide, "word_embed_proj_dim": wide + 2,
    },
    "llama": lambda heads, size, wide: {
        "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 2 * size, "hidden_size": heads * wide,
        "intermediate_size": wide,
    },
    "qwen3": lambda heads, size, wide: {
        "num_attention_heads": 2 * heads, "num_key_value_heads": heads, "head_dim": 2 * size,
        "hidden_size": 2 * heads * size, "intermediate_size": wide,
    },
}  # fmt: skip


@cache
def model(name: str, heads: int, size: int, wide: int) -> PreTrainedModel:
    sizes: dict[str, Any] = SHAPES[name](heads, size, wide)
    return small_model(name, **sizes)


@cache
def engine(name: str, heads: int, size: int, wide: int, dtype: str, kv_dtype: str | None) -> InferenceEngine:
    return labkit.init_inference(model(name, heads, size, wide), dtype=dtype, kv_dtype=kv_dtype, impl="cpp")


shapes = st.tuples(
    st.sampled_from(sorted(SHAPES)), st.sampled_from([1, 3, 5]), st.sampled_from([2, 3, 9]), st.sampled_from([5, 34])
)
sizes = st.tuples(st.integers(1, 4), st.integers(1, 40))


def positions(batch: int, tokens: int) -> st.SearchStrategy[Any]:
    begins = st.one_of(st.integers(0, 150), st.integers(2**16 - 9, 2**16 + 9), st.integers(2**31 - 60, 2**33))
    counted = begins.map(lambda begin: torch.arange(begin, begin + tokens)[None].expand(batch, -1))
    odd = st.sampled_from(
        [torch.zeros(batch, tokens), torch.zeros(1, tokens + 1).long(), -torch.ones(1, tokens).long()]
    )
    return st.one_of(counted, counted.map(lambda ids: ids.flip(1)), odd)


def masks(batch: int, tokens: int) -> st.SearchStrategy[Any]:
    paddings = st.lists(st.integers(0, tokens - 1), min_size=batch, max_size=batch)
    padded = paddings.map(lambda hidden: torch.stack([(torch.arange(tokens) >= count).long() for count in hidden]))
    return st.one_of(padded, padded.map(torch.Tensor.bool), padded.map(torch.Tensor.float), st.just(torch.ones(1, 99)))


def keywords(batch: int, tokens: int) -> st.SearchStrategy[dict[str, Any]]:
    """Some keywords of `forward`, with valid and invalid values."""
    ids = torch.ones(batch, tokens, dtype=torch.long)
    return st.fixed_dictionaries(
        {},
        optional={
            "attention_mask": masks(batch, tokens),
            "position_ids": positions(batch, tokens),
            "logits_to_keep": st.sampled_from([0, 1, tokens, 99, -1, 0.5, torch.tensor([0]), torch.tensor([-1, 0])]),
            "use_cache": st.sampled_from([True, False, None]),
            "return_dict": st.just(True),
            "output_hidden_states": st.booleans(),
            "labels": st.sampled_from([ids, ids[:, :-1], None]),
            "past_key_values": st.sampled_from([None, ()]),
            "head_mask": st.sampled_from([None, torch.zeros(2, 2)]),
            "inputs_embeds": st.sampled_from([None, torch.zeros(batch, tokens, 8)]),
            "token_type_ids": st.sampled_from([None, ids]),
            "nonsense": st.sampled_from([None, 1]),
        },
    )


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    batch, tokens = draw(sizes)
    # one call in three has no keywords, so that enough calls succeed
    options = draw(keywords(batch, tokens)) if draw(st.integers(0, 2)) else {}
    ids = torch.randint(
        1, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))
    )
    if draw(st.integers(0, 19)) == 0:
        ids[0, 0] = draw(st.sampled_from([-1, VOCABULARY, 2**40]))
    dtypes = draw(st.sampled_from(sorted(BOUNDS))), draw(st.sampled_from([None, None, "int8"]))
    return draw(shapes), dtypes, ids, options


def check_forward(call: tuple[Any, ...]) -> str:
    """Outcome of a call: "right", "refused", or "both refuse"."""
    shape, (dtype, kv_dtype), ids, options = call
    fused = engine(*shape, dtype, kv_dtype)
    try:
        output = fused(ids, **options)
    except UserError:
        return "refused"
    except ANY as error:
        own_error: Exception = error
        with torch.no_grad(), pytest.raises(ANY):
            model(*shape)(ids, **options)
    else:
        return compared(call, output)
    assert isinstance(own_error, REFUSED), f"{own_error!r} is no error for {options}"
    return "both refuse"


def compared(call: tuple[Any, ...], output: Any) -> str:
    """Outcome for `check_forward` if the engine computed something."""
    shape, (dtype, kv_dtype), ids, options = call
    with torch.no_grad():
        try:
            expected = model(*shape)(ids, **options)
        except (IndexError, RuntimeError):
            return "further than vanilla"
    shown = visible(options, ids, expected.logits.shape[1])
    if int(shown.sum()) > 0 and output.logits.numel() > 1:
        difference = distance(output.logits[shown], expected.logits[shown])
        assert difference <= BOUNDS[dtype] + (0.15 if kv_dtype else 0), f"off by {difference}"
    if expected.loss is not None and options.get("attention_mask") is None and dtype == "float32" and kv_dtype is None:
        assert torch.allclose(output.loss, expected.loss, rtol=1e-3, atol=1e-4, equal_nan=True)
    return "right"


def visible(options: dict[str, Any], ids: torch.Tensor, kept_tokens: int) -> torch.Tensor:
    """Tokens whose logits count: the mask shows them."""
    mask = options.get("attention_mask")
    shown = torch.ones_like(ids).bool() if mask is None else mask != 0
    keep = options.get("logits_to_keep", 0)
    return shown[:, keep] if isinstance(keep, torch.Tensor) else shown[:, -kept_tokens:]


def check_generate(call: tuple[Any, ...]) -> str:
    """Outcome of a few greedy tokens in float32, in which ties are unlikely."""
    shape, _, ids, options = call
    options = {
        name: value for name, value in options.items() if name in ("attention_mask", "position_ids", "head_mask")
    }
    arguments = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0} | options
    texts: list[Any] = []
    for candidate in (engine(*shape, "float32", None), model(*shape)):
        try:
            texts.append(candidate.generate(ids, **arguments))
        except ANY as error:
            texts.append(error)
    own_text, expected = texts
    if isinstance(own_text, Exception):
        assert isinstance(own_text, UserError) or isinstance(expected, Exception), repr(own_text)
        return "refused"
    if isinstance(expected, Exception):
        return "further than vanilla"
    assert torch.equal(own_text, expected)
    return "right"


@settings(derandomize=True, deadline=None, max_examples=25)
@given(calls())
def test_forward_is_transformers_or_refuses(call: tuple[Any, ...]) -> None:
    check_forward(call)


@sweep
@pytest.mark.timeout(1800)
@settings(derandomize=True, deadline=None, max_examples=300)
@given(calls())
def test_forward_is_transformers_or_refuses_swept(call: tuple[Any, ...]) -> None:
    check_forward(call)


@sweep
@pytest.mark.timeout(1800)
@settings(derandomize=True, deadline=None, max_examples=100)
@given(calls())
def test_generate_is_transformers_or_refuses_swept(call: tuple[Any, ...]) -> None:
    check_generate(call)
