"""MLPs are recognised by what they compute, and not taken for one that computes something else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.models.observed.calls import ObservedCall
from labkit.models.observed.mlps import PlainMlp, may_be_mlp, plain_mlp

Formula = Callable[[Any, Tensor], Tensor]  # of the module, whose linears are its attributes


class Mlp(nn.Module):
    """Three linears, and a formula of them."""

    def __init__(self, formula: Formula, names: tuple[str, ...], inner: int = 24) -> None:
        super().__init__()
        self.formula = formula
        generator = torch.Generator().manual_seed(0)
        for name in names:
            wide = 2 * inner if name == "both" else inner
            shape = (16, inner) if name == "down" else (wide, 16)
            linear = nn.Linear(shape[1], shape[0])
            linear.weight.data = torch.randn(shape, generator=generator) / 4
            setattr(self, name, linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


def recognised(module: Mlp) -> PlainMlp | None:
    linears: dict[str, nn.Module] = dict(module.named_children())
    assert may_be_mlp(module, linears)
    calls: dict[str, ObservedCall] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            calls[name] = ObservedCall(args[0], args[0]._version, args[0].clone(), y, y.clone(), alone=True)

        return hook

    handles = [part.register_forward_hook(keep(name)) for name, part in (*linears.items(), ("", module))]
    with torch.no_grad():
        module(torch.randn(5, 16, generator=torch.Generator().manual_seed(1)))
        for handle in handles:
            handle.remove()
        return plain_mlp(module, calls.pop(""), linears, calls)


SILU, GELU = functional.silu, functional.gelu
PLAIN: dict[str, tuple[Formula, tuple[str, ...], PlainMlp]] = {
    "gated": (
        lambda m, x: m.down(SILU(m.gate(x)) * m.up(x)),
        ("gate", "up", "down"),
        PlainMlp("up", "down", "silu", gate="gate"),
    ),
    "the gate called last": (
        lambda m, x: m.down(m.up(x) * GELU(m.gate(x))),
        ("up", "gate", "down"),
        PlainMlp("up", "down", "gelu", gate="gate"),
    ),
    "without a gate": (
        lambda m, x: m.down(functional.relu(m.up(x))),
        ("up", "down"),
        PlainMlp("up", "down", "relu"),
    ),
    "halves": (
        lambda m, x: m.down(SILU(m.both(x)[..., :24]) * m.both(x)[..., 24:]),
        ("both", "down"),
        PlainMlp("both", "down", "silu", halves=True),
    ),
    "halves, up first": (
        lambda m, x: m.down(SILU(m.both(x)[..., 24:]) * m.both(x)[..., :24]),
        ("both", "down"),
        PlainMlp("both", "down", "silu", halves=True, gate_first=False),
    ),
}
OTHERS: dict[str, Formula] = {
    "clamped": lambda m, x: m.down(SILU(m.gate(x)).clamp(max=7) * m.up(x)),
    "clamped far out": lambda m, x: m.down(SILU(m.gate(x)) * m.up(x).clamp(-100, 100)),
    "another activation": lambda m, x: m.down(torch.tanh(m.gate(x)) * m.up(x)),
    "a scaled output": lambda m, x: 1.01 * m.down(SILU(m.gate(x)) * m.up(x)),
    "a residual": lambda m, x: x + m.down(SILU(m.gate(x)) * m.up(x)),
    "a scaled input": lambda m, x: m.down(SILU(m.gate(1.1 * x)) * m.up(1.1 * x)),
    "a sum": lambda m, x: m.down(SILU(m.gate(x)) + m.up(x)),
    "one more on the gate": lambda m, x: m.down(SILU(m.gate(x)) * (m.up(x) + 1)),
    "another slope": lambda m, x: m.down(m.gate(x) * torch.sigmoid(1.702 * m.gate(x)) * m.up(x)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_mlp_is_recognised(name: str) -> None:
    formula, parts, expected = PLAIN[name]
    assert recognised(Mlp(formula, parts)) == expected


@pytest.mark.parametrize("name", OTHERS)
def test_another_computation_is_not_taken_for_one(name: str) -> None:
    assert recognised(Mlp(OTHERS[name], ("gate", "up", "down"))) is None
