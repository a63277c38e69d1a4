"""Files of tile sizes: tuned tiles are found again, and a file that cannot be trusted is refused."""

import json
import tomllib
from pathlib import Path

import pytest
from helpers.house.source_tree import ROOT

from labkit.kernels import gpu
from labkit.kernels.tuned import LIMITS, Tile, TunedTiles, tuned_path, tuned_tiles, write_tiles

GPU = "NVIDIA H200 (141 GB)"
KEY = TunedTiles.key("mlp_gemm", "float16", 1, 16384, 4096)
TILES = TunedTiles({KEY: Tile(16, 512, 8, 1), TunedTiles.key("gemm", "int8", 16, 4096, 4096): Tile(64, 128, 4, 5)})
DAMAGED = {
    "no-list": "16x512",
    "too-short": [16, 512, 4],
    "too-long": [16, 512, 4, 1, 1],
    "no-numbers": [16, "512", 4, 1],
    "a-fraction": [16, 512.0, 4, 1],
    "a-bool": [16, 512, 4, True],
    "no-power-of-two": [16, 500, 4, 1],
    "nothing": [0, 512, 4, 1],
    "too-much": [16, 512, 64, 1],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the files, which does not exist yet."""
    monkeypatch.setenv("LABKIT_TILES", str(tmp_path / "tiles"))
    return tmp_path / "tiles"


def test_what_was_written_is_read_again(folder: Path) -> None:
    path = write_tiles(GPU, TILES)
    assert path == tuned_path(GPU) == folder / "nvidia-h200-141-gb.json"
    assert tuned_tiles(GPU) == TILES
    assert write_tiles(GPU, TunedTiles({})) == path
    assert tuned_tiles(GPU) == TunedTiles({})
    assert list(folder.iterdir()) == [path]


def test_a_gpu_without_a_file_has_no_tuned_tiles() -> None:
    assert tuned_tiles(GPU) == TunedTiles({})


def test_the_files_of_the_package_are_in_the_folder_that_a_wheel_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_TILES")
    (pattern,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "labkit.kernels"
    ]
    own = tuned_path(GPU).relative_to(ROOT / "kernels")
    assert own.match(pattern)
    for path in (ROOT / "kernels").glob(pattern):
        name = json.loads(path.read_text())["gpu"]
        assert tuned_path(name) == path
        assert tuned_tiles(name).tiles


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", r"is not JSON \(Expecting value"),
        ('{"gpu": "NVIDIA', r"is not JSON \(Unterminated string"),
        (b"\xff\xfe", r"is not UTF-8 text \(byte 0\)"),
        ("[]", "is damaged: expected"),
        ('{"gpu": "NVIDIA H200 (141 GB)"}', "is damaged: expected"),
        ('{"gpu": "NVIDIA A100", "tiles": {}}', r"was tuned for 'NVIDIA A100', this is 'NVIDIA H200 \(141 GB\)'"),
    ],
)
def test_a_damaged_file_is_refused(folder: Path, content: str | bytes, complaint: str) -> None:
    folder.mkdir()
    tuned_path(GPU).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"nvidia-h200-141-gb.json {complaint}.*; delete it, or write it anew with"):
        tuned_tiles(GPU)


@pytest.mark.parametrize("value", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_entry_is_refused(value: object) -> None:
    path = write_tiles(GPU, TILES)
    path.write_text(json.dumps({"gpu": GPU, "tiles": {KEY: value}}))
    with pytest.raises(ValueError, match=r"mlp_gemm/float16/1/16384x4096 is .*, expected \[rows, depth, .*; delete it"):
        tuned_tiles(GPU)


def test_the_largest_and_the_smallest_tile_are_read() -> None:
    tiles = TunedTiles({"large": Tile(*LIMITS.values()), "small": Tile(1, 1, 1, 1)})
    write_tiles(GPU, tiles)
    assert tuned_tiles(GPU) == tiles


def test_a_file_is_written_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiles(GPU, TILES)

    def half(self: Path, text: str, encoding: str | None = None) -> int:
        self.write_bytes(text[: len(text) // 2].encode())
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space left"):
        write_tiles(GPU, TunedTiles({}))
    assert tuned_tiles(GPU) == TILES
    assert json.loads(path.read_text())["gpu"] == GPU


def test_a_launcher_takes_a_tuned_tile_before_a_default_one() -> None:
    launch, plain = gpu.Launcher(tiles=TILES), gpu.Launcher()
    assert launch.tile("mlp_gemm", "float16", 1, 16384, 4096) == Tile(16, 512, 8, 1)
    assert (
        launch.tile("gemm", "int8", 3, 4096, 4096) == launch.tile("gemm", "int8", 16, 4096, 4096) == Tile(64, 128, 4, 5)
    )
    for untuned in (
        ("gemm", "float16", 1, 16384, 4096),
        ("mlp_gemm", "int8", 1, 16384, 4096),
        ("gemm", "int8", 1, 4096, 4096),
    ):
        assert launch.tile(*untuned) == plain.tile(*untuned)


@pytest.mark.parametrize("weight_type", ["float32", "bfloat16", "float16", "int8"])
def test_a_default_tile_is_one_that_a_file_may_hold(weight_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "interpreted", lambda: False)
    sizes = (1, 3, 60, 768, 4096, 11008, 250880)
    tiles = {
        TunedTiles.key(op, weight_type, batch, outputs, inputs): gpu.default_tile(
            op, weight_type, batch, outputs, inputs
        )
        for op in ("gemm", "head_argmax")
        for batch in (1, gpu.FEW_ROWS)
        for outputs in sizes
        for inputs in sizes
    }
    write_tiles(GPU, TunedTiles(tiles))
    assert tuned_tiles(GPU).tiles == tiles
