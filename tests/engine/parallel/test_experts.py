"""Experts on different ranks: the same tokens as in one process, from every kind of source."""

from typing import Any

import pytest
from helpers.sweeps import sweep, swept

import labkit
from labkit.kernels import gpu
from labkit.models.config import ExpertsSpec
from labkit.system.errors import UnsupportedError, UserError

pytestmark = pytest.mark.timeout(300)
each_world = pytest.mark.parametrize("ranks", swept(["of_two", "of_four"], ["of_two"]))


@each_world
def test_ranks_with_other_experts_give_the_tokens_of_one_process(ranks: str, request: pytest.FixtureRequest) -> None:
    answers = [rank["experts"]["found"] for rank in request.getfixturevalue(ranks).answers]
    assert all(rank == answers[0] for rank in answers)
    assert len(answers[0]) > 8
    for name, found in answers[0].items():
        quantised = "int8" in name
        assert found.logits <= (0.25 if quantised else 5e-5), name
        assert found.by_stages <= (0.25 if quantised else 5e-5), name
        assert found.tokens_equal or quantised, name


@each_world
def test_every_rank_holds_its_part_of_the_experts(ranks: str, request: pytest.FixtureRequest) -> None:
    """The six experts of the last model are in two parts; of four ranks two have the same experts."""
    held = [rank["experts"]["held"] for rank in request.getfixturevalue(ranks).answers]
    each = len(held) // 2
    assert held == [(0, 3)] * each + [(3, 6)] * each


@each_world
def test_a_rank_reads_those_of_its_experts_that_a_row_chose(ranks: str, request: pytest.FixtureRequest) -> None:
    for rank in request.getfixturevalue(ranks).answers:
        assert rank["experts"]["read"] == rank["experts"]["chose"]


@each_world
def test_ranks_that_load_a_checkpoint_give_the_logits_of_the_ranks_that_saved_it(
    ranks: str, request: pytest.FixtureRequest
) -> None:
    """It makes no difference whether one process saved it, or ranks with different experts did."""
    for rank in request.getfixturevalue(ranks).answers:
        assert rank["experts"]["same when saved"] == [True] * 4


@each_world
def test_offloading_changes_no_logits(ranks: str, request: pytest.FixtureRequest) -> None:
    """Experts are offloaded, or layers. One process gives the same tokens."""
    for rank in request.getfixturevalue(ranks).answers:
        offloaded = rank["experts"]["offloaded"]["offloaded"]
        assert len(offloaded) == 4
        for name, engine in offloaded.items():
            assert engine.same, name
            assert engine.found.logits <= (0.25 if "gpt-oss" in name else 1e-4), name
            assert engine.found.tokens_equal or "gpt-oss" in name, name


@each_world
def test_every_rank_keeps_and_reads_only_its_own_experts(ranks: str, request: pytest.FixtureRequest) -> None:
    """The five experts of three layers are in two parts: nine experts, and six."""
    answers = request.getfixturevalue(ranks).answers
    read = [rank["experts"]["offloaded"]["offloaded"]["mixtral, experts"].read for rank in answers]
    assert [rank.stored for rank in read] == [9] * (len(read) // 2) + [6] * (len(read) // 2)
    for rank in read:
        assert rank.slots < rank.stored
        assert rank.wanted == pytest.approx(rank.by_steps)
        assert 0 < rank.hits < rank.wanted
        assert rank.reads >= rank.wanted - rank.hits
        assert rank.bytes_read >= (rank.wanted - rank.hits) * rank.bytes_per_expert


@each_world
def test_an_altered_expert_of_one_rank_ends_the_call_on_all(ranks: str, request: pytest.FixtureRequest) -> None:
    for number, rank in enumerate(request.getfixturevalue(ranks).answers):
        damaged, whole = rank["experts"]["offloaded"]["damaged"]
        assert "was altered: its digest is not the digest of the save" in damaged
        assert damaged.startswith("expert " if number == 1 else "rank 1: RunError: expert ")
        assert whole == "nothing"


@sweep
@pytest.mark.skipif(not gpu.interpreted(), reason="runs in Triton's interpreter; set TRITON_INTERPRET=1")
def test_ranks_with_triton_kernels_copy_layers_with_their_own_experts(fetching: Any) -> None:
    for rank in fetching.answers:
        for store in ("cpu", "disk"):
            difference, copied = rank["experts"][store]
            assert difference <= 1e-4
            assert 3 <= copied <= 3 + 2  # two layers are prefetched for the next step


@sweep
def test_stages_of_a_pipeline_divide_their_experts(of_four: Any) -> None:
    assert all(rank["experts"]["in stages"] for rank in of_four.answers)


def test_options_that_do_not_fit_are_refused_on_every_rank(of_two: object) -> None:
    for rank in of_two.answers:  # type: ignore[attr-defined]
        too_many, without, other = rank["experts"]["refused"]
        assert "got ep_size=3 for 2 ranks; expected a number that divides them" in too_many
        assert "got ep_size=2 for LlamaForCausalLM, which has no experts; leave it out" in without
        assert "got moe_experts=[7], expected [5] for MixtralForCausalLM, or [1]" in other


def test_one_process_has_no_ranks_to_divide_experts_among() -> None:
    with pytest.raises(UserError, match="got ep_size=2 for 1 rank; expected a number that divides them"):
        labkit.init_inference("tiny-moe", ep_size=2)
    with pytest.raises(UserError, match="ep_size"):
        labkit.init_inference("tiny-moe", moe={"ep_size": 0})
    with pytest.raises(UnsupportedError, match="type='residual' is not supported yet"):
        labkit.init_inference("tiny-moe", moe={"type": "residual"})
    labkit.init_inference("tiny-moe", moe=False)
    labkit.init_inference("tiny-moe", moe={"num_experts": [8]})


def test_numbers_of_experts_have_to_fit() -> None:
    with pytest.raises(UserError, match="got 5 experts for each token of 4 experts"):
        ExpertsSpec(4, 5, renormalised=True)
    with pytest.raises(UserError, match=r"experts\.count = 0"):
        ExpertsSpec(0, 1, renormalised=True)
    with pytest.raises(UserError, match="shared_gate = True; expected an MLP's width"):
        ExpertsSpec(4, 2, renormalised=True, shared_gate=True)
