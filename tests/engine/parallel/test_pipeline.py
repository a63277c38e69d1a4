"""A model whose layers are divided among ranks gives the tokens of one process, with every schedule and call."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.models.small_models import small_model
from helpers.ranks.pipelined_models import every_row, lost, two_by_two

import labkit

pytestmark = pytest.mark.timeout(300)
TIMEOUT_S = 240
Answers = list[dict[str, Any]]


@pytest.fixture
def stages(of_two: Any) -> Answers:
    return [rank["stages of two"] for rank in of_two.answers]


ALIKE = ("rows", "schedules", "ways", "by_row", "other calls", "low precision", "checkpoints", "reference")


@pytest.mark.parametrize("kind", ALIKE)
def test_stages_give_every_rank_what_one_process_gives(stages: Answers, kind: str) -> None:
    for rank in stages:
        assert [name for name, equal in rank[kind].items() if not equal] == []


def test_rows_that_end_make_room_on_every_stage(stages: Answers) -> None:
    """The prompt has micro-batches of three and two rows, the decode steps six and two rows, then fewer."""
    for equal, rows in (rank["leaving"] for rank in stages):
        assert equal
        assert {1, 2, 3, 6} <= rows


def test_micro_batches_are_tried_and_divided_anew_on_the_way(stages: Answers) -> None:
    """Trials of eight rows take at most three pairs of laps, and later calls reuse the choice. As rows end, there are
    fewer micro-batches.
    """
    for results in (rank["divided_anew"] for rank in stages):
        assert all(result[0] for name, result in results.items() if not name.endswith("decided"))
        assert results["one is faster, to the end"][1:] == (2, 1, 3)
        assert results["one is faster, rows end"][1:] == (2, 1, 1)
        assert results["several are faster, to the end"][1:] == (2, 2, 2)
        assert results["four, to the end"][1:] == (4, 4, 0)
        assert results["hybrid, to the end"][1:] == (5, 3, 2)
        assert results["four, rows end"][3] > 0
        assert results["hybrid, rows end"][3] > 2
        assert results["one is faster, decided"] == [(8, 1)]
        assert results["several are faster, decided"][0] == (8, 2)
        assert results["four, decided"] == results["hybrid, decided"] == []


@pytest.mark.sweep
@pytest.mark.parametrize("count", [2, 3])
def test_every_row_gives_the_tokens_of_one_process(count: int) -> None:
    for rank in labkit.launch(every_row, count, pp_size=count, timeout_s=TIMEOUT_S):
        assert [name for name, equal in rank["rows"].items() if not equal] == []


@pytest.mark.sweep
def test_stages_of_two_ranks_each_give_the_tokens_of_one_process() -> None:
    for rank in labkit.launch(two_by_two, pp_size=2, tp_size=2, timeout_s=TIMEOUT_S):
        assert rank["rows"] == {"llama": True}
        assert rank["sampled"]
        assert "the tokens of rank 1 differ from those of rank 0" in rank["prompt"]


def test_stages_that_share_no_memory_send_by_gloo(stages: Answers) -> None:
    assert [rank["gloo"] for rank in stages] == [(True, "gloo")] * 2
    assert [rank["taken late"] for rank in stages] == [[7, 8]] * 2


def test_a_stage_holds_its_layers_alone(stages: Answers) -> None:
    for stage_bytes, model_bytes in (rank["memory"] for rank in stages):
        assert stage_bytes <= 1.15 * model_bytes / 2


def test_what_goes_wrong_on_one_rank_all_are_told_and_can_go_on(stages: Answers) -> None:
    expected = {
        "prompt": ["RanksDifferError: the tokens of rank 1 differ from those of rank 0"] * 2,
        "arguments": ["RanksDifferError: the arguments of rank 1 differ from those of rank 0"] * 2,
        "beams": [
            "RankFailedError: rank 1: RanksDifferError: another stage has made a different call",
            "RanksDifferError: another stage has made a different call",
        ],
        "forward": ["RanksDifferError: the tokens of rank 1 differ from those of rank 0"] * 2,
        "vocabulary": ["UserError: token ids run from"] * 2,
        "many": ["UserError: got micro_batches=4 for a batch of 3 rows; use at most 3, or 'auto'"] * 2,
        "world": [r"UserError: got pp_size=3, tp_size=1 in a run of 2 processes, expected 3: .*--pp 3 --tp 1"] * 2,
        "stages": ["UserError: pp_size=4 stages for 3 layers; use pp_size <= 3"] * 2,
        "hidden": ["UnsupportedError: output_hidden_states: the layers are on several ranks"] * 2,
        "cache": ["UnsupportedError: past_key_values: got a cache of transformers, which has all layers"] * 2,
        "weights": ["UserError: the ranks do not agree on what they run: weights"] * 2,
        "not a number": [
            "RankFailedError: rank 1: FloatingPointError: no logit is a number",
            "FloatingPointError: no logit",
        ],
        "first fails": [
            "ValueError: the fourth step",
            "RankFailedError: rank 0: ValueError: the fourth step",
        ],
        "last fails": [
            "RankFailedError: rank 1: ValueError: the fourth step",
            "ValueError: the fourth step",
        ],
        "step fails": [
            "ValueError: the fourth step",
            "RankFailedError: rank 0: ValueError: the fourth step",
        ],
        "equal": ["True"] * 2,
    }
    for mistake, messages in expected.items():
        for rank, message in zip(stages, messages, strict=True):
            assert re.match(message, rank["mistakes"][mistake]), f"{mistake}: {rank['mistakes'][mistake]}"


def test_each_stage_notes_what_it_did_with_which_micro_batch(stages: Answers) -> None:
    (first, in_order), (last, last_in_order) = (rank["spans"] for rank in stages)
    assert in_order
    assert last_in_order
    steps = [(batch, step) for step in range(3) for batch in range(2)]
    assert [span[1:] for span in first if span[0] == "compute"] == steps
    assert [span[1:] for span in last if span[0] == "compute"] == steps
    assert [span[1:] for span in last if span[0] == "sample"] == steps
    assert [span for span in first if span[0] != "compute"][:3] == [("send", 0, 0), ("send", 1, 0), ("wait", 0, 1)]
    assert [span for span in last[:3] if span[0] == "wait"] == [("wait", 0, 0)]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("signal_number", "lost_rank", "reason"),
    [
        (signal.SIGSTOP, 0, r"rank 0: its process, \d+, is stopped, and the other ranks wait for it"),
        (signal.SIGSTOP, 1, r"rank 1: its process, \d+, is stopped, and the other ranks wait for it"),
        (signal.SIGKILL, 0, "rank 0: its process ended.* killed by SIGKILL"),
        (signal.SIGKILL, 1, "rank 1: its process ended.* killed by SIGKILL"),
    ],
    ids=["first stopped", "last stopped", "first killed", "last killed"],
)
def test_a_rank_that_is_lost_ends_the_run(tmp_path: Path, signal_number: int, lost_rank: int, reason: str) -> None:
    with pytest.raises(labkit.RankError, match=reason):
        labkit.launch(
            lost, str(tmp_path), int(signal_number), lost_rank, pp_size=2, timeout_s=TIMEOUT_S, echo=lambda line: None
        )
    assert time.time() - (tmp_path / "lost").stat().st_mtime < 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pp_size": 2},
            r"pp_size=2, tp_size=1 needs 2 processes.*launch --pp 2 --tp 1.*launch\(function, pp_s",
        ),
        ({"pp_size": 4}, "pp_size=4 stages for 3 layers; use pp_size <= 3"),
        ({"pp_size": 2, "layers": [1, 1]}, r"layers=\[1, 1\] are 2 layers, the model has 3"),
        ({"pp_size": 2, "layers": [3]}, r"got layers=\[3\] for pp_size=2; expected a number of layers for each stage"),
        ({"pp_size": 2, "layers": [3, 0]}, "layers"),
        ({"pp_size": 0}, "pp_size: got 0"),
        ({"pp_size": 2, "schedule": "1f1b"}, "schedule: got '1f1b'"),
        ({"pp_size": 2, "micro_batches": 0}, "micro_batches"),
        (
            {"pp_size": 2, "micro_batches": {"prompt": 2, "decode": 4}},
            "of 2 for the prompt and 4 to decode; expect",
        ),
        ({"pp_size": 2, "micro_batches": {"prompt": 4, "decode": 2}, "schedule": "rounds"}, "schedule='queue' alone"),
        ({"pp_size": 2, "schedule": "naive", "micro_batches": 2}, "schedule='naive' has one micro-batch"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        labkit.init_inference(small_model("llama"), pipeline_parallel=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": {"path": "layers"}}, "offload together with pipeline_parallel is not supported yet"),
        ({"save_mp_checkpoint_path": "saved"}, "save_mp_checkpoint_path together with pipeline_parallel"),
        ({"tensor_parallel": {"tp_size": 2, "tp_group": "mine"}}, "leave tensor_parallel.tp_group out"),
        (
            {"injection_policy": {"LlamaDecoderLayer": ("mlp.down_proj",)}},
            "pipeline_parallel needs a row, and .* has none with an injection_policy",
        ),
    ],
)
def test_what_a_pipeline_lacks_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        labkit.init_inference(small_model("llama"), pipeline_parallel={"pp_size": 2}, **options)
