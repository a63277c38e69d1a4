"""Tuning: every kernel of a step gets its fastest tile, written at once; what can't be timed is refused."""

import json
from pathlib import Path

import pytest
import torch
from sweeps import sweep, swept
from triton.runtime.errors import OutOfResources, PTXASError

from labkit.engine.runners.cuda_graph import GpuDecoder
from labkit.harness.regions import tune as tuning
from labkit.harness.regions.tune import candidates, tune
from labkit.kernels.tuned import Tile, tuned_tiles

GOOD = Tile(rows=16, depth=64, warps=2)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="made for the interpreter"),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LABKIT_TILES", str(tmp_path))
    monkeypatch.setattr(tuning, "LAYERS", 1)
    monkeypatch.setattr(tuning, "CONTEXT", 4)
    monkeypatch.setattr(tuning, "candidates", lambda batch, key, before: [Tile(32, 64), GOOD])


def faster_with_good_tiles(decoder: GpuDecoder) -> float:
    """A clock that likes one tile: 10 microseconds less for every kernel that has it."""
    return 100.0 - 10 * sum(tile == GOOD for tile in decoder.launch.tiles.tiles.values())


@sweep
def test_every_kernel_gets_the_tile_that_makes_the_step_fastest(tmp_path: Path) -> None:
    path, found = tune(["tiny-gptj"], timer=faster_with_good_tiles)
    assert path.parent == tmp_path
    assert {each.key.split("/")[0] for each in found} == {"qkv_and_mlp", "two_gemms", "head_argmax"}
    assert all(each.tile == GOOD and each.after_us == each.before_us - 10 for each in found)
    assert dict(tuned_tiles("interpreter").tiles) == {each.key: GOOD for each in found}


@sweep
def test_a_tile_that_is_no_faster_is_left(tmp_path: Path) -> None:
    _, found = tune(["tiny-llama"], timer=lambda decoder: 100.0)
    assert found
    assert all(each.tile not in (GOOD, Tile(32, 64)) for each in found)


@pytest.mark.parametrize(
    "problem",
    swept(
        {
            "shared memory": OutOfResources(300_000, 232_448, "shared memory"),
            "registers": PTXASError("too many registers"),
        },
        [],
    ),
)
def test_a_tile_that_the_gpu_cannot_run_is_passed_over(problem: Exception) -> None:
    def fails_with_large_tiles(decoder: GpuDecoder) -> float:
        if Tile(32, 64) in decoder.launch.tiles.tiles.values():
            raise problem
        return faster_with_good_tiles(decoder)

    _, found = tune(["tiny-gptj"], timer=fails_with_large_tiles)
    assert all(each.tile == GOOD for each in found)


@sweep
def test_what_was_found_stays_when_tuning_is_stopped(tmp_path: Path) -> None:
    calls = 0

    def stops(decoder: GpuDecoder) -> float:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return faster_with_good_tiles(decoder)

    with pytest.raises(KeyboardInterrupt):
        tune(["tiny-gptj"], timer=stops)
    (file,) = tmp_path.iterdir()
    assert len(json.loads(file.read_text())["tiles"]) == 1


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("batch", [1, 16])
def test_candidates_are_powers_of_two_without_the_present_tile(
    batch: int, words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    before = Tile(8, 512)
    tiles = list(candidates(batch, "gemm/int8/1/4x4" if words else "gemm/float16/1/4x4", before))
    assert len(tiles) >= 8
    assert before not in tiles
    for tile in tiles:
        assert all(number & (number - 1) == 0 for number in (tile.rows, tile.depth, tile.warps))


def test_without_a_gpu_nothing_is_timed() -> None:
    with pytest.raises(ValueError, match="labkit tune times kernels on an NVIDIA GPU"):
        tune(["tiny-gptj"])


def test_bad_input_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    timer = faster_with_good_tiles
    with pytest.raises(ValueError, match="unknown model 'gpt-9'"):
        tune(["gpt-9"], timer=timer)
    with pytest.raises(ValueError, match="unsupported dtype 'float8'; expected one of float32"):
        tune(["tiny-gptj"], dtypes=["float8"], timer=timer)
    with pytest.raises(ValueError, match="got batch = 0, expected at least 1"):
        tune(["tiny-gptj"], batches=[0], timer=timer)
    assert not list(tmp_path.iterdir())
