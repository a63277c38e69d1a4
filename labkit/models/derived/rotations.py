"""Rotations of queries and keys, recognised by their tables."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from labkit.models.config import RotarySpec
from labkit.models.derived.head_linears import NotRecognised
from labkit.models.observed.calls import distance

LONG_ROPE, LONG_FROM = "longrope", "original_max_position_embeddings"  # transformers' names of the type and its limit
SAME = 1e-4  # between rotated queries of a model and ours


@dataclass(frozen=True)
class Rotation:
    """The place of a rotation's frequencies in a model.

    module: path of the module. buffer: name of its frequencies. The module may have an `attention_scaling`.
    backwards: the pairs turn the other way round (nanochat).
    """

    module: str
    buffer: str
    interleaved: bool
    backwards: bool

    def specs(self, model: nn.Module, config: PretrainedConfig) -> tuple[RotarySpec, RotarySpec]:
        """The rotation of a model of this config, in short and in long texts. Its module is made anew unless it has
        exact frequencies: the model may be on the meta device, in another type, or have read a long text. Raises
        NotRecognised for frequencies that change with the length of the text, unless the type is a long rope.
        """
        module: Any = model.get_submodule(self.module)
        own: Any = getattr(module, "rope_type", "")  # a name, or one for each kind of layer
        kinds = set(own.values()) if isinstance(own, dict) else {own}
        if changing := [kind for kind in kinds if "dynamic" in kind or (kind == LONG_ROPE and own != LONG_ROPE)]:
            raise NotRecognised(f"a rotation of the type {changing[0]}, which changes with the length of the text")
        frequencies: Tensor = getattr(module, self.buffer)
        if frequencies.dtype == torch.float32 and not frequencies.is_meta and own != LONG_ROPE:
            return (_spec(module, self),) * 2
        kind = type(module)
        arguments = {"config": config} if "config" in inspect.signature(kind.__init__).parameters else {}
        with torch.device("cpu"):
            made = kind(**arguments)
            short = long = _spec(made, self)
            if own == LONG_ROPE:
                made(torch.zeros(1), position_ids=torch.tensor([[short_positions(config)]]))
                long = _spec(made, self)
                own_long: Any = getattr(module, "long_inv_freq", None)  # kept since the model's first long text
                if own_long is not None and not torch.allclose(own_long.cpu(), made.long_inv_freq):
                    raise NotRecognised("frequencies for long texts that are not the config's")
        return short, long


def short_positions(config: PretrainedConfig) -> int:
    """The largest number of positions of a text that a long rope takes for a short one."""
    return int(config.rope_parameters[LONG_FROM])


def rotations(model: nn.Module) -> Iterator[tuple[Rotation, RotarySpec]]:
    """All rotations that a model's modules may compute."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name and buffer.dim() == 1:
                for backwards, interleaved in product((False, True), repeat=2):
                    rotation = Rotation(path, name, interleaved, backwards)
                    yield rotation, _spec(module, rotation)


def _spec(module: nn.Module, rotation: Rotation) -> RotarySpec:
    buffer: Tensor = getattr(module, rotation.buffer)
    frequencies = -buffer if rotation.backwards else buffer
    scaling = getattr(module, rotation.buffer.removesuffix("inv_freq") + "attention_scaling", 1.0)
    return RotarySpec(2 * len(frequencies), rotation.interleaved, tuple(frequencies.tolist()), float(scaling))


def is_rotated(before: Tensor, after: Tensor, spec: RotarySpec) -> bool:
    """Whether queries or keys [T, heads, D] at the positions 0, 1, … become `after` by this rotation."""
    if spec.dim > before.shape[-1]:
        return False
    angles = torch.outer(torch.arange(len(before)).float(), torch.tensor(spec.inv_freq))
    cosine, sine = ((table * spec.attention_scaling)[:, None] for table in (angles.cos(), angles.sin()))
    turned, rest = before[..., : spec.dim].float(), before[..., spec.dim :].float()
    first, second = (turned[..., ::2], turned[..., 1::2]) if spec.interleaved else turned.chunk(2, dim=-1)
    pairs = first * cosine - second * sine, second * cosine + first * sine
    joined = torch.stack(pairs, dim=-1).flatten(-2) if spec.interleaved else torch.cat(pairs, dim=-1)
    return distance(torch.cat((joined, rest), dim=-1), after) <= SAME
