"""Recording a step and playing it, with a stand-in for CUDA's graphs; test_gpu.py has the real ones.

The stand-in keeps what a capture keeps to: nothing runs while it records, and a replay does what was launched then.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from engines import greedy, prompt, shallow
from gpus import INTERPRETED
from sweeps import swept

import labkit
from labkit.engine.runners.cuda_graph import GpuDecoder

pytestmark = INTERPRETED


class Stream:
    def wait_stream(self, other: Any) -> None:
        pass


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that were recorded, each with the number of its replays."""
    graphs: list[Any] = []

    class Graph:
        decoder: GpuDecoder
        replays = 0

        def replay(self) -> None:
            self.replays += 1
            assert self.decoder.last is not None
            self.decoder._launch(self.decoder.last)

    @contextmanager
    def recording(graph: Graph) -> Iterator[None]:
        state = decoders[-1].last.state  # type: ignore[union-attr]
        graph.decoder = decoders[-1]
        before = [(tensor, tensor.clone()) for tensor in (state.tokens, state.positions, state.past)]
        graphs.append(graph)
        yield
        for tensor, value in before:
            tensor.copy_(value)

    decoders: list[GpuDecoder] = []
    record = GpuDecoder._record

    def noted(self: GpuDecoder, *arguments: Any) -> None:
        decoders.append(self)
        record(self, *arguments)

    monkeypatch.setattr(GpuDecoder, "_record", noted)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return graphs


@pytest.mark.parametrize("name", swept(["gptj", "bloom"], ["bloom"]))
def test_a_step_is_recorded_once_and_played_for_every_token(name: str, recorded: list[Any]) -> None:
    engine = labkit.init_inference(shallow(name, 1), impl="triton")
    engine.module.runner.decoder.graphs = True
    for ids in (prompt(1, 5), prompt(3, 4), prompt(1, 7)):
        assert torch.equal(greedy(engine, ids, 4), greedy(shallow(name, 1), ids, 4))
    assert [graph.replays for graph in recorded] == [6, 3]  # of one sequence, played by two calls, and of four
