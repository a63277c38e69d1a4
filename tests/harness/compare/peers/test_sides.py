"""Sides of each installed peer that reads a file: greedy tokens equal vanilla's, bad requests fail in one line."""

import pytest
import torch

from labkit.harness.compare.compare import compare_with_each, comparison_case
from labkit.harness.compare.conversion import converted
from labkit.harness.compare.peers.llama_cpp import LLAMA_CPP
from labkit.harness.compare.peers.table import PEERS
from labkit.harness.compare.plan import Schedule

pytestmark = pytest.mark.timeout(900)  # a peer may compile its operators on first use
MISSING = {name: peer.unavailable() for name, peer in PEERS.items()}
INSTALLED = [
    pytest.param(name, marks=pytest.mark.skipif(reason is not None, reason=reason or ""))
    for name, reason in MISSING.items()
    if name != LLAMA_CPP and PEERS[name].converts  # the other peers have test files of their own
]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.sweep  # needs the runtimes that `labkit peers` installs; each takes half a minute
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2", "tiny-gptj", "tiny-bloom"])
@pytest.mark.parametrize("name", INSTALLED)
def test_float32_tokens_are_those_of_vanilla_and_int8_gives_as_many(name: str, model: str) -> None:
    case = comparison_case(model=model, dtype="float32", batch=2, prompt=20, new=12, threads=1)
    plain, *quantised = compare_with_each(tuple(PEERS[name].sides), "hf-eager", case, Schedule(rounds=2, stages=False))
    assert plain.tokens_equal
    for int8 in quantised:  # DeepSpeed has no int8 side
        assert int8.tokens_equal or int8.first_difference is not None
        assert [len(run.decode_ms) for run in int8.baseline.runs] == [11, 11]
        assert int8.baseline.work is not None
        assert plain.baseline.work is not None
        assert int8.baseline.work.weight_bytes < plain.baseline.work.weight_bytes


@pytest.mark.parametrize("name", INSTALLED)
def test_a_model_that_cannot_be_converted_is_one_line(name: str) -> None:
    side = next(iter(PEERS[name].sides))
    with (
        pytest.raises(RuntimeError, match=rf"^{side} could not convert no-such-model in float32: \S.*$"),
        converted(side, "no-such-model", dtype="float32", seed=0),
    ):
        pass
