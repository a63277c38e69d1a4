"""Peers that quantise the vanilla model: they need no converted files, and name what stays unquantised."""

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from labkit.harness.compare.compare import compare_with_each, comparison_case
from labkit.harness.compare.conversion import converted
from labkit.harness.compare.peers.bitsandbytes import BITSANDBYTES_NF4, BitsAndBytes
from labkit.harness.compare.peers.in_memory import InMemory, put_linears, stored
from labkit.harness.compare.peers.table import PEERS
from labkit.harness.compare.peers.torchao import TORCHAO_INT4, TORCHAO_INT8, TorchAo
from labkit.harness.compare.plan import Schedule
from labkit.system.errors import UserError
from labkit.weights.resolve import resolve

IN_MEMORY = {name: peer for name, peer in PEERS.items() if isinstance(peer, InMemory)}
SIDES = [side for peer in IN_MEMORY.values() for side in peer.sides]
PROMPT = torch.arange(40, 49)[None]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_linears_compute_what_the_transposed_matrices_did() -> None:
    model = resolve("tiny-gpt2").hf_model(torch.float32)
    with torch.inference_mode():
        before = model(PROMPT).logits
        put_linears(model)
        torch.testing.assert_close(model(PROMPT).logits, before)
    assert not [module for module in model.modules() if isinstance(module, Conv1D)]


@pytest.mark.parametrize("side", SIDES)
def test_no_process_converts_for_them(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    with converted(side, "tiny-gpt2", dtype="float32", seed=0) as folder:
        assert list(folder.iterdir()) == []


def test_what_is_stored_is_counted_apart_for_layers_and_head() -> None:
    """The layers of tiny-gpt2 count as int4 with one more byte for each output; the head is unchanged."""
    model = resolve("tiny-gpt2").hf_model(torch.bfloat16)
    put_linears(model)

    def halved(linear: nn.Linear) -> int:
        if linear is model.get_output_embeddings():
            return linear.weight.nbytes
        return linear.weight.nbytes // 4 + linear.out_features

    weights = stored(model, "int4", halved, quantised_head=False, computes="bfloat16")
    outputs, numbers = 3 * 64 + 64 + 256 + 64, 12 * 64**2
    assert (weights.name, weights.head) == ("int4", "bfloat16")
    assert weights.bits == 4 + 8 * outputs / numbers
    assert weights.head_bits == 16


class Packing(nn.Module):
    """A 4-bit linear, as bitsandbytes makes it on processors with AVX512-BF16."""

    support_avx512bf16_for_cpu = True

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__()


def test_a_matrix_that_nf4_cannot_pack_is_refused_with_its_shape() -> None:
    """tiny-llama has 176 outputs, which is not a multiple of 32."""
    api = SimpleNamespace(nn=SimpleNamespace(Linear4bit=Packing, Params4bit=lambda data, **_: nn.Parameter(data)))
    source = resolve("tiny-llama")
    with pytest.raises(UserError, match=r"got a matrix of 176 outputs and 64 inputs, .* use bitsandbytes-int8"):
        BitsAndBytes().quantised(api, BITSANDBYTES_NF4, source, source.hf_model(torch.float32))


def test_a_model_without_a_static_cache_is_no_side_of_torchao() -> None:
    model = SimpleNamespace(_can_compile_fullgraph=False)
    with pytest.raises(UserError, match="on a static cache; use hf-eager"):
        TorchAo().quantised(None, TORCHAO_INT8, resolve("tiny-gpt2"), model)  # type: ignore[arg-type]


def installed(*names: str) -> list[Any]:
    reasons = {name: IN_MEMORY[name].unavailable() for name in names}
    return [pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=why or "")) for name, why in reasons.items()]


@pytest.mark.sweep  # PyTorch's compiler takes half a minute for each side
@pytest.mark.parametrize("name", installed(*IN_MEMORY))
def test_each_side_generates_as_many_tokens_and_says_how_it_stores_them(name: str) -> None:
    case = comparison_case(model="tiny-gpt2", dtype="bfloat16", batch=2, prompt=20, new=12, threads=1)
    eight, four = compare_with_each(tuple(PEERS[name].sides), "hf-eager", case, Schedule(rounds=2, stages=False))
    for record in (eight, four):
        steps = [[len(run.decode_ms) for run in side.runs] for side in (record.baseline, record.candidate)]
        assert steps[0] == steps[1]
        assert all(steps[0])
    assert eight.baseline.weights == "int8"
    assert four.baseline.weights in {"int4", "nf4"}
    assert eight.baseline.work is not None
    assert four.baseline.work is not None
    assert four.baseline.work.decode_bytes < eight.baseline.work.decode_bytes


@pytest.mark.sweep
@pytest.mark.parametrize("name", installed("torchao"))
def test_a_head_whose_shape_torchao_cannot_pack_stays_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary of 500 is not a multiple of 16."""
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    source = resolve("tiny-gpt2")
    model = source.hf_model(torch.float32)
    put_linears(model)
    model.set_output_embeddings(nn.Linear(64, 500, bias=False))
    peer = PEERS[name]
    assert isinstance(peer, InMemory)
    side = peer.quantised(peer.import_package(), TORCHAO_INT4, source, model)
    assert str(side.weights) == "int4, LM head float32"
