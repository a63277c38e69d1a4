"""Tile sizes of the Triton kernels, tuned per GPU model: one JSON file each. Kernels run without such a file too.

{"gpu": "NVIDIA H200", "tiles": {"mlp_gemm/float16/1/16384x4096": [16, 512, 4, 1], …}}
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from labkit.system.errors import UserError
from labkit.system.whole_file import write_whole

FOLDER = Path(__file__).parent / "gpus"
LIMITS = {"rows": 1024, "depth": 8192, "warps": 32, "stages": 8}


@dataclass(frozen=True)
class Tile:
    """The part of a weight that one program multiplies at a time."""

    rows: int  # of the weight
    depth: int  # inputs
    warps: int = 4  # of 32 threads
    stages: int = 1  # of the loads' pipeline


@dataclass(frozen=True)
class TunedTiles:
    """The best tile found for each op and shape of one GPU."""

    tiles: Mapping[str, Tile]

    @staticmethod
    def key(op: str, weight_type: str, batch: int, outputs: int, inputs: int) -> str:
        return f"{op}/{weight_type}/{batch}/{outputs}x{inputs}"

    def find(self, op: str, weight_type: str, batch: int, outputs: int, inputs: int) -> Tile | None:
        return self.tiles.get(self.key(op, weight_type, batch, outputs, inputs))


def tuned_path(gpu: str) -> Path:
    """The file of a GPU model, in LABKIT_TILES or with the package."""
    folder = os.environ.get("LABKIT_TILES")
    return Path(folder or FOLDER) / f"{slug(gpu)}.json"


def slug(name: str) -> str:
    """A processor's or GPU's name as part of a file name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def tuned_tiles(gpu: str) -> TunedTiles:
    """The tuned tiles of the GPU model; empty if it has no file. Raises ValueError for a damaged file."""
    path = tuned_path(gpu)
    if not path.exists():
        return TunedTiles({})
    again = "delete it, or write it anew with `labkit tune`"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); {again}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); {again}") from None
    if not isinstance(values, dict) or not isinstance(values.get("tiles"), dict):
        raise UserError(f'{path} is damaged: expected {{"gpu": …, "tiles": {{…}}}}; {again}')
    if values.get("gpu") != gpu:
        raise UserError(f"{path} was tuned for {values.get('gpu')!r}, this is {gpu!r}; {again}")
    return TunedTiles({key: _tile(path, key, value, again) for key, value in values["tiles"].items()})


def write_tiles(gpu: str, tiles: TunedTiles) -> Path:
    """Writes the file of a GPU model, whole or not at all. Returns its path."""
    path = tuned_path(gpu)
    lines = ",\n".join(f"    {json.dumps(key)}: {list(astuple(tile))}" for key, tile in sorted(tiles.tiles.items()))
    write_whole(path, f'{{\n  "gpu": {json.dumps(gpu)},\n  "tiles": {{\n{lines}\n  }}\n}}\n')
    return path


def _tile(path: Path, key: str, value: object, again: str) -> Tile:
    if isinstance(value, list) and len(value) == len(LIMITS) and all(type(number) is int for number in value):
        within = all(1 <= number <= most for number, most in zip(value, LIMITS.values(), strict=True))
        if within and all(number & (number - 1) == 0 for number in value[:3]):
            return Tile(*value)
    raise UserError(
        f"{path}: {key} is {value!r}, expected [rows, depth, warps, stages], the first three powers of two; {again}"
    )
