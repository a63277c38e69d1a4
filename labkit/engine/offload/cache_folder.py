"""The folder for keys and values that lie on the disk, looked at before the first weight is read."""

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


def cache_folder(wanted: KvOffload, dtype: torch.dtype, agree: Callable[[bool], bool] | None) -> CacheFolder:
    """Where the caches of an engine with weights of `dtype` have their files. agree: with its other ranks, whether
    something failed on any of them.

    Raises UserError for a folder that can't be written, and where there is none on a disk by default.
    """
    folder = _default() if wanted.path is None else expanded(wanted.path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"kv_offload: {folder} can't be written ({error.strerror or error}); name another folder as path"
        ) from error
    if (kind := _file_system(folder)) in IN_MEMORY:
        where = f"kv_offload: {folder} is a {kind}, which is memory itself"
        if wanted.path is None:
            raise UserError(f"{where}; name a folder on a disk as path")
        log.warning("labkit: %s", where)
    return CacheFolder(wanted.slots, agree, folder, str(dtype).removeprefix("torch."))


def _default() -> Path:
    root = cache_root()
    if root is None:
        raise UserError("kv_offload: this user has no home folder for a cache; name a folder as path")
    return root / "kv"


def _file_system(folder: Path) -> str:
    """Its kind, as "ext4"; empty where the system does not tell."""
    mounted = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    path = folder.resolve()
    return next((mounted[str(each)] for each in (path, *path.parents) if str(each) in mounted), "")
