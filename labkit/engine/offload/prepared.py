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
from pathlib import Path

import torch
from transformers import PretrainedConfig
from xxhash import xxh3_128_hexdigest

from labkit.system.cache_root import cache_root
from labkit.system.collective import Gather, results_of_ranks
from labkit.system.errors import RunError, UserError
from labkit.system.home import expanded
from labkit.system.page_cache import make_cold
from labkit.weights.build import pack_layers, packing_shown, saved_in
from labkit.weights.capacity import model_bytes
from labkit.weights.checkpoint.manifest import FORMAT, described_model
from labkit.weights.checkpoint.save import SUFFIX, Saving
from labkit.weights.checkpoint.saved import SavedWeights, saved_weights
from labkit.weights.protocol import TensorSource, identity_of
from labkit.weights.spec import WeightSpec

log = logging.getLogger("labkit")


def folder_name(spec: WeightSpec, source: TensorSource) -> str:
    """Returns the name of the folder of packed weights. It differs for other weights, types, layouts or ranks."""
    identity = (
        identity_of(source),
        sorted(described_model(spec.config).items()),
        spec.quant.model_dump_json() if spec.quantised else "",
        FORMAT,
    )
    dtype = str(spec.dtype).removeprefix("torch.")
    kind = f"{spec.config.architecture}-{dtype}-{spec.layout}-tp{spec.part.size}"
    kind += f"-ep{spec.part.ep_size}" if spec.part.ep_size > 1 else ""
    return f"{kind}-{xxh3_128_hexdigest(repr(identity).encode())[:16]}"


def streamable(saved: SavedWeights, spec: WeightSpec) -> bool:
    """Tells whether a rank can stream its layers from the checkpoint as it is."""
    config = spec.config
    return saved.has_layout_of(spec) and all(
        len(file.layers) == config.num_layers
        and all(len(layer.experts) == len(part.experts) * config.has_experts(layer.layer) for layer in file.layers)
        for file, part in zip(saved.manifest.files, saved.shards, strict=True)
    )


def prepared(
    spec: WeightSpec,
    source: TensorSource,
    hf_config: PretrainedConfig,
    path: str | os.PathLike[str] | None,
    gather: Gather,
) -> SavedWeights:
    """Returns the checkpoint to stream from. All ranks call it together. Packing a large model shows a bar on stderr.

    Raises UserError if the folder can't be written or has too little room, RunError if writing fails.
    """
    checkpoint = saved_in(source)
    if checkpoint is not None and streamable(checkpoint, spec):
        return checkpoint
    folder = folder_for(path) / gather(folder_name(spec, source) if spec.part.rank == 0 else "")[0]
    with ExitStack() as lock:
        ready = results_of_ranks(lambda: bool(spec.part.rank) or _ready(folder, spec, lock), gather)[0]
        if not ready:
            _make(folder, spec, source, hf_config, gather)
    saved = _existing(folder, spec)
    if saved is None:
        raise RunError(f"{folder} was removed while it was made; start again")
    return saved


def _ready(folder: Path, spec: WeightSpec, lock: ExitStack) -> bool:
    """Tells whether the checkpoint already exists. No other process makes it until `lock` is closed."""
    size = spec.part.size * model_bytes(spec)  # of all ranks' files, about
    try:
        lock.enter_context(_locked(folder))
        if _existing(folder, spec) is not None:
            return True
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or left by a killed process
        _require_room(folder.parent, size)
    except OSError as error:
        raise UserError(
            f"offload: {folder.parent} can't be written ({error.strerror or error}); name another folder as path"
        ) from error
    log.info("labkit: packing %.1f GB into %s, once", size / 1e9, folder)
    return False


def folder_for(path: str | os.PathLike[str] | None) -> Path:
    """Returns the folder for packed weights: `path`, or one in labkit's folder for caches."""
    if path is not None:
        return expanded(path)
    root = cache_root()
    if root is None:
        raise UserError("offload: this user has no home folder for a cache; name a folder as path")
    return root / "offload"


def _existing(folder: Path, spec: WeightSpec) -> SavedWeights | None:
    """Returns the complete checkpoint of an earlier engine, or None."""
    try:
        checkpoint = saved_weights(folder, spec.policy, spec.config)
        if checkpoint is not None:
            checkpoint.check_headers()
    except UserError as error:
        log.warning("labkit: the streamed weights are made anew: %s", error)
        return None
    return checkpoint if checkpoint is not None and streamable(checkpoint, spec) else None


def _make(folder: Path, spec: WeightSpec, source: TensorSource, hf_config: PretrainedConfig, gather: Gather) -> None:
    with Saving.begin(folder, spec, hf_config, gather) as saving, packing_shown(spec) as progress:
        with torch.inference_mode():
            pack_layers(spec, source, saving.keep, progress)
        saving.finish(None, None)
    for file in folder.glob(f"*{SUFFIX}"):
        make_cold(file)  # streaming reads it past the page cache


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
