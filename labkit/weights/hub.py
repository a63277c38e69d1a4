"""Checkpoints of the Hugging Face hub, from the local cache or downloaded."""

from __future__ import annotations

import urllib.request
from functools import cache
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError

from labkit.models.config_file import CONFIG
from labkit.weights.source import TOKENIZER_FILES, weight_files

PROBE_SECONDS = 3
DESCRIPTION = (".json", ".txt", ".model")
UNAVAILABLE = (HTTPError, ConnectionError, LocalEntryNotFoundError, HFValidationError)


def checkpoint_folder(repo_id: str) -> Path | None:
    """The local folder of a model of the hub. Downloads the model if it is not in the cache.

    None where the hub cannot be reached, has no such model, or denies it to this user.
    """
    return _cached(repo_id) or (_download(repo_id) if hub_answers() else None)


@cache
def hub_answers() -> bool:
    """Whether the hub can be reached: asked once per process, and never when HF_HUB_OFFLINE is set."""
    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _cached(repo_id: str) -> Path | None:
    needed = [CONFIG, *TOKENIZER_FILES]  # without this list, every file of the model would have to be in the cache
    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True, allow_patterns=needed))
        return folder if weight_files(folder) and (folder / CONFIG).is_file() else None
    except (LocalEntryNotFoundError, ValueError):
        return None


def _download(repo_id: str) -> Path | None:
    try:
        siblings = HfApi().model_info(repo_id, timeout=PROBE_SECONDS).siblings or []
        names = [sibling.rfilename for sibling in siblings if "/" not in sibling.rfilename]
        weights = [name for name in names if name.startswith("model") and name.endswith(".safetensors")]
        weights = weights or [name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")]
        files = [*weights, *(name for name in names if name.endswith(DESCRIPTION))]
        return Path(snapshot_download(repo_id, allow_patterns=files)) if weights else None
    except UNAVAILABLE:
        return None
