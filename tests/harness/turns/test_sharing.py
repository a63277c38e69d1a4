"""Two processes read the same pages, and neither sees what the other one writes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit.harness.turns import pages
from labkit.harness.turns.pages import AddressRange, large_spans, pieces_of
from labkit.harness.turns.placing import place_anew
from labkit.harness.turns.sharing import SharedBlock, SharedPages, WeightBlock, matching
from labkit.kernels.memory import HUGE_PAGE, Arena

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="maps memory files")
OTHER = """
import json, sys
import torch
from labkit.harness.turns.sharing import SharedBlock, SharedPages
from labkit.kernels.memory import Arena

def begin(count, changed):
    global weights, other
    weights = Arena.reserved(4 * count).empty((count,), torch.int32).copy_(torch.arange(count, dtype=torch.int32))
    if changed:
        weights[changed] = -1
    other = SharedPages([weights], lambda: None)

answers = {
    "begin": begin,
    "blocks": lambda: other.blocks,
    "adopt": lambda pid, file, blocks: other.adopt(pid, file, [SharedBlock(*block) for block in blocks]),
    "write": lambda index: weights[index].fill_(-7) and None,
    "read": lambda index: int(weights[index]),
    "sum": lambda: int(weights.sum(dtype=torch.int64)),
    "smaps": lambda: open("/proc/self/smaps").read(),
    "files": lambda: [
        line.split()[4] for line in open("/proc/self/maps") if "memfd:labkit-weights" in line
    ],
}
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(answers[name](*arguments)), flush=True)
"""
COUNT = 6 * HUGE_PAGE // 4


class Other:
    """A second process. It has the same numbers after each "begin"."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-c", OTHER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def second() -> Iterator[Other]:
    process = Other()
    yield process
    process.end()


@pytest.fixture
def other(second: Other) -> Other:
    second.ask("begin", COUNT, 0)
    return second


def numbers() -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.int32)


def weights() -> torch.Tensor:
    return Arena.reserved(4 * COUNT).empty((COUNT,), torch.int32).copy_(numbers())


def files() -> list[str]:
    return [line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:labkit-" in line]


def share(ours: SharedPages, other: Other) -> list[bool]:
    pairs = matching(ours.blocks, [WeightBlock(*block) for block in other.ask("blocks")])
    published = ours.publish([first for first, _ in pairs])
    theirs = [
        second._replace(position=position) for (_, second), position in zip(pairs, published["positions"], strict=True)
    ]
    same: list[bool] = other.ask("adopt", published["pid"], published["file"], theirs)
    return same


def test_both_processes_read_the_same_file_and_keep_their_writes_to_themselves(other: Other) -> None:
    tensor = weights()
    ours, address, before = SharedPages([tensor], lambda: None), tensor.data_ptr(), set[str]()
    for _ in range(3):  # epochs
        same = share(ours, other)
        assert sum(same) >= 6
        assert all(same)
        assert set(files()) == set(other.ask("files"))
        assert len(set(files())) == 1
        assert not before & set(files())  # new memory
        before = set(files())
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, numbers())
        assert other.ask("sum") == int(numbers().sum(dtype=torch.int64))
    tensor[5] = -3
    other.ask("write", 7)
    assert other.ask("read", 5) == 5
    assert int(tensor[7]) == 7
    assert int(tensor[5]) == -3
    assert other.ask("read", 7) == -7


