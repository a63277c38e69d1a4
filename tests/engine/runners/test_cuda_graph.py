"""Capturing and replaying a step, with a fake of CUDA's graphs; test_gpu.py uses the real ones.

The fake obeys the rules of a capture: nothing runs while it records, and a replay does what was launched during it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from helpers.kernels.gpus import INTERPRETED
from helpers.models.engines import greedy, prompt, shallow
from helpers.models.layer_ranges import CutModel
from helpers.models.long_ropes import SHORT, long_rope_model
from helpers.sweeps import sweep, swept
from transformers import set_seed

import labkit
from labkit.engine.runners.cuda_graph import GpuDecoder
from labkit.engine.runners.step import StepInput

RULES: dict[str, dict[str, Any]] = {
    "some tokens": {"do_sample": True, "top_k": 20, "top_p": 0.9, "min_new_tokens": 3},
    "all tokens": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "greedy": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}
pytestmark = [*INTERPRETED, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


class Stream:
    def wait_stream(self, other: Any) -> None:
        pass


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Captured graphs, each with the number of its replays."""
    graphs: list[Any] = []

    class Graph:
        decoder: GpuDecoder
        replays = 0

        def replay(self) -> None:
            self.replays += 1
            assert self.decoder.last is not None
            self.decoder._launch(self.decoder.last)

    @contextmanager
    def recording(graph: Graph, capture_error_mode: str) -> Iterator[None]:
        graph.decoder = decoders[-1]
        recording = graph.decoder.last
        assert recording is not None
        state = recording.inputs.state
        reads = (state.tokens, state.positions, state.past, recording.inputs.buffers.given)
        saved = [(tensor, tensor.clone()) for tensor in reads]
        graphs.append(graph)
        yield
        for tensor, value in saved:
            tensor.copy_(value)

    decoders: list[GpuDecoder] = []
    record = GpuDecoder._record

    def record_and_note(self: GpuDecoder, *arguments: Any) -> None:
        decoders.append(self)
        record(self, *arguments)

    monkeypatch.setattr(GpuDecoder, "_record", record_and_note)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return graphs


@pytest.mark.parametrize("name", swept(["gptj", "bloom"], []))
def test_a_step_is_recorded_once_and_played_for_every_token(name: str, recorded: list[Any]) -> None:
    engine = labkit.init_inference(shallow(name, 1), impl="triton")
    engine.module.runner.decoder.graphs = True
    for ids in (prompt(1, 5), prompt(3, 4), prompt(1, 7)):
        assert torch.equal(greedy(engine, ids, 4), greedy(shallow(name, 1), ids, 4))
    assert [graph.replays for graph in recorded] == [6, 3]  # for one sequence in two calls, and for four sequences


@pytest.mark.parametrize("name", swept(list(RULES), ["some tokens"]))
def test_rules_choose_tokens_in_the_graph(name: str, recorded: list[Any]) -> None:
    """With the draws of transformers, and the same random numbers afterwards."""
    engine = labkit.init_inference(shallow("gptj", 1), impl="triton")
    engine.module.runner.decoder.graphs = True
    for batch in (1, 3):
        results = []
        for model in (engine, shallow("gptj", 1)):
            set_seed(4)
            results.append((model.generate(prompt(batch, 5), max_new_tokens=5, **RULES[name]), torch.rand(3)))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert [graph.replays for graph in recorded] == [4, 4]
    assert [node.kernel for node in engine.module.runner.info.nodes][-2:] == ["choose_token", "next_step"]


@pytest.mark.parametrize("options", [{}, RULES["greedy"]], ids=["argmax", "rules"])
def test_a_text_that_outgrows_its_rotation_gets_another_graph(options: dict[str, Any], recorded: list[Any]) -> None:
    model, ids = long_rope_model(num_hidden_layers=1), prompt(2, SHORT - 2) % 128
    engine = labkit.init_inference(model, dtype=torch.float32, impl="triton")
    engine.module.runner.decoder.graphs = True
    texts = [
        side.generate(ids, **{"do_sample": False} | options, max_new_tokens=7, eos_token_id=None)
        for side in (engine, model)
    ]
    assert torch.equal(*texts)
    assert [graph.replays for graph in recorded] == [2, 3]  # the step between them computes the text anew


def test_texts_end_at_their_own_step_by_rules() -> None:
    model, options = shallow("gptj", 1), {"do_sample": False, "repetition_penalty": 1.3, "max_new_tokens": 6}
    ids = prompt(2, 5)
    end = model.generate(ids, **options)[0, 6]
    expected = model.generate(ids, **options, eos_token_id=int(end), pad_token_id=0)
    engine = labkit.init_inference(model, impl="triton")
    assert torch.equal(engine.generate(ids, **options, eos_token_id=int(end), pad_token_id=0), expected)
    assert (expected[0, 7:] == 0).all()


@sweep
def test_rows_that_a_range_begins_with_are_there_when_its_graph_is_played(recorded: list[Any]) -> None:
    """A step overwrites these rows, even in the run before the capture."""
    model, steps = shallow("gpt2", 2), prompt(1, 3)
    logits = []
    for graphs in (False, True):
        cut = CutModel(model, (0, 1, 2), "triton", graphs=graphs)
        caches = cut.new_caches(9)
        cut.step(StepInput(prompt(1, 4), caches[0]), caches)
        for index in range(3):
            logits.append(cut.step(StepInput(steps[:, index, None], caches[0], follows=True), caches).result)
    assert all(torch.equal(*pair) for pair in zip(logits[:3], logits[3:], strict=True))  # type: ignore[arg-type]
    assert [graph.replays for graph in recorded] == [3, 3]
