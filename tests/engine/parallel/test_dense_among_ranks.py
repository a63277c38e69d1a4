"""Models in which some layers have an MLP and the others experts are divided as other models are."""

from pathlib import Path

import pytest
from helpers.ranks.dense_among_ranks import dense_on_two_ranks

import labkit


@pytest.mark.timeout(300)
def test_two_ranks_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    for right in labkit.launch(dense_on_two_ranks, str(tmp_path), tp_size=2, timeout_s=240):
        assert right == dict.fromkeys(right, True)
