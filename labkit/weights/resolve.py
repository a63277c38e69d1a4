"""Finds the model of a name, a hub id or a folder."""

from __future__ import annotations

import os
import re

from labkit.models.presets import PRESETS, find_preset
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.nearest import did_you_mean
from labkit.weights.box import HOW_TO_GET, NAME, boxed_file, boxed_source
from labkit.weights.gguf.file import gguf_in
from labkit.weights.hub import checkpoint_folder
from labkit.weights.source import ModelSource, RandomWeights, checkpoint_source, gguf_source, weight_files


def resolve(name_or_path: str | os.PathLike[str], *, seed: int = 0, any_architecture: bool = False) -> ModelSource:
    """The model of this name; nothing is loaded yet.

    These are tried in order:

    - a GGUF file, by its first bytes or its suffix, or a folder with a GGUF file and no checkpoint;
    - a local folder with a checkpoint;
    - smollm2-135m from its Python package;
    - the weights of a preset or hub id, from the local cache or from a hub that answers;
    - random weights drawn from `seed`, for any other preset.

    The result's `origin` says which of these it was. Presets are found by their name or hub id, in any spelling of
    dots, dashes and capitals.

    any_architecture: also take a checkpoint that has no row among the policies, which only transformers can run.

    Raises UserError for an unknown name, and for a checkpoint that is damaged or does not fit its config.
    """
    check_numbers(seed=seed)
    name = os.fspath(name_or_path)
    folder = expanded(name)
    preset = find_preset(name)
    if not weight_files(folder) and (file := gguf_in(folder)):
        return gguf_source(file, name=name, origin=f"GGUF file {file}")
    if (folder / "config.json").is_file() or (folder.is_dir() and preset is None):
        return checkpoint_source(folder, name=name, origin=f"checkpoint {folder}", any_architecture=any_architecture)

    if preset is not None and preset.name == NAME and (file := boxed_file()):
        return boxed_source(file)
    hub_id = preset.hub_id if preset else name
    if hub_id and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id) and (preset or "/" in hub_id):
        downloaded = checkpoint_folder(hub_id)
        if downloaded:
            known = preset.name if preset else name
            return checkpoint_source(downloaded, name=known, origin=f"hub {hub_id}", any_architecture=any_architecture)
    if preset is None:
        raise UserError(
            f"unknown model {name!r}{did_you_mean(name, PRESETS)}; expected a checkpoint folder, a GGUF file, the id "
            "of a model on a hub that can be reached, or a preset (`labkit models` lists them)"
        )
    shape = f"of the published {preset.name} shape" if preset.hub_id else f"of the shape {preset.name}"
    weights = RandomWeights(preset.hf_config, seed)
    remedy = f"; for the trained ones: {HOW_TO_GET}" if preset.name == NAME else ""
    return ModelSource(preset.name, f"random weights, seed {seed}, {shape}{remedy}", preset.hf_config, weights)
