"""The packed checkpoint that layers are streamed from. It is made once and reused by later engines.

One process makes it, while others wait. A killed process leaves no manifest, and the next process removes its files.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig
from xxhash import xxh3_128_hexdigest

from labkit.models.config import ModelConfig
from labkit.models.policies import Policy
from labkit.models.shards import Shard
from labkit.system.cache_root import cache_root
from labkit.system.errors import RunError, UserError
from labkit.system.home import expanded
from labkit.system.page_cache import make_cold
from labkit.system.progress import Progress, progress_bar, unheard
from labkit.system.terminal import terminal
from labkit.weights.build import has_codes, pack_layers, saved_in
from labkit.weights.capacity import model_bytes
from labkit.weights.checkpoint.manifest import FORMAT, described_model
from labkit.weights.checkpoint.save import SUFFIX, Gather, Saved, Saving, together
from labkit.weights.checkpoint.saved import SavedWeights, layout_of, saved_weights
from labkit.weights.identity import identity_of
from labkit.weights.protocol import TensorSource
from labkit.weights.quantise import Quantization

log = logging.getLogger("labkit")
WORTH_A_BAR = 512 << 20  # bytes


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The packed weights that a rank needs: of this model, in this type, for these ranks, in the layout of `impl`."""

    source: TensorSource
    hf_config: PretrainedConfig
    policy: Policy
    config: ModelConfig
    dtype: torch.dtype
    quant: Quantization
    part: Shard
    impl: str

    @property
    def layout(self) -> str:
        return layout_of(self.impl, self.dtype)

    @property
    def name(self) -> str:
        """Name of the folder. It differs for other weights, types, layouts or ranks."""
        identity = (
            identity_of(self.source),
            sorted(described_model(self.config).items()),
            self.quant.model_dump_json() if self.dtype == torch.int8 else "",
            FORMAT,
        )
        dtype = str(self.dtype).removeprefix("torch.")
        kind = f"{self.config.architecture}-{dtype}-{self.layout}-tp{self.part.size}"
        return f"{kind}-{xxh3_128_hexdigest(repr(identity).encode())[:16]}"

    @property
    def bytes(self) -> int:
        """Approximate size of all ranks' files."""
        return self.part.size * model_bytes(self.part, self.dtype, self.quant)


def streamable(saved: SavedWeights, target: Wanted) -> bool:
    """Tells whether a rank can stream its layers from the checkpoint as it is."""
    manifest = saved.manifest
    present = (manifest.tp_size, manifest.layout, saved.dtype)
    return present == (target.part.size, target.layout, target.dtype) and all(
        len(file.layers) == target.config.num_layers for file in manifest.files
    )


def prepared(target: Wanted, path: str | Path | None, gather: Gather) -> SavedWeights:
    """Returns the checkpoint to stream from. All ranks call it together. Packing a large model shows a bar on stderr.

    Raises UserError if the folder can't be written or has too little room, RunError if writing fails.
    """
    checkpoint = saved_in(target.source)
    if checkpoint is not None and streamable(checkpoint, target):
        return checkpoint
    folder = folder_for(path) / gather(target.name if target.part.rank == 0 else "")[0]
    with ExitStack() as lock:
        ready = together(lambda: bool(target.part.rank) or _ready(folder, target, lock), gather)[0]
        if not ready:
            _make(folder, target, gather)
    saved = _existing(folder, target)
    if saved is None:
        raise RunError(f"{folder} was removed while it was made; start again")
    return saved


def _ready(folder: Path, target: Wanted, lock: ExitStack) -> bool:
    """Tells whether the checkpoint already exists. No other process makes it until `lock` is closed."""
    try:
        lock.enter_context(_locked(folder))
        if _existing(folder, target) is not None:
            return True
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or left by a killed process
        _require_room(folder.parent, target.bytes)
    except OSError as error:
        raise UserError(
            f"offload: {folder.parent} can't be written ({error.strerror or error}); name another folder as path"
        ) from error
    log.info("labkit: packing %.1f GB into %s, once", target.bytes / 1e9, folder)
    return False


def folder_for(path: str | os.PathLike[str] | None) -> Path:
    """Returns the folder for packed weights: `path`, or one in labkit's folder for caches."""
    if path is not None:
        return expanded(path)
    root = cache_root()
    if root is None:
        raise UserError("offload: this user has no home folder for a cache; name a folder as path")
    return root / "offload"


def _existing(folder: Path, target: Wanted) -> SavedWeights | None:
    """Returns the complete checkpoint of an earlier engine, or None."""
    try:
        checkpoint = saved_weights(folder, target.policy, target.config)
        if checkpoint is not None:
            checkpoint.check_headers()
    except UserError as error:
        log.warning("labkit: the streamed weights are made anew: %s", error)
        return None
    return checkpoint if checkpoint is not None and streamable(checkpoint, target) else None


def _make(folder: Path, target: Wanted, gather: Gather) -> None:
    contents = Saved(
        config=target.config,
        hf_config=target.hf_config,
        dtype=target.dtype,
        impl=target.impl,
        quant=None if has_codes(target.source) else target.quant,
    )
    with Saving.begin(folder, contents, target.part, gather) as saving, _progress_shown(target) as follow:
        with torch.inference_mode():
            pack_layers(
                target.policy,
                target.config,
                target.source,
                target.dtype,
                target.impl,
                target.quant,
                target.part,
                saving.keep,
                lambda done, total: follow(done, total, "layers packed"),
            )
        saving.finish(None, None)
    for file in folder.glob(f"*{SUFFIX}"):
        make_cold(file)  # streaming reads it past the page cache


@contextmanager
def _progress_shown(target: Wanted) -> Iterator[Progress]:
    """Shows a progress bar on stderr, on the first rank, if packing takes long."""
    if target.part.rank or target.bytes < WORTH_A_BAR:
        yield unheard
        return
    with progress_bar(terminal(stderr=True)) as follow:
        yield follow


def _require_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise UserError(
            f"offload: {folder} has {free / 1e9:.1f} GB free, and the packed weights take {size / 1e9:.1f} GB; free "
            "some, or name another folder as path"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits until no other living process makes this folder, and locks it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("labkit: another process packs these weights into %s; waiting for it", folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
