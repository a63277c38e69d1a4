"""A model cut over several ranks computes the same as one process, for every number of heads and every call."""

import re
from typing import Any

import pytest
import torch
from helpers.models.engines import vanilla
from helpers.ranks.cut_models import SAVED_PROMPT, WAYS, Found, engine
from helpers.sweeps import sweep, swept

import labkit
from labkit.kernels import gpu
from labkit.stages import Stage
from labkit.weights.resolve import resolve

pytestmark = pytest.mark.timeout(300)


def check(comparisons: list[dict[str, Found]], tolerance: float) -> None:
    assert all(rank == comparisons[0] for rank in comparisons)
    for name, comparison in comparisons[0].items():
        assert comparison.transport == "shared memory", name
        assert comparison.logits <= tolerance, name
        assert comparison.by_stages <= tolerance, name


@pytest.mark.parametrize("ranks", swept(["of_two", "every_model_of_two", "of_three", "of_four"], ["of_two"]))
def test_ranks_give_the_tokens_of_one_process(ranks: str, request: pytest.FixtureRequest) -> None:
    comparisons = [rank["float32"] for rank in request.getfixturevalue(ranks).answers]
    check(comparisons, 5e-5)
    assert [name for name, comparison in comparisons[0].items() if not comparison.tokens_equal] == []


@pytest.mark.parametrize("ranks", swept(["of_two", "every_model_of_two", "of_three"], ["of_two"]))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_ranks_agree_with_one_process_in_low_precision(ranks: str, dtype: str, request: pytest.FixtureRequest) -> None:
    """Rows are rounded at the same places, but sums have another order, so some values round to a neighbour."""
    check([rank[dtype] for rank in request.getfixturevalue(ranks).answers], 0.25)


def test_ranks_keep_their_heads_in_int8_as_one_process_does(of_two: Any) -> None:
    """A value half-way between two codes is sometimes rounded to the other one."""
    check([rank["int8 cache"] for rank in of_two.answers], 2e-2)


def test_ranks_take_the_codes_of_a_file_as_one_process_does(of_two: Any) -> None:
    """Both round the rows of a prompt to bfloat16, sometimes to a neighbour."""
    check([rank["codes"] for rank in of_two.answers], 5e-2)


@pytest.mark.parametrize("ranks", swept(["of_two", "every_model_of_two"], ["of_two"]))
def test_the_reference_is_cut_as_the_kernels_are(ranks: str, request: pytest.FixtureRequest) -> None:
    comparisons = [rank["reference"] for rank in request.getfixturevalue(ranks).answers]
    check(comparisons, 5e-5)
    assert all(comparison.tokens_equal for comparison in comparisons[0].values())


def test_every_way_to_generate_gives_all_ranks_the_tokens_of_one_process(of_two: Any) -> None:
    """Only the seed of the first rank counts."""
    for rank in of_two.answers:
        for way, (expected, actual) in zip(WAYS, rank["ways"], strict=True):
            assert torch.equal(expected, actual), way


def test_ranks_that_share_no_memory_exchange_by_gloo(of_two: Any) -> None:
    for rank in of_two.answers:
        equal, difference, transport = rank["gloo"]
        assert transport == "gloo"
        assert equal
        assert difference <= 5e-5


def test_a_layer_has_two_sums_and_one_with_a_parallel_residual(of_two: Any) -> None:
    for rank in of_two.answers:
        for name, sums in (("llama", 2), ("gptj", 1)):
            timed, stages = rank["stages"][name]
            assert Stage.ALL_REDUCE in timed
            assert stages.count(Stage.ALL_REDUCE) == sums
            assert len(stages) == 6 + sums


def test_ranks_that_are_not_of_one_mind_are_told_so_and_can_go_on(of_two: Any) -> None:
    expected = {
        "dtype": r"do not agree.*dtype is \"torch.float32\" on rank 0 and \"torch.bfloat16\" on rank 1",
        "weights": "do not agree.*weights",
        "impl": "do not agree.*impl",
        "tokens": "the tokens of rank 1 differ from those of rank 0",
        "length": "the tokens of rank 1 differ from those of rank 0",
        "world": "got tp_size=4 in a run of 2 processes",
        "heads": "1 query heads cannot be split over 2 ranks; use tp_size <= 1",
        "equal": "nothing",
    }
    for rank in of_two.answers:
        for mistake, pattern in expected.items():
            message = rank["mistakes"][mistake]
            assert re.search(pattern, message), f"{mistake}: {message}"


