"""A model as transformers makes it from the config, without memory for weights, and where a user's model differs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit.models.derived.rotations import LONG_ROPE
from labkit.models.tensor_names import is_buffer, unwrapped
from labkit.system.errors import UserError, first_line
from labkit.weights.source import fill_buffers

IN_TRAINING = {  # attributes that are used in training only
    "attention_dropout",
    "dropout",
    "gradient_checkpointing",
    "hidden_dropout",
    "inplace",
    "layerdrop",
    "p",
    "padding_idx",
    "scale_grad_by_freq",
    "sparse",
    "training",
}
NOTES = {  # attributes that the computation does not depend on: names, numbers of layers, and the sizes of tables
    "kernel_config",
    "layer_id",
    "layer_idx",
    "max_positions",
    "max_seq_len_cached",
    "max_target_positions",
    "name_or_path",
    "original_inv_freq",
    "original_max_seq_len",
    "vocab_size",
}
OF_WEIGHTS = {  # sizes of weights: a wrong shape is refused when the weights are read
    "embedding_dim",
    "in_features",
    "nf",
    "normalized_shape",
    "num_embeddings",
    "nx",
    "out_features",
}
LEFT_OUT = IN_TRAINING | NOTES | OF_WEIGHTS
PLAIN = (bool, int, float, str, type(None), list, tuple)
FLOAT_ROUNDING = 1e-5  # relative, between float32 results of different devices
ANGLE_ROUNDING = 1e-3  # of sines of angles up to thousands, absolute
LEAST_HALF = 2.0**-25  # half the distance of the smallest numbers of float16
MISSING = object()


def differences(model: nn.Module, configured: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields (name, description) of each module, plain attribute and buffer of `model` that decides what it computes
    and that differs from `configured`, which transformers made from the config.

    Modules that only `model` has are not compared: transformers' code does not call them.
    """
    modules = {unwrapped(f"{path}.")[:-1]: module for path, module in model.named_modules(remove_duplicate=False)}
    for path, expected in configured.named_modules(remove_duplicate=False):
        if isinstance(expected, nn.Dropout | nn.Identity):
            continue
        module = modules.get(path)
        if module is None:
            yield path, f"is missing (the config's: {type(expected).__name__})"
            continue
        prefix = f"{path}." if path else ""
        if _has_weights(expected) and type(module) is not type(expected):
            yield path, f"is a {type(module).__name__} (the config's: {type(expected).__name__})"
        if not _is_activation(expected):
            yield from ((f"{prefix}{name}", change) for name, change in _attributes(module, expected))
        for name, table in _tables(expected):
            if not _is_weight(expected, f"{prefix}{name}") and (change := _changed_table(module, name, table)):
                yield f"{prefix}{name}", change


def _is_weight(module: nn.Module, path: str) -> bool:
    """Whether a buffer of a module is a weight of checkpoints, all of which a row names."""
    return path.rpartition(".")[2] not in module._non_persistent_buffers_set and not is_buffer(path)


def _tables(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that decide what a module computes. A long rope computes `inv_freq` anew in every forward."""
    long_rope = getattr(module, "rope_type", None) == LONG_ROPE
    left_out = (LEFT_OUT - {"original_inv_freq"}) | {"inv_freq"} if long_rope else LEFT_OUT
    for name, table in module._buffers.items():
        if table is not None and name not in left_out:
            yield name, table


def _has_weights(module: nn.Module) -> bool:
    return next(module.children(), None) is None and next(module.parameters(), None) is not None


def _is_activation(module: nn.Module) -> bool:
    """Tells whether a module has neither parts nor weights nor tables. `alterations.py` checks what it computes."""
    return next(module.children(), None) is None and not module._parameters and not module._buffers


def _attributes(module: nn.Module, expected: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in vars(expected).items():
        if name.startswith("_") or name in LEFT_OUT or not isinstance(value, PLAIN):
            continue
        own = getattr(module, name, MISSING)
        if own is MISSING:
            yield name, f"is missing (the config's: {_shown(value)})"
        elif not _same(own, value):
            yield name, f"is {_shown(own)} (the config's: {_shown(value)})"


def _same(own: Any, value: Any) -> bool:
    numbers = (int, float)
    if isinstance(own, numbers) and isinstance(value, numbers) and isinstance(own, bool) == isinstance(value, bool):
        return math.isclose(own, value, rel_tol=1e-6)
    if isinstance(own, list | tuple) and isinstance(value, list | tuple):
        return list(own) == list(value)
    return type(own) is type(value) and bool(own == value)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if isinstance(value, PLAIN) else f"a {type(value).__name__}"


def _changed_table(module: nn.Module, name: str, table: Tensor) -> str | None:
    """Describes how the module's own table, such as rotary frequencies, differs from the config's."""
    own = getattr(module, name, None)
    if not isinstance(own, Tensor) or own.shape != table.shape:
        got = f"of shape {list(own.shape)}" if isinstance(own, Tensor) else _shown(own)
        return f"is {got} (the config's: of shape {list(table.shape)})"
    if own.is_meta:  # offloaded with the weights, which are refused as they are read
        return None
    own = own.detach().cpu()
    if not table.is_floating_point():
        return None if torch.equal(own, table) else "differs from the config's"
    own, table = own.float(), table.float()
    relative, absolute = _rounding(own)
    if table.dim() > 1:
        absolute = max(absolute, ANGLE_ROUNDING)
    wrong = ~((own - table).abs() <= relative * table.abs() + absolute)  # NaN is wrong
    if not bool(wrong.any()):
        return None
    place = wrong.nonzero()[0].tolist()
    return f"is {float(own[tuple(place)]):g} at {place} (the config's: {float(table[tuple(place)]):g})"


def _rounding(table: Tensor) -> tuple[float, float]:
    """Returns the largest (relative, absolute) rounding of a user's table.

    `model.to(torch.bfloat16)` and `model.half()` round tables with the weights, and a table stays rounded after
    `model.float()`. The engine computes with the unrounded table. So if bfloat16 or float16 represents a table exactly,
    it may differ from the config's table by half the distance of two numbers of that type.
    """
    for dtype in (torch.bfloat16, torch.float16):  # many numbers exist in both
        if torch.equal(table.to(dtype).float(), table):
            return torch.finfo(dtype).eps / 2 + FLOAT_ROUNDING, LEAST_HALF
    return FLOAT_ROUNDING, 0.0


def configured(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model that transformers makes from `model`'s config: with computed tables, and without memory for
    weights. Raises UserError if transformers can't make one.
    """
    config = copy.deepcopy(model.config)
    try:
        config.pad_token_id = None  # only training needs it in a model, and torch refuses one outside the vocabulary
    except StrictDataclassFieldValidationError:  # of a class that has to have one
        config.pad_token_id = 0
    try:
        with torch.device("meta"):
            made = type(model)._from_config(config, dtype=torch.float32, attn_implementation="eager")
        fill_buffers(made)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"transformers makes no {type(model).__name__} of the model's config ({first_line(error)}); undo the "
            "changes of the config that were made after the model"
        ) from error
    return made
