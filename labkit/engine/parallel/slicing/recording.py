"""Recording of the calls of a model's blocks in a tiny run. The proof replays them on copies of the blocks."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache

from labkit.models.observed.example_inputs import evaluating, next_inputs, token_inputs
from labkit.system.errors import UserError

# errors of a forward that gets arguments or weights which it does not expect
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Call:
    """Arguments of a call. Floating-point tensors are in float32."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns `value` with `function` applied to the items of its tuples, lists and dicts."""
    return tree_map(function, value, is_leaf=_is_cache)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in tuples, lists and dicts, in order, without the tensors of KV caches."""
    return (leaf for leaf in tree_leaves(value, is_leaf=_is_cache) if isinstance(leaf, Tensor))


def _is_cache(value: Any) -> bool:
    return isinstance(value, Cache)


def is_float(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point()


def hidden_states(call: Call) -> list[Tensor]:
    """Returns the rows [B, T, hidden] among the arguments: the first tensor with three or more axes (a positional one,
    if there is any), and all others with its batch and width, for example an encoder's output.
    """
    rows = [tensor for tensor in tensors(call.args) if is_float(tensor) and tensor.ndim >= 3]
    rows += [tensor for tensor in tensors(call.kwargs) if is_float(tensor) and tensor.ndim == 3]
    return [tensor for tensor in rows if (tensor.shape[0], tensor.shape[-1]) == (rows[0].shape[0], rows[0].shape[-1])]


def record(
    model: nn.Module, blocks: Mapping[str, nn.Module], example: Mapping[str, Tensor] | None = None
) -> dict[str, tuple[Call, ...]]:
    """Returns the calls of each block in one run over a padded batch, and in one decode step if the model has a KV
    cache. Blocks that are never called are left out.

    example: keyword arguments of the model, needed if it doesn't take `input_ids`. Raises ValueError if it is missing.
    """
    calls: dict[str, list[Call]] = {}
    runs = 0

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if len(calls.setdefault(name, [])) < runs:  # once per run, even if blocks share their weights
                calls[name].append(Call(mapped(_copied, args), mapped(_copied, kwargs)))

        return hook

    handles = [block.register_forward_pre_hook(keep(name), with_kwargs=True) for name, block in blocks.items()]
    try:
        with evaluating(model):
            inputs = dict(example) if example is not None else token_inputs(model)
            runs += 1
            output = model(**inputs)
            following = None if example is not None else next_inputs(model, inputs, output)
            if following is not None:
                runs += 1
                model(**following)
    except FAILURES as error:
        if isinstance(error, UserError):
            raise
        step = "a few tokens" if runs == 1 else "one more token after its KV cache"
        raise UserError(
            f"{type(model).__name__} can't be run on {step} ({type(error).__name__}: {error}), which planning needs; "
            "pass example=, keyword arguments of its forward"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return {name: tuple(made) for name, made in calls.items()}


def randomised(call: Call, generator: torch.Generator) -> Call:
    """Returns the call with seeded noise instead of its hidden states, which depend on the model's weights."""
    hidden = {id(tensor) for tensor in hidden_states(call)}

    def noise(value: Any) -> Any:
        return _normal(value.shape, generator).to(value.device) if id(value) in hidden else value

    return Call(mapped(noise, call.args), mapped(noise, call.kwargs))


def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Sets seeded weights that show every wrong cut: no zero biases, no equal heads, no equal norm weights."""
    for name, parameter in module.named_parameters():
        noise = _normal(parameter.shape, generator)
        if parameter.ndim > 1:
            noise /= max(parameter.shape[-1], 1) ** 0.5
        elif not name.endswith("bias"):
            noise = 1 + noise / 4
        parameter.data = noise.to(parameter.device)


def _normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().float().clone() if value.is_floating_point() else value.detach().clone()
    return _single_precision(copy.deepcopy(value)) if isinstance(value, Cache) else value


def _single_precision(cache: Cache) -> Cache:
    for part in (getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", cache)):
        for layer in part.layers:
            for name, value in vars(layer).items():
                if is_float(value):
                    setattr(layer, name, value.float())
    return cache
