"""A generation pauses after as many tokens as it was asked for, and can be left at every pause."""

from typing import Any

import pytest
import torch
from transformers import GenerationMixin

import labkit
from labkit.harness.turns.turn_streamer import LeftError, TurnStreamer

PROMPT = torch.arange(5, 13)[None].repeat(2, 1)
NEW = 9


class Parent:
    """Asks for turns of these lengths, then for something else."""

    def __init__(self, *lengths: int) -> None:
        self.turns: list[dict[str, Any]] = []
        requests: list[dict[str, Any]] = [{"op": "go_on", "tokens": length} for length in lengths]
        self._requests = iter([*requests, {"op": "place"}])

    def exchange(self, turn: dict[str, Any]) -> dict[str, Any]:
        self.turns.append(turn)
        return next(self._requests)

    @property
    def tokens(self) -> torch.Tensor:
        """Of all turns [sequence, position]."""
        return torch.tensor([step for turn in self.turns for step in turn["tokens"]]).T


@pytest.fixture(scope="module", params=["vanilla", "engine"])
def model(request: pytest.FixtureRequest) -> GenerationMixin:
    source = labkit.resolve("tiny-llama")
    loaded = source.hf_model(torch.float32) if request.param == "vanilla" else labkit.init_inference(source)
    loaded.generation_config.eos_token_id = None
    return loaded  # type: ignore[no-any-return]


def generate(model: GenerationMixin, streamer: TurnStreamer | None = None) -> torch.Tensor:
    with torch.inference_mode():
        return model.generate(PROMPT, max_new_tokens=NEW, do_sample=False, streamer=streamer, pad_token_id=0)[:, 8:]  # type: ignore[no-any-return]


def test_turns_add_up_to_the_tokens_of_an_unbroken_generation(model: GenerationMixin) -> None:
    parent = Parent(3, 2, 3)
    streamer = TurnStreamer(parent.exchange)
    with pytest.raises(LeftError):  # at the pause after the last token
        generate(model, streamer)
    assert [len(turn["steps_ms"]) for turn in parent.turns] == [1, 3, 2, 3]
    assert torch.equal(parent.tokens, generate(model))


def test_a_generation_may_end_in_the_middle_of_a_turn(model: GenerationMixin) -> None:
    parent = Parent(100)
    streamer = TurnStreamer(parent.exchange)
    generate(model, streamer)
    last = streamer.taken()
    assert len(last["steps_ms"]) == NEW - 1
    assert all(took > 0 for took in last["steps_ms"])


@pytest.mark.parametrize("turns", [(), (2,)])
def test_a_generation_that_is_left_leaves_nothing_behind(model: GenerationMixin, turns: tuple[int, ...]) -> None:
    before = generate(model)
    parent = Parent(*turns)
    with pytest.raises(LeftError) as left:
        generate(model, TurnStreamer(parent.exchange))
    assert left.value.request == {"op": "place"}
    assert torch.equal(generate(model), before)