def test_ranks_save_and_load_and_one_process_continues_with_the_same_tokens(of_two: Any) -> None:
    expected = of_two.answers[0]["saved"]["tokens"]
    for rank in of_two.answers:
        assert torch.equal(rank["saved"]["tokens"], expected)
        assert rank["saved"]["logits equal"]
        assert rank["saved"]["tokens equal"]
        assert "holds a checkpoint already" in rank["saved"]["saved twice"]
    folder = of_two.folder / "saved"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "labkit_checkpoint.json",
        "rank-00-of-02.safetensors",
        "rank-01-of-02.safetensors",
    ]
    for loaded in (
        labkit.init_inference(resolve(folder)),
        labkit.init_inference(resolve("tiny-llama"), checkpoint=str(folder)),
        labkit.init_inference(resolve("tiny-llama"), dtype=torch.float32),
    ):
        assert torch.equal(loaded.generate(torch.tensor(SAVED_PROMPT), max_new_tokens=12, do_sample=False), expected)


def test_without_other_processes_tensor_parallelism_says_how_to_start_them() -> None:
    with pytest.raises(ValueError, match=r"tp_size=2 needs 2 processes.*labkit launch --tp 2"):
        engine("gpt2", 2)


def test_models_without_a_row_are_cut_too(of_two: Any) -> None:
    for rank in of_two.answers:
        assert all(rank["without a row"].values()), rank["without a row"]


POLICY = {"GPT2Block": ("attn.c_proj", "mlp.c_proj")}


def test_an_injection_policy_alone_gives_hooks() -> None:
    engine = labkit.init_inference(vanilla("gpt2"), dtype=torch.int8, injection_policy=POLICY)
    assert (engine.level, engine.impl) == ("hooks", "cpp")
    with pytest.raises(ValueError, match=r"run on the C\+\+ kernels; leave impl"):
        labkit.init_inference(vanilla("gpt2"), impl="reference", injection_policy=POLICY)


def test_what_needs_kernels_is_refused_by_a_model_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"dtype=int8 needs kernels, and there are none"):
        labkit.init_inference(vanilla("gpt2"), dtype=torch.int8, injection_policy=POLICY)
    with pytest.raises(ValueError, match=r"impl.* are for models with kernels"):
        labkit.init_inference(vanilla("gpt2"), impl="cpp", injection_policy=POLICY)


def test_ranks_stream_their_own_layers(of_two: Any) -> None:
    check([rank["streamed"]["found"] for rank in of_two.answers], 5e-5)
    assert all(comparison.tokens_equal for comparison in of_two.answers[0]["streamed"]["found"].values())
    assert len(list((of_two.folder / "streamed").glob("*/rank-*-of-02.safetensors"))) == 6


@sweep
@pytest.mark.skipif(not gpu.interpreted(), reason="runs in Triton's interpreter; set TRITON_INTERPRET=1")
def test_ranks_with_triton_kernels_copy_their_own_layers(fetching: Any) -> None:
    """From host memory, and from a file per rank, with the KV cache of the rank's heads in host memory, too. If one
    rank lacks memory, all ranks report it.
    """
    for rank in fetching.answers:
        for store in ("cpu", "disk"):
            difference, copied = rank[store]
            assert difference <= 5e-5
            assert 2 * 3 <= copied <= 2 * 3 + 2  # two layers are prefetched for the next step
        assert "the 3 layers that don't stay on the GPU take" in rank["short"]
    whole, short = (rank["no room for a cache"] for rank in fetching.answers)
    assert whole == f"rank 1: UserError: {short}"
    assert re.search(r"keys and values of 1 x \d+ tokens need \d+ bytes of the host's memory, which has 10 av", short)
    assert len(list(fetching.folder.glob("*-rows-*/rank-*-of-02.safetensors"))) == 2


def test_a_rank_that_cannot_read_its_layers_ends_the_step_of_all(of_two: Any) -> None:
    whole, damaged = (rank["streamed"]["damaged"] for rank in of_two.answers)
    assert [*whole] == [f"rank 1: RunError: {message}" for message in damaged]
    assert all("was altered: its digest is not the digest of the save" in message for message in damaged)


def test_ranks_keep_the_cache_of_their_heads_on_the_disk(of_two: Any) -> None:
    check([rank["cache on disk"]["found"] for rank in of_two.answers], 5e-5)
    assert all(comparison.tokens_equal for comparison in of_two.answers[0]["cache on disk"]["found"].values())


def test_a_rank_whose_disk_breaks_ends_the_step_of_all_and_they_go_on(of_two: Any) -> None:
    (whole, length), (broken, broken_length) = (rank["cache on disk"]["broken"] for rank in of_two.answers)
    assert whole == f"rank 1: RunError: {broken}"
    assert re.search(r"keys and values of layer \d, .* can't be read at byte", broken)
    assert length == broken_length == 9
    (whole, length), (full, broken_length) = (rank["cache on disk"]["no room"] for rank in of_two.answers)
    assert whole == f"rank 1: UserError: {full}"
    assert re.search(r"kv_offload: .* \(No space left on device\)", full)
    assert length == broken_length == 9
    assert all(rank["cache on disk"]["after"] == "nothing" for rank in of_two.answers)
