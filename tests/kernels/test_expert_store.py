"""Experts of a file come whole and in order, whatever is wanted and however few of them fit into memory."""

import os
import random
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from helpers.models.offloaded import flip_byte
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from xxhash import xxh64

from labkit.kernels import build
from labkit.kernels.expert_store import ExpertStore, StoredExpert
from labkit.system.errors import RunError

LAYERS, EXPERTS = 3, 6
PAGE = 4096
Places: TypeAlias = list[list[StoredExpert]]  # by layer and expert
Contents: TypeAlias = list[list[Tensor]]


def written(path: Path, part_bytes: tuple[int, ...]) -> tuple[Places, Contents]:
    """Writes experts to a file as a checkpoint has them: the same part of all experts of a layer one after the other.
    Returns their places, and their bytes.
    """
    generator, offset, data = random.Random(0), PAGE, [bytes(PAGE)]
    places = [[[-1] * 4 for _ in range(EXPERTS)] for _ in range(LAYERS)]
    contents = [[[b""] * 4 for _ in range(EXPERTS)] for _ in range(LAYERS)]
    for layer in range(LAYERS):
        for part, size in enumerate(part_bytes):
            for expert in range(EXPERTS if size else 0):
                contents[layer][expert][part] = generator.randbytes(size)
                places[layer][expert][part] = offset
                data.append(contents[layer][expert][part])
                offset += size
    data.append(bytes(-offset % PAGE))
    path.write_bytes(b"".join(data))
    stored = [
        [StoredExpert(tuple(place), digest(parts)) for place, parts in zip(*layer, strict=True)]
        for layer in zip(places, contents, strict=True)
    ]
    return stored, [
        [torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8) for parts in layer] for layer in contents
    ]


def digest(parts: list[bytes]) -> int:
    of_parts = (xxh64(part).intdigest().to_bytes(8, "little") for part in parts if part)
    return xxh64(b"".join(of_parts)).intdigest()


def whole(store: ExpertStore, layer: int, expert: int) -> Tensor:
    return torch.cat([store.part(layer, expert, part) for part, size in enumerate(store.part_bytes) if size])


def opened(path: Path, slots: int, part_bytes: tuple[int, ...] = (64, 0, 64, 0)) -> tuple[ExpertStore, Contents]:
    stored, contents = written(path, part_bytes)
    return ExpertStore(build.load("float32"), path, stored, part_bytes, slots), contents


wants = st.lists(st.sets(st.integers(0, EXPERTS - 1)), min_size=LAYERS, max_size=LAYERS)
sizes = st.tuples(st.integers(1, 9000), st.integers(0, 300), st.integers(1, 5000), st.integers(0, 5000))


@settings(deadline=None, max_examples=60)
@given(passes=st.lists(wants, min_size=1, max_size=6), slots=st.integers(1, LAYERS * EXPERTS), part_bytes=sizes)
def test_waves_bring_what_is_wanted_with_the_bytes_of_the_file(
    passes: list[list[set[int]]], slots: int, part_bytes: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    store, contents = opened(tmp_path_factory.mktemp("store") / "experts", slots, part_bytes)
    asked = 0
    for wanted_by_layer in passes:
        store.begin_pass()
        for layer, wanted in enumerate(wanted_by_layer):
            came: list[int] = []
            for wave in store.waves(layer, sorted(wanted)):
                assert 0 < len(wave) <= slots
                came += wave
                for expert in wave:
                    assert torch.equal(whole(store, layer, expert), contents[layer][expert])
            assert came == sorted(wanted)
            asked += len(wanted)
        store.check()
    counts = store.counts
    assert (counts.wanted, counts.guesses, counts.wasted_bytes) == (asked, 0, 0)
    if slots == LAYERS * EXPERTS:  # nothing is read twice
        assert counts.reads == len(
            {(layer, expert) for one in passes for layer, want in enumerate(one) for expert in want}
        )
    assert counts.hits + counts.reads >= asked  # more reads where a wanted expert gave its slot to an earlier one
    store.close()


def test_experts_that_are_used_most_stay(tmp_path: Path) -> None:
    """Every pass wants the experts 0 and 1, and another one each time: the two are read once."""
    store, _ = opened(tmp_path / "experts", slots=3)
    for number in range(40):
        store.begin_pass()
        for _ in store.waves(0, [0, 1, 2 + number % 4]):
            pass
    assert store.counts.reads == 2 + 40
    store.close()


@pytest.mark.parametrize("part", [0, 2])
def test_an_altered_expert_is_named_until_it_is_whole_again(part: int, tmp_path: Path) -> None:
    path = tmp_path / "experts"
    store, contents = opened(path, slots=2)
    offset = written(tmp_path / "other", (64, 0, 64, 0))[0][1][4].offsets[part]
    flip_byte(path, offset + 5)
    store.begin_pass()
    assert [expert for wave in store.waves(1, [2, 4, 5]) for expert in wave] == [2, 4, 5]  # the step goes on to its end
    assert store.pass_failed
    with pytest.raises(RunError, match=r"expert 4 of layer 1 in .*experts was altered: .*; copy the file again"):
        store.check()
    flip_byte(path, offset + 5)
    store.begin_pass()
    for wave in store.waves(1, [2, 4, 5]):
        for expert in wave:
            assert torch.equal(whole(store, 1, expert), contents[1][expert])
    store.check()
    store.close()


def test_an_expert_is_compared_again_after_the_file_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    store, _ = opened(path, slots=1)
    for layer in (0, 1):  # the second one takes the only slot
        store.begin_pass()
        list(store.waves(layer, [0]))
        store.check()
    flip_byte(path, PAGE)
    store.begin_pass()
    list(store.waves(0, [0]))
    with pytest.raises(RunError, match=r"expert 0 of layer 0 .* was altered"):
        store.check()
    store.close()


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    store, _ = opened(path, slots=4, part_bytes=(5000, 0, 5000, 0))
    os.truncate(path, 2 * PAGE)
    store.begin_pass()
    list(store.waves(2, [0, 1]))
    with pytest.raises(RunError, match=r"expert \d of layer 2 in .* is missing: the file was cut short"):
        store.check()
    store.close()


def test_a_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ExpertStore(build.load("float32"), tmp_path / "none", [[StoredExpert((0, -1, -1, -1), 0)]], (1, 0, 0, 0), 1)


def test_its_threads_end_with_it(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/task"))
    store, _ = opened(tmp_path / "experts", slots=2)
    assert len(os.listdir("/proc/self/task")) > before
    del store
    assert len(os.listdir("/proc/self/task")) <= before
