"""Tuning: every kernel of a step gets its fastest tile, written at once. Kernels that can't be timed are refused."""

import json
from pathlib import Path

import pytest
import torch
from helpers.sweeps import sweep, swept
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
    """Made-up time in microseconds: 10 less for every kernel that has the good tile."""
    return 100.0 - 10 * sum(tile == GOOD for tile in decoder.launch.tiles.tiles.values())


@sweep
def test_every_kernel_gets_the_tile_that_makes_the_step_fastest(tmp_path: Path) -> None:
    path, tuned = tune(["tiny-gptj"], timer=faster_with_good_tiles)
    assert path.parent == tmp_path
    assert {entry.key.split("/")[0] for entry in tuned} == {"qkv_and_mlp", "two_gemms", "head_argmax"}
    assert all(entry.tile == GOOD and entry.after_us == entry.before_us - 10 for entry in tuned)
    assert dict(tuned_tiles("interpreter").tiles) == {entry.key: GOOD for entry in tuned}


@sweep
def test_a_tile_that_is_no_faster_is_left(tmp_path: Path) -> None:
    _, tuned = tune(["tiny-llama"], timer=lambda decoder: 100.0)
    assert tuned
    assert all(entry.tile not in (GOOD, Tile(32, 64)) for entry in tuned)


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

    _, tuned = tune(["tiny-gptj"], timer=fails_with_large_tiles)
    assert all(entry.tile == GOOD for entry in tuned)


@sweep
def test_tuned_tiles_stay_when_tuning_is_stopped(tmp_path: Path) -> None:
    calls = 0

    def interrupt(decoder: GpuDecoder) -> float:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return faster_with_good_tiles(decoder)

    with pytest.raises(KeyboardInterrupt):
        tune(["tiny-gptj"], timer=interrupt)
    (file,) = tmp_path.iterdir()
    assert len(json.loads(file.read_text())["tiles"]) == 1


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("batch", [1, 16])
def test_candidates_are_powers_of_two_without_the_present_tile(
    batch: int, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    before = Tile(8, 512)
    tiles = list(candidates(batch, "gemm/int8/1/4x4" if int8 else "gemm/float16/1/4x4", before))
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
