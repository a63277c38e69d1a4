"""The attention of models that write it out in their own code, as calls of an attention function.

The products around a softmax say what is attended to: its input is a multiple of queries times keys, hidden where a
query may not look, and its output multiplies the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from labkit.models.config import alibi_slopes
from labkit.models.derived.attention_calls import AttentionCall
from labkit.models.observed.calls import distance

PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm")
SAME = 1e-4  # between scores that differ by rounding
UNSEEN = 1e-6  # most of the weight of a hidden key
CAUSAL = "scores that are no multiple of queries times keys up to the query"


@dataclass(frozen=True)
class ObservedProduct:
    """A product of two tensors, in the module that computed it."""

    module: nn.Module
    left: Tensor
    right: Tensor
    result: Tensor


class ProductWatch(TorchFunctionMode):
    """Lists the products and the softmaxes of the code that runs in it. `running`: the modules that are in a call."""

    def __init__(self, running: Sequence[nn.Module], batch: int) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []
        self._running, self._batch = running, batch
        self._scored: ObservedProduct | None = None  # the last product before a softmax
        self._softmax: tuple[Tensor, Tensor] | None = None  # its input and output

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name == "scaled_dot_product_attention":
            scale = (kwargs or {}).get("scale") or args[0].shape[-1] ** -0.5
            self._add(self._running[-1], args[:3], result, scale, special=())
        elif name == "softmax":
            self._softmax = args[0].detach().clone(), result.detach().clone()
        elif name in PRODUCTS:
            left, right = args[-2:] if name == "baddbmm" else args[:2]
            product = ObservedProduct(self._running[-1], left.detach().clone(), right.detach().clone(), result)
            if self._softmax is None:
                self._scored = product
            elif left.numel() == self._softmax[1].numel() and torch.equal(left.flatten(), self._softmax[1].flatten()):
                self._attended(product)
        return result

    def _attended(self, product: ObservedProduct) -> None:
        assert self._softmax is not None
        scores, weights = (self._by_head(tensor) for tensor in self._softmax)
        self._softmax = None
        if self._scored is None:
            return
        query, key = self._by_head(self._scored.left), self._by_head(self._scored.right.mT)
        raw = (query @ key.expand(-1, query.shape[1] if key.shape[1] == 1 else -1, -1, -1).mT)[1]
        seen = torch.ones(raw.shape, dtype=torch.bool).tril()
        known = _scale(raw, scores[1], seen) if float(weights[1][~seen].max()) < UNSEEN else None
        scale, alibi = known or (1.0, False)
        value, output = self._by_head(product.right), self._by_head(product.result)
        special = () if known else (CAUSAL,)
        self._add(product.module, (query, key, value), output, scale, special=special, alibi=alibi)

    def _by_head(self, tensor: Tensor) -> Tensor:
        """A tensor [B, heads, T, D] or [B * heads, T, D] as the first."""
        return tensor if tensor.dim() == 4 else tensor.unflatten(0, (self._batch, -1))

    def _add(self, module: nn.Module, inputs: Sequence[Tensor], output: Tensor, scale: float, **more: Any) -> None:
        query, key, value = (tensor.detach().clone() for tensor in inputs)
        output = output.detach().transpose(1, 2).clone()
        call = AttentionCall(module, query, key, value, output, scale, window=None, cap=None, **more)
        self.calls.append(call)


def _scale(raw: Tensor, scores: Tensor, seen: Tensor) -> tuple[float, bool] | None:
    """The scale of scores [heads, T, T], and whether they have ALiBi's slopes. None: they are something else. A number
    that is added to all scores of a query changes nothing, so the first key's score is taken from all.
    """
    raw, scores = ((tensor - tensor[..., :1])[seen] for tensor in (raw, scores))
    slopes = torch.tensor(alibi_slopes(len(seen)))[:, None, None] * torch.arange(seen.shape[-1])
    for alibi, added in ((False, torch.zeros(())), (True, slopes.expand(seen.shape)[seen])):
        scale = float(((scores - added) * raw).sum() / raw.square().sum())
        if distance(raw * scale + added, scores) <= SAME:
            return scale, alibi
    return None


@contextmanager
def written_attention(batch: int) -> Iterator[list[AttentionCall]]:
    """Context in which the attention is listed that modules compute for `batch` sequences by products of their own."""
    running: list[nn.Module] = []

    def ended(*_: object) -> None:  # a hook that returned something would replace the module's result
        running.pop()

    handles = (
        register_module_forward_pre_hook(lambda module, _: running.append(module)),
        register_module_forward_hook(ended, always_call=True),
    )
    try:
        with torch.no_grad(), ProductWatch(running, batch) as watched:
            yield watched.calls
    finally:
        for handle in handles:
            handle.remove()
