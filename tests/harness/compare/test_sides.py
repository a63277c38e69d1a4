"""The table of sides agrees with its loaders, and unknown names are refused with all known ones."""

import pytest

from labkit.harness.compare.loader import FolderLoader, MemoryLoader, loader_at
from labkit.harness.compare.peers.peer import Peer
from labkit.harness.compare.sides import IN_PROCESS, PEER_ROWS, ROWS, SIDES, SideRow, side_row
from labkit.system.errors import UserError
from labkit.weights.precision import precision_of


@pytest.mark.parametrize("row", SIDES.values(), ids=SIDES)
def test_the_loader_of_a_row_reads_its_weights_as_the_row_says(row: SideRow) -> None:
    loader = loader_at(row.loader)
    if row.peer:
        assert isinstance(loader, Peer)
        assert loader.name == row.peer
        assert loader.converts or row.weights == "memory"
    else:
        assert isinstance(loader, MemoryLoader if row.weights == "memory" else FolderLoader)


def test_each_name_is_in_the_table_once() -> None:
    assert len(SIDES) == len(ROWS) + len(PEER_ROWS)


def test_precisions_and_other_sides_of_the_table_exist() -> None:
    for row in SIDES.values():
        assert not row.precision or precision_of(row.precision).name == row.precision
        assert not row.instead or row.instead in SIDES


def test_choices_are_sides_that_load_in_one_process() -> None:
    assert {"hf-eager", "fused", "fused-int8"} <= set(IN_PROCESS)
    assert not {"hf-disk", "llama.cpp", "fused:PRECISION"} & set(IN_PROCESS)


def test_a_name_with_a_precision_has_the_row_of_its_pattern() -> None:
    assert side_row("fused:int4-64+head").name == "fused:PRECISION"
    assert side_row("fused-streamed:int8").name == "fused-streamed:PRECISION"


@pytest.mark.parametrize("name", ["hf-eagr", "llama.cpp:int8", ""])
def test_an_unknown_name_is_refused_with_all_known_ones(name: str) -> None:
    with pytest.raises(UserError, match=f"unknown side '{name}'") as refusal:
        side_row(name, others=("an-alias",))
    assert all(known in str(refusal.value) for known in (*SIDES, "an-alias"))
