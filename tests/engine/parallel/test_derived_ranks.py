"""Models whose rows are derived are divided among ranks as models with rows of their own."""

import pytest
from helpers.ranks.derived_ranks import MODELS, derived_on_ranks, long_rope_on_ranks

import labkit


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("option", "size"), [("tensor_parallel", "tp_size"), ("pipeline_parallel", "pp_size")])
def test_ranks_give_the_tokens_of_transformers(option: str, size: str) -> None:
    for right in labkit.launch(derived_on_ranks, option, 2, **{size: 2}, timeout_s=240):  # type: ignore[arg-type]
        assert right == dict.fromkeys(MODELS, True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("option", "size"), [("tensor_parallel", "tp_size"), ("pipeline_parallel", "pp_size")])
def test_ranks_compute_a_text_anew_that_outgrows_its_rotation(option: str, size: str) -> None:
    for equal in labkit.launch(long_rope_on_ranks, option, 2, **{size: 2}, timeout_s=240):  # type: ignore[arg-type]
        assert len(equal) == 6
        assert set(equal.values()) == {True}