def huge_kb(smaps: str) -> int:
    """Kilobytes of shared weights that are mapped as huge pages."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)
    shared = [mapping for mapping in mappings if "memfd:labkit-weights" in mapping.partition("\n")[0]]
    assert shared
    return sum(int(size) for mapping in shared for size in re.findall(r"ShmemPmdMapped: +(\d+)", mapping))


def test_both_processes_have_pages_of_the_same_size(other: Other) -> None:
    tensor = weights()
    share(SharedPages([tensor], lambda: None), other)
    ours = huge_kb(Path("/proc/self/smaps").read_text())
    assert ours == huge_kb(other.ask("smaps"))
    assert ours in range(0, 4 * COUNT // 1024 + 1, HUGE_PAGE // 1024)
    assert torch.equal(tensor, numbers())


def test_what_a_process_has_written_stays_its_own_in_the_next_epoch(other: Other) -> None:
    tensor = weights()
    ours = SharedPages([tensor], lambda: None)
    share(ours, other)
    other.ask("write", 7)
    pairs = matching(ours.blocks, [WeightBlock(*block) for block in other.ask("blocks")])
    same = share(ours, other)
    assert same.count(False) == 1
    assert len(same) == len(pairs)
    assert other.ask("read", 7) == -7
    tensor[9] = -9
    share(ours, other)
    assert int(tensor[9]) == -9
    assert other.ask("read", 9) == 9


def test_a_block_with_other_bytes_stays_private(other: Other) -> None:
    other.ask("begin", COUNT, HUGE_PAGE // 4 + 11)
    tensor = weights()
    ours = SharedPages([tensor], lambda: None)
    theirs = other.ask("blocks")
    pairs = matching(ours.blocks, [WeightBlock(*block) for block in theirs])
    assert len(pairs) == len(ours.blocks) - 1 == len(theirs) - 1
    assert all(share(ours, other))
    assert other.ask("read", HUGE_PAGE // 4 + 11) == -1
    assert torch.equal(tensor, numbers())


def test_memory_that_a_step_writes_and_memory_that_nothing_filled_are_left_out() -> None:
    kept, cache, empty = weights(), torch.ones(COUNT, dtype=torch.int32), torch.zeros(COUNT, dtype=torch.int32)
    pages = SharedPages([kept, cache, empty], lambda: cache[5000].fill_(5))
    only = SharedPages([kept], lambda: None)
    assert pages.blocks == only.blocks
    assert sum(block.size for block in pages.blocks) == pytest.approx(4 * COUNT, abs=8192)


def test_blocks_match_by_content_size_and_place_in_a_page() -> None:
    ours = [
        WeightBlock("a", 10, 0, True),
        WeightBlock("b", 10, 0, True),
        WeightBlock("c", 10, 4096, True),
        WeightBlock("d", 10, 1, False),
    ]
    theirs = [
        WeightBlock("b", 10, 0, True),
        WeightBlock("a", 9, 0, True),
        WeightBlock("c", 10, 0, True),
        WeightBlock("d", 10, 2, False),
    ]
    assert matching(ours, theirs) == [
        (SharedBlock(1, True), SharedBlock(0, True)),
        (SharedBlock(2, False), SharedBlock(2, False)),  # the same page, at another place in a huge page
    ]


def test_equal_blocks_are_paired_once() -> None:
    pairs = matching([WeightBlock("a", 1, 0, True)] * 2, [WeightBlock("a", 1, 0, True)] * 3)
    assert [(first.number, second.number) for first, second in pairs] == [(0, 0), (1, 1)]


def test_shared_memory_is_left_alone_when_the_rest_is_placed_anew() -> None:
    shared, private = weights(), weights()
    ours = SharedPages([shared], lambda: None)
    ours.publish([SharedBlock(index, block.huge) for index, block in enumerate(ours.blocks)])
    before = files()
    placed = place_anew([shared, private], but=ours.shared)
    assert files() == before
    assert placed.moved >= 4 * COUNT - 8192
    assert torch.equal(shared, private)
    place_anew([shared, private])
    assert files() == []
    assert torch.equal(shared, numbers())


def test_parts_of_a_span_are_left_out() -> None:
    tensor = weights()
    (span,) = large_spans([tensor])
    begin = span.begin // HUGE_PAGE * HUGE_PAGE + HUGE_PAGE
    without = pieces_of(
        [span], [AddressRange(begin + HUGE_PAGE, begin + 2 * HUGE_PAGE), AddressRange(begin, begin + HUGE_PAGE)]
    )
    assert [piece.end for piece in without][:1] == [begin]
    assert sum(piece.size for piece in without) == sum(piece.size for piece in pieces_of([span])) - 2 * HUGE_PAGE


def test_too_little_memory_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = SharedPages([weights()], lambda: None)
    monkeypatch.setattr(pages.psutil, "virtual_memory", lambda: type("Memory", (), {"available": HUGE_PAGE}))
    with pytest.raises(MemoryError, match=r"free memory does not hold another 1\d MB of weights"):
        ours.publish([SharedBlock(0, True), *(SharedBlock(index, True) for index in range(1, len(ours.blocks)))])
    assert files() == []


def test_a_file_of_a_process_that_is_gone_is_an_error_of_the_system() -> None:
    ours = SharedPages([weights()], lambda: None)
    with pytest.raises(FileNotFoundError):
        ours.adopt(os.getpid(), 10**6, [SharedBlock(0, True)])
