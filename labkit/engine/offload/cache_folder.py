"""Folder for keys and values offloaded to disk. It is checked before the first weight is read."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from labkit.engine.memory.heads_on_disk import CacheFolder
from labkit.engine.offload.options import KvOffload
from labkit.system.cache_root import cache_root
from labkit.system.errors import UserError
from labkit.system.home import expanded

log = logging.getLogger("labkit")
IN_MEMORY = ("tmpfs", "ramfs")  # file systems that are no disk


def cache_folder(option: KvOffload, dtype: torch.dtype, any_failed: Callable[[bool], bool] | None) -> CacheFolder:
    """Returns the folder for the cache files of an engine with weights of `dtype`.

    any_failed: as in `BackingStore`.

    Raises UserError for a folder that can't be written, or if there is no default folder on a disk.
    """
    folder = _default() if option.path is None else expanded(option.path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"kv_offload: {folder} can't be written ({error.strerror or error}); name another folder as path"
        ) from error
    if (kind := _file_system(folder)) in IN_MEMORY:
        message = f"kv_offload: {folder} is a {kind}, which is memory itself"
        if option.path is None:
            raise UserError(f"{message}; name a folder on a disk as path")
        log.warning("labkit: %s", message)
    return CacheFolder(option.slots, any_failed, folder, str(dtype).removeprefix("torch."))


def _default() -> Path:
    root = cache_root()
    if root is None:
        raise UserError("kv_offload: this user has no home folder for a cache; name a folder as path")
    return root / "kv"


def _file_system(folder: Path) -> str:
    """Returns the kind of file system, for example "ext4"; empty if the system does not tell."""
    mounted = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    resolved = folder.resolve()
    return next((mounted[str(path)] for path in (resolved, *resolved.parents) if str(path) in mounted), "")
