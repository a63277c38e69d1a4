"""Sides run the same model as vanilla.

With few bits the tokens differ, so the logits of a prompt are compared: their direction is vanilla's, within the
rounding of the weights.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models.engines import distance
from helpers.sweeps import sweep
from torch import Tensor

import labkit
from labkit.harness.compare.conversion import converted
from labkit.harness.compare.loader import Room
from labkit.harness.compare.peers.greedy import GreedySteps
from labkit.harness.compare.peers.llama_cpp import LLAMA_CPP, LLAMA_CPP_GGUF
from labkit.harness.compare.peers.table import PEERS
from labkit.harness.compare.sides import PEER_ROWS, side_row
from labkit.weights.box import HOW_TO_GET, boxed_file
from labkit.weights.resolve import resolve

LEAST_COSINE = {16: 0.9999, 8: 0.999, 4: 0.98}  # bits -> the least cosine; with other weights the cosine is below 0.5
PROMPT = torch.arange(40, 60)[None]
pytestmark = pytest.mark.timeout(900)  # a peer may compile its operators on first use
MISSING = {name: peer.unavailable() for name, peer in PEERS.items()}
SIDES = [
    pytest.param(row.name, marks=pytest.mark.skipif(MISSING[row.peer] is not None, reason=MISSING[row.peer] or ""))
    for row in PEER_ROWS
    if row.peer != "ctranslate2"
    and row.name != LLAMA_CPP_GGUF  # ctranslate2 gives no logits, GGUF files have their own test
]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def vanilla(model: str, seed: int = 0) -> Tensor:
    with torch.inference_mode():
        return resolve(model, seed=seed).hf_model(torch.float32)(PROMPT).logits[0, -1]


def cosine(first: Tensor, second: Tensor) -> float:
    return float(torch.cosine_similarity(first, second, dim=0))


def bits(side: str) -> int:
    if any(four in side for four in ("q4", "int4", "nf4")):
        return 4
    return 8 if side_row(side).own_type else 16


def logits(model: Any) -> Tensor:
    if isinstance(model, GreedySteps):
        model.forget()
        return torch.from_numpy(np.array(model.logits(PROMPT.numpy())))[0]
    with torch.inference_mode():
        return model(PROMPT).logits[0, -1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-llama"])
def test_other_weights_do_not_agree(model: str) -> None:
    """The bounds separate the same weights from other weights."""
    assert cosine(vanilla(model), vanilla(model, seed=1)) < 0.5


@sweep  # needs the runtimes that `labkit peers` installs; each takes some seconds
@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-llama"])
@pytest.mark.parametrize("side", SIDES)
def test_the_logits_of_a_prompt_are_those_of_vanilla(side: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (side, model) == ("bitsandbytes-nf4", "tiny-llama"):
        pytest.skip("it has a matrix that bitsandbytes cannot pack")
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    source = resolve(model)
    with converted(side, model, dtype="float32", seed=0) as folder:
        loaded = PEERS[side_row(side).peer].load(side, folder, source, torch.float32, Room(1, 1, 1, 32))
        assert cosine(logits(loaded.model), vanilla(model)) > LEAST_COSINE[bits(side)]


@sweep
@pytest.mark.skipif(MISSING[LLAMA_CPP] is not None, reason=MISSING[LLAMA_CPP] or "")
@pytest.mark.skipif(boxed_file() is None, reason=f"needs the trained model: {HOW_TO_GET}")
@torch.inference_mode()
def test_the_logits_of_a_trained_file_differ_from_llama_cpp_only_by_rounded_activations(
    tmp_path: Path,
) -> None:
    """llama.cpp rounds activations to 8 bits. The engine does so too for this test, to measure the effect alone."""
    source, peer = resolve("smollm2-135m"), PEERS[LLAMA_CPP]
    ids = source.tokenizer("Paris is the capital of France. Rome is the capital of", return_tensors="pt").input_ids
    peer.convert(LLAMA_CPP_GGUF, source, "float32", tmp_path)
    side = peer.load(LLAMA_CPP_GGUF, tmp_path, source, torch.float32, Room(1, 1, 1, 64))
    of_llama_cpp = torch.from_numpy(np.array(side.model.logits(ids.numpy())))[0]
    exact = labkit.init_inference(source, dtype=torch.float32)(ids).logits[0, -1]
    rounded = labkit.init_inference(source, quant={"as_stored": True, "activation": {"enabled": True}})
    cache = None
    for position in range(ids.shape[1]):  # row by row: only steps of few rows are rounded
        out = rounded(ids[:, position : position + 1], past_key_values=cache)
        cache = out.past_key_values
    of_engine = labkit.init_inference(source)(ids).logits[0, -1]
    assert distance(of_engine, exact) < 0.03
    assert distance(of_engine, of_llama_cpp) < 2 * distance(out.logits[0, -1], exact) + distance(of_engine, exact)
    assert distance(of_llama_cpp.roll(1), of_engine) > 1
