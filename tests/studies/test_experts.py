"""The study of a mixture of experts: what it counts, what a skewed router changes, its record, and its exercise."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from labkit.figures import (
    choice_figure,
    experts_figure,
    experts_in_memory_figure,
    ranks_figure,
    reads_figure,
    tokens_figure,
)
from labkit.notebooks.experts_exercise import BATCH, check_reading, experts_puzzle
from labkit.studies.experts import study_experts
from labkit.studies.experts_on_ranks import BATCH as BATCH_ON_RANKS
from labkit.studies.experts_study import ExpertsStudy, load_study, save_study
from labkit.system.errors import UserError
from labkit.system.partly import NotMeasuredError
from labkit.weights.resolve import resolve
from labkit.weights.skewed_router import SkewedRouter

SETTINGS: dict[str, Any] = {
    "model": "tiny-moe", "dtype": "float32", "batches": "4, 1, 2", "prompt_tokens": 6, "new_tokens": 5, "ranks": 1,
    "in_memory": "",
    "rounds": 2, "threads": 1,
}  # fmt: skip
FIGURES = (experts_figure, tokens_figure, reads_figure, choice_figure, ranks_figure, experts_in_memory_figure)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> ExpertsStudy:
    return study_experts(**SETTINGS, output=tmp_path_factory.mktemp("study"))


def test_choices_are_counted_once_for_each_token_and_layer(study: ExpertsStudy) -> None:
    counts, chosen = np.asarray(study.counts), np.asarray(study.chosen)
    tokens = 6 + 5 - 1  # the last new token passes no layer
    assert counts.shape == (2, 8)
    assert (counts.sum(1) == tokens * study.of_a_row).all()
    assert chosen.shape == (2, 4, 2)
    for layer, of_layer in enumerate(chosen):
        assert (np.bincount(of_layer.ravel(), minlength=8) <= counts[layer]).all()
        assert all(len(set(of_token)) == study.of_a_row for of_token in of_layer.tolist())


def test_steps_read_at_least_the_experts_of_a_row_and_at_most_all_that_rows_choose(study: ExpertsStudy) -> None:
    assert [read.batch for read in study.reads] == [1, 2, 4]
    for read in study.reads:
        assert all(study.of_a_row <= of_layer <= min(8, read.batch * study.of_a_row) for of_layer in read.by_layer)
        assert 0 < read.experts_ms < read.step_ms
    assert study.reads[0].read == study.expected(1) == study.of_a_row
    assert study.expected(2) == pytest.approx(8 * (1 - (1 - 2 / 8) ** 2))
    assert study.expert_bytes == 3 * 64 * 48 * 4  # gate, up and down


def test_ranks_divide_the_experts_and_read_together_what_one_process_reads(tmp_path: Path) -> None:
    study = study_experts(**SETTINGS | {"ranks": 2}, output=tmp_path)
    (alone,) = (read for read in study.reads if read.batch == BATCH_ON_RANKS)
    assert [(rank.first, rank.end) for rank in study.ranks] == [(0, 4), (4, 8)]
    together = np.sum([rank.steps.by_layer for rank in study.ranks], axis=0)
    assert together == pytest.approx(alone.by_layer)
    assert alone.sums_ms == 0 < min(rank.steps.sums_ms for rank in study.ranks)


def test_a_record_is_read_back_as_it_was(study: ExpertsStudy, tmp_path: Path) -> None:
    path = save_study(study, tmp_path)
    assert load_study(path) == study
    assert len(study.to_frame()) == 3
    path.write_text(path.read_text().replace('"counts"', '"count"'))
    with pytest.raises(UserError, match="is no experts study of schema version"):
        load_study(path)


def test_parts_are_shown_as_soon_as_they_are_known(tmp_path: Path) -> None:
    drawn = []

    def show(partly: ExpertsStudy) -> None:
        drawn.append([figure for figure in FIGURES if _is_drawn(figure, partly)])

    study_experts(**SETTINGS, output=tmp_path, show=show)
    assert drawn == [list(FIGURES[:count]) for count in (3, 3, 4, 5)]


def _is_drawn(figure: Any, partly: ExpertsStudy) -> bool:
    try:
        figure(partly)
    except NotMeasuredError:
        return False
    return True


def test_a_skewed_router_prefers_the_first_experts(tmp_path: Path) -> None:
    source = resolve("tiny-moe")
    skewed = SkewedRouter(source.weights, 3.0)
    name = "model.layers.1.mlp.gate.weight"
    ratios = skewed.get(name) / source.weights.get(name)
    torch.testing.assert_close(ratios, (4 ** torch.linspace(1, 0, 8))[:, None].expand_as(ratios))
    other = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(skewed.get(other), source.weights.get(other))
    first_layer = study_experts(**SETTINGS | {"prompt_tokens": 200}, skew=30.0, output=tmp_path).counts[0]
    assert sum(first_layer[:4]) > 1.5 * sum(first_layer[4:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "tiny-llama"}, "got tiny-llama, expected a model with a row whose layers have experts"),
        ({"batches": "1, x"}, "expected batch sizes, such as '1,2,4,8'"),
        ({"new_tokens": 0}, "new"),
        ({"in_memory": "50, 100"}, "expected percentages below 100, such as '25,50,75', or nothing"),
        ({"in_memory": "half"}, "expected percentages below 100"),
        ({"ranks": 5}, r"got ranks = 5: .*; set ranks to 1, which leaves them out"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        study_experts(**SETTINGS | settings, output=tmp_path)
    assert not list(tmp_path.iterdir())


def test_experts_that_memory_does_not_hold_are_read_from_a_folder_that_is_removed(tmp_path: Path) -> None:
    """Two of sixteen experts are too few for the engine, and are left out."""
    study = study_experts(**SETTINGS | {"in_memory": "30, 10"}, output=tmp_path)
    (point,) = study.on_disk
    assert (point.experts, point.of) == (5, 16)
    assert point.reads.wanted == 24 * 2 * study.of_a_row  # steps, layers
    assert 0 < point.reads.hits < point.reads.wanted
    assert 0 < point.wait_ms < point.step_ms
    assert point.least_ms > 0
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert any("waited" in sentence for sentence in study.notes.sentences)


def test_the_exercise_knows_right_answers_and_the_usual_mistakes(study: ExpertsStudy) -> None:
    right = 8 * (1 - 0.75**BATCH)
    in_mb = right * 2 * study.expert_bytes / 1e6
    verdicts = str(check_reading(study, right, in_mb).data)
    assert verdicts.count("**right**") == 2
    for answer, remark in ((2, "of one token"), (8 - right, "not read"), ("many", "number"), (None, "not answered")):
        assert remark in str(check_reading(study, answer, None).data)
    assert "this is one layer" in str(check_reading(study, None, in_mb / 2).data)
    assert f"{study.expert_bytes / 1e6:.4g}" in str(experts_puzzle(study).data)
