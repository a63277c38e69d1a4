"""Sides on pipeline stages: their names, their baselines, and the tokens of transformers' pipeline."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks.pipelined_models import of_transformers, without_padding

import labkit
from labkit.engine.parallel.pipeline_stage import PipelineSpan
from labkit.harness.compare import compare as module
from labkit.harness.compare.compare import compare_with_each, comparison_case
from labkit.harness.compare.fused_sides import ends_of_tokens, times_beside_layers
from labkit.harness.compare.interleave import Turns, take_turns
from labkit.harness.compare.loader import FolderLoader, loader_of
from labkit.harness.compare.plan import Schedule, SideSpec, prepare
from labkit.harness.runs import Case
from labkit.stages import Phase, Stage
from labkit.weights.resolve import resolve

SIZE: dict[str, Any] = {"model": "tiny-llama", "dtype": "float32", "batch": 4, "prompt": 9, "new": 5}


@pytest.mark.parametrize(
    ("label", "side"),
    [
        ("fused", SideSpec("fused", 8)),
        ("fused-int4-64", SideSpec("fused-int4-64", 8)),
        ("fused-tp2", SideSpec("fused", 4, tp=2)),
        ("fused-pp2", SideSpec("fused", 4, pp=2)),
        ("fused-pp2-barrier-tp4", SideSpec("fused", 1, tp=4, pp=2, schedule="barrier")),
        ("fused-ep2", SideSpec("fused", 4, tp=2, ep=2)),
        ("fused-tp4-ep2", SideSpec("fused", 2, tp=4, ep=2)),
        ("hf-pipeline-pp3", SideSpec("hf-pipeline", 2, pp=3)),
    ],
)
def test_a_side_has_the_name_that_it_is_asked_for_by(label: str, side: SideSpec) -> None:
    assert SideSpec.named(label, 8) == side
    assert side.label == label
    assert side.ranks == side.tp * side.pp


def sides_of(baselines: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, **ranks: Any) -> list[SideSpec]:
    """Sides of a comparison on these ranks, recorded without measuring."""
    recorded: list[SideSpec] = []

    def record_sides(sides: list[SideSpec], *args: Any, **settings: Any) -> Any:
        recorded.extend(sides)
        return Turns((), ())

    monkeypatch.setattr(module, "take_turns", record_sides)
    monkeypatch.setattr(Turns, "comparison", lambda *args: None)
    compare_with_each(baselines, "fused", comparison_case(**SIZE, threads=2, **ranks), Schedule())
    return recorded


def test_baselines_of_a_pipeline_have_as_many_threads_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("hf-eager", "hf-pipeline", "fused-tp2", "fused-pp4-naive")
    sides = sides_of(names, monkeypatch, pp=2, tp=2, schedule="rounds")
    assert [side.cores for side in sides] == [8] * 5
    assert [(side.tp, side.pp, side.schedule) for side in sides[1:]] == [
        (1, 2, "queue"),
        (2, 1, "queue"),
        (1, 4, "naive"),
        (2, 2, "rounds"),
    ]


def test_the_baseline_of_tensor_parallelism_alone_has_the_threads_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline, candidate = sides_of(("fused",), monkeypatch, tp=2)
    assert (baseline.cores, candidate.cores) == (2, 4)


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (SideSpec("hf-pipeline", 1), "hf-pipeline with pp=1 and tp=1; it runs only on stages: pass pp=2"),
        (SideSpec("hf-pipeline", 1, pp=2, tp=2), "hf-pipeline with pp=2 and tp=2"),
        (SideSpec("hf-eager", 1, pp=2), "got pp=2 and the side 'hf-eager'; expected a side that can be cut"),
        (SideSpec("fused", 1, pp=0), "got pp = 0, expected at least 1"),
        (SideSpec("fused", 1, pp=2, schedule="1f1b"), "got schedule = '1f1b', expected one of queue, rounds"),
        (SideSpec("fused", 1, pp=3), "got pp=3 for 2 layers"),
    ],
)
def test_stages_that_cannot_be_are_refused(side: SideSpec, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        prepare([side], comparison_case(**SIZE, threads=1), Schedule(rounds=2))


def test_a_schedule_without_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="got schedule = 'barrier' for one stage; pass pp=2"):
        comparison_case(**SIZE, schedule="barrier")


def test_models_that_transformers_pipeline_cannot_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    case = comparison_case(**SIZE | {"model": "tiny-gpt2"}, threads=1)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no layers, embed_tokens, norm; use fused-pp2-naive"):
        prepare([SideSpec("hf-pipeline", 1, pp=2)], case, Schedule(rounds=2))


def test_a_token_is_there_when_the_last_micro_batch_has_it() -> None:
    def span(kind: str, micro_batch: int, step: int, end_ns: int) -> PipelineSpan:
        phase = Phase.DECODE if step else Phase.PREFILL
        return PipelineSpan(kind, phase, 1, micro_batch, step, end_ns - 3_000_000, end_ns)

    spans = [span("compute", 0, 0, 8), span("sample", 0, 0, 10), span("sample", 1, 0, 20), span("wait", 0, 1, 25)]
    spans += [span("sample", 0, 1, 30), span("send", 0, 1, 35), span("sample", 1, 1, 40), span("wait", 1, 1, 45)]
    assert ends_of_tokens(spans) == [20, 40]
    times = {(time.phase, time.stage): (time.calls, time.total_ms) for time in times_beside_layers(spans)}
    assert times == {
        (Phase.PREFILL, Stage.SAMPLE): (2, 6.0),
        (Phase.DECODE, Stage.RECV): (2, 6.0),
        (Phase.DECODE, Stage.SAMPLE): (2, 6.0),
        (Phase.DECODE, Stage.SEND): (1, 3.0),
    }


def test_older_records_are_of_one_stage() -> None:
    case = Case.model_validate_json(
        '{"model": "gpt2", "dtype": "float32", "batch": 1, "prompt_tokens": 4, "new_tokens": 4, "threads": 3, "tp": 2}'
    )
    assert (case.pp, case.schedule, case.ranks, case.cores) == (1, "", 2, 6)
    assert case.model_copy(update={"pp": 2}).cores == 12


@pytest.mark.sweep
@pytest.mark.timeout(240)
def test_transformers_pipeline_gives_the_tokens_of_one_process_on_every_rank(tmp_path: Path) -> None:
    source, loader = resolve("tiny-llama"), loader_of("hf-pipeline")
    assert isinstance(loader, FolderLoader)
    loader.convert("hf-pipeline", source, "float32", tmp_path)
    model = source.hf_model(torch.float32)
    expected = without_padding(model)
    ranks = labkit.launch(of_transformers, str(tmp_path), pp_size=2, timeout_s=200)
    for rank in ranks:
        assert torch.equal(rank["tokens"], expected)
        assert "pipeline of 2 stages" in rank["impl"]
    assert sum(rank["held"] for rank in ranks) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.sweep
@pytest.mark.timeout(240)
def test_sides_on_stages_are_measured_with_others() -> None:
    names = ("hf-pipeline-pp2", "fused-tp2", "fused-pp2-naive", "fused-pp2")
    turns = take_turns(
        [replace(SideSpec.named(name, 2), threads=1) for name in names],
        comparison_case(**SIZE, threads=1),
        Schedule(rounds=2),
    )
    assert [side.name for side in turns.sides] == list(names)
    assert [side.case.schedule for side in turns.sides] == ["queue", "", "naive", "queue"]
    assert [len(side.rank_stages) for side in turns.sides] == [0, 2, 2, 2]
    for index, side in enumerate(turns.sides):
        assert turns.comparison(index, -1).tokens_equal
        assert [len(run.decode_ms) for run in side.runs] == [4, 4]
        assert all(0 < run.ttft_ms < run.end_to_end_ms for run in side.runs)
    assert all(0 < share < 1 for side in turns.sides[2:] for share in side.communication_shares)
