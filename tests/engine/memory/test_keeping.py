"""A failed call leaves its cache unchanged in every way to run a model, so the same call can be repeated."""

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from helpers.models.engines import error, fused, greedy, prompt, vanilla
from helpers.models.offloaded import streamed
from torch import Tensor

import labkit
from labkit.engine import InferenceEngine
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners import step as step_module

SAME = 1e-5
CODE_OF_CACHES = tuple(f"labkit.engine.memory.{name}" for name in ("kv_cache", "heads", "tables"))
Engine = Callable[[Path], InferenceEngine]
WAYS: dict[str, Engine] = {
    "one call": lambda folder: fused("llama"),
    "op by op": lambda folder: fused("llama", "reference"),
    "layers in a file": lambda folder: streamed("llama", folder),
    "keys and values in a file": lambda folder: labkit.init_inference(vanilla("llama"), kv_offload={"path": folder}),
    "ALiBi": lambda folder: fused("bloom"),
}


def fails_at(patch: pytest.MonkeyPatch, method: str, call: int) -> None:
    """Makes call number `call` of a method of caches raise, counted from now."""
    original, remaining = getattr(KVCache, method), [call]

    def failing(self: KVCache, *args: Any) -> Any:
        result = original(self, *args)
        remaining[0] -= 1
        if not remaining[0]:
            raise KeyboardInterrupt
        return result

    patch.setattr(KVCache, method, failing)


def masked(ids: Tensor, hidden: int) -> Tensor:
    mask = torch.ones_like(ids)
    mask[0, :hidden] = 0
    return mask


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_that_fails_in_a_later_piece_can_be_given_again(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty cache, and with padding that the failing call shows and the next call hides."""
    monkeypatch.setattr(step_module, "CHUNK_ROWS", 8)
    engine = WAYS[way](tmp_path)
    ids = prompt(2, 30)
    whole = engine(ids, attention_mask=masked(ids, 5)).logits
    cache = engine.module.new_cache()
    for part in (slice(0, 13), slice(13, 30)):
        for mask in (None, torch.ones_like(ids[:, : part.stop])):
            for piece in (1, 3):
                with monkeypatch.context() as patch:
                    fails_at(patch, "place", piece)
                    with pytest.raises(KeyboardInterrupt):
                        engine(ids[:, part], past_key_values=cache, attention_mask=mask)
                assert cache.get_seq_length() == part.start
        logits = engine(ids[:, part], past_key_values=cache, attention_mask=masked(ids[:, : part.stop], 5)).logits
        visible = masked(ids, 5)[:, part].bool()
        assert error(logits[visible], whole[:, part][visible]) <= SAME
    assert cache.get_seq_length() == 30


def test_what_fails_behind_the_last_layer_adds_no_tokens() -> None:
    engine, ids = fused("gpt2"), prompt(2, 7)
    cache = engine(ids[:, :4]).past_key_values
    with pytest.raises(ValueError, match="batch"):
        engine(ids[:, 4:], past_key_values=cache, labels=torch.zeros(5, 3, dtype=torch.long))
    assert cache.get_seq_length() == 4
    assert error(engine(ids[:, 4:], past_key_values=cache).logits, engine(ids).logits[:, 4:]) <= SAME


@pytest.mark.parametrize("staged", [False, True])
def test_a_token_that_fails_while_text_is_generated_is_not_in_the_cache(
    *, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = labkit.init_inference(vanilla("llama"))  # its first steps are compared, so each has one token
    ids, cache = prompt(2, 5), engine.module.new_cache()
    with engine.module.runner.stage_by_stage() if staged else nullcontext(), monkeypatch.context() as patch:
        fails_at(patch, "place_next", 3)
        with pytest.raises(KeyboardInterrupt):
            greedy(engine, ids, 9, past_key_values=cache)
    assert cache.get_seq_length() == 7
    whole = greedy(engine, ids, 9)
    assert torch.equal(greedy(engine, whole[:, :8], 6, past_key_values=cache), whole)


class Interrupted:
    """Context that raises KeyboardInterrupt at line number `line` that runs in a cache's code, counted from 1."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __enter__(self) -> "Interrupted":
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._reached if frame.f_globals.get("__name__") in CODE_OF_CACHES else None

    def _reached(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._reached


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("cached", [0, 4])
def test_a_call_that_is_interrupted_at_any_line_of_its_cache_can_be_repeated(cached: int, dtype: torch.dtype) -> None:
    """The cache is new, or grows with padding in it."""
    engine = labkit.init_inference(vanilla("llama"), kv_dtype=dtype)
    ids, mask = prompt(2, 9), masked(prompt(2, 9), 2)
    expected = engine(ids, attention_mask=mask).logits[:, cached:]
    line = 0
    while True:
        line += 1
        cache = engine.module.new_cache()
        if cached:
            engine(ids[:, :cached], past_key_values=cache, attention_mask=mask[:, :cached])
        with suppress(KeyboardInterrupt), Interrupted(line) as interrupted:
            engine(ids[:, cached:], past_key_values=cache, attention_mask=mask)
        if interrupted.left > 0:
            break  # the call has fewer lines
        assert cache.get_seq_length() == cached
        logits = engine(ids[:, cached:], past_key_values=cache, attention_mask=mask).logits
        assert error(logits[mask[:, cached:].bool()], expected[mask[:, cached:].bool()]) <= SAME
    assert line > 30
