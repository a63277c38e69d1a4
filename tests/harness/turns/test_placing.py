"""Weights move into new memory, and nobody who reads them notices."""

import mmap
import os
import sys
from pathlib import Path

import pytest
import torch

from labkit.harness.environment import anonymous_memory
from labkit.harness.turns import pages, placing
from labkit.harness.turns.pages import large_tensors
from labkit.harness.turns.placing import PlacedBytes, copy_files_anew, place_anew
from labkit.kernels.memory import Arena

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="moves pages with mremap")
MEGABYTE = 1 << 20
PRESENT, FRAME = 1 << 63, (1 << 55) - 1


def frames(tensor: torch.Tensor) -> list[int]:
    """The frames of memory that hold a tensor's pages; only root sees them."""
    first, last = tensor.data_ptr() // mmap.PAGESIZE, (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(first * 8)
        entries = [int.from_bytes(pages.read(8), sys.byteorder) for _ in range(first, last)]
    return [entry & FRAME for entry in entries if entry & PRESENT]


def heap(megabytes: int) -> torch.Tensor:
    return torch.arange(megabytes * MEGABYTE // 4, dtype=torch.int32)


def arena(megabytes: int) -> torch.Tensor:
    return Arena.reserved(megabytes * MEGABYTE).empty((megabytes * MEGABYTE // 4,), torch.int32).copy_(heap(megabytes))


@pytest.mark.parametrize("kind", [heap, arena])
def test_contents_and_addresses_stay_and_the_memory_is_new(kind: object) -> None:
    tensor = kind(5)  # type: ignore[operator]
    view, address, before = tensor[1000:2000], tensor.data_ptr(), frames(tensor)
    placed = place_anew([tensor, view])
    assert placed.moved > 4 * MEGABYTE
    assert placed.total == tensor.untyped_storage().nbytes()
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, heap(5))
    assert torch.equal(view, heap(5)[1000:2000])
    if os.geteuid() == 0 and any(before):
        common = set(before) & set(frames(tensor))
        assert len(common) <= 2  # the pages at the edges, which hold other things as well
    tensor += 1  # the new memory can be written to
    assert int(tensor[-1]) == 5 * MEGABYTE // 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees which memory holds a page")
def test_no_tensor_gets_the_memory_that_another_one_had() -> None:
    tensors = [heap(5) for _ in range(6)]
    before = {frame for tensor in tensors for frame in frames(tensor)}
    assert before
    assert place_anew(tensors).anew
    common = before & {frame for tensor in tensors for frame in frames(tensor)}
    assert len(common) <= 2 * len(tensors)
    assert all(torch.equal(tensor, heap(5)) for tensor in tensors)


def test_with_room_for_one_tensor_they_move_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [heap(3), heap(5)]
    monkeypatch.setattr(placing, "fits", lambda size: size < 7 * MEGABYTE)
    assert place_anew(tensors).anew
    assert [torch.equal(tensor, heap(size)) for tensor, size in zip(tensors, (3, 5), strict=True)] == [True, True]


def test_the_kind_of_pages_stays() -> None:
    def advised(tensor: torch.Tensor) -> bool:
        inside = [mapping for mapping in pages._mappings() if mapping.begin <= tensor.data_ptr() < mapping.end]
        return inside[0].huge

    for tensor in (heap(5), arena(5)):
        before = advised(tensor)
        place_anew([tensor])
        assert advised(tensor) == before


def test_it_can_be_repeated_and_leaves_no_memory_behind() -> None:
    tensor = heap(8)
    place_anew([tensor])

    def mapped() -> int:
        return sum(mapping.end - mapping.begin for mapping in pages._mappings())

    before = mapped()
    for _ in range(20):
        assert place_anew([tensor]).moved > 7 * MEGABYTE
    assert mapped() - before < 4 * MEGABYTE
    assert torch.equal(tensor, heap(8))


def test_large_tensors_of_the_process_are_found() -> None:
    large, small = heap(3), torch.zeros(3)
    found = {id(tensor) for tensor in large_tensors()}
    assert id(large) in found
    assert id(small) not in found


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_shared_and_read_only_memory_stays_where_it_is(tmp_path: Path) -> None:
    shared = heap(2).share_memory_()
    file = tmp_path / "file"
    file.write_bytes(bytes(2 * MEGABYTE))
    with file.open("rb") as opened:
        mapped = torch.frombuffer(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ), dtype=torch.uint8)
    assert place_anew([shared]) == PlacedBytes(0, 2 * MEGABYTE)
    assert place_anew([mapped]) == PlacedBytes(0, 2 * MEGABYTE)


def test_tensors_without_memory_of_the_cpu_are_left_out() -> None:
    meta, sparse = torch.empty(MEGABYTE, device="meta"), torch.eye(4).to_sparse()
    assert place_anew([meta, sparse, torch.zeros(3)]) == PlacedBytes(0, 0)


def test_without_room_for_a_second_copy_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 4 * MEGABYTE}))
    assert place_anew([heap(5)]) == PlacedBytes(0, 5 * MEGABYTE)


def test_files_become_copies_with_the_same_content(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    theirs, file, link = tmp_path / "theirs", tmp_path / "model" / "a.bin", tmp_path / "model" / "linked"
    theirs.write_text("theirs")
    file.write_text("ours")
    link.symlink_to(theirs)
    before = file.stat().st_ino
    copy_files_anew(tmp_path / "model")
    assert (file.read_text(), link.read_text(), theirs.read_text()) == ("ours", "theirs", "theirs")
    assert file.stat().st_ino != before
    assert not link.is_symlink()
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["a.bin", "linked"]


def test_reserved_memory_that_was_never_filled_takes_no_memory_after_the_move() -> None:
    whole = Arena.reserved(200 * MEGABYTE).empty((200 * MEGABYTE,), torch.uint8)
    whole[: 40 * MEGABYTE] = 1
    whole[100 * MEGABYTE + 5] = 2
    before = anonymous_memory()
    assert place_anew([whole]).anew
    assert anonymous_memory() - before < 10 * MEGABYTE
    assert int(whole.sum()) == 40 * MEGABYTE + 2
    assert whole[100 * MEGABYTE + 5] == 2
