"""A class that computes one thing differently, which nothing in its config or modules says, gets no row."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sweeps import swept
from torch import Tensor, nn
from transformers import Phi3Config
from transformers.models.phi3 import modeling_phi3 as phi3

from labkit.engine import alterations
from labkit.engine.init_inference import engine_with_row
from labkit.engine.proof import refusal_of
from labkit.models.derived.row import DerivedRow
from labkit.system.errors import UserError

Change = Callable[[Any], Any]
Disguise = Callable[[pytest.MonkeyPatch], None]


def output(kind: type[nn.Module], change: Callable[[Any, Tensor], Tensor]) -> Disguise:
    """Changes what a module returns, or the first of it."""

    def disguise(patch: pytest.MonkeyPatch) -> None:
        own = kind.forward

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            returned = own(self, *args, **kwargs)
            if isinstance(returned, tuple):
                return (change(self, returned[0]), *returned[1:])
            return change(self, returned)

        patch.setattr(kind, "forward", forward)

    return disguise


def rotation(change: Callable[..., tuple[Tensor, ...]]) -> Disguise:
    """Changes the function that rotates queries and keys; `change` gets the function and its arguments."""

    def disguise(patch: pytest.MonkeyPatch) -> None:
        own = phi3.apply_rotary_pos_emb
        patch.setattr(phi3, "apply_rotary_pos_emb", lambda q, k, cos, sin, **rest: change(own, q, k, cos, sin))

    return disguise


def attention(change: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Disguise:
    """Changes queries, keys and values after the cache and before the attention function."""

    def disguise(patch: pytest.MonkeyPatch) -> None:
        functions: Any = phi3.ALL_ATTENTION_FUNCTIONS
        own = functions.get_interface

        def interface(*names: Any) -> Any:
            inner = own(*names)
            return lambda module, q, k, v, *args, **kwargs: inner(module, *change(q, k, v), *args, **kwargs)

        patch.setattr(type(functions), "get_interface", lambda self, *names: interface(*names))

    return disguise


def hidden_window(patch: pytest.MonkeyPatch) -> None:
    def masked(config: Any, **arguments: Any) -> Any:
        windowed = type(config)(**config.to_dict() | {"sliding_window": 16})
        windowed._attn_implementation = config._attn_implementation
        return phi3.create_sliding_window_causal_mask(windowed, **arguments)

    patch.setattr(phi3, "create_causal_mask", masked)


def no_mask(patch: pytest.MonkeyPatch) -> None:
    """Tokens see padding."""
    own = phi3.create_causal_mask
    patch.setattr(phi3, "create_causal_mask", lambda **given: own(**given | {"attention_mask": None}))


def other_epsilon(patch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 3 * self.variance_epsilon))

    patch.setattr(phi3.Phi3RMSNorm, "forward", forward)


def in_layer(number: int, change: Callable[[Tensor], Tensor]) -> Disguise:
    return output(phi3.Phi3DecoderLayer, lambda layer, x: change(x) if layer.self_attn.layer_idx == number else x)


def mlp(formula: Callable[[Any, Tensor, Tensor], Tensor]) -> Disguise:
    """Another formula of gate and up."""

    def forward(self: Any, x: Tensor) -> Tensor:
        returned: Tensor = self.down_proj(formula(self.activation_fn, *self.gate_up_proj(x).chunk(2, dim=-1)))
        return returned

    return lambda patch: patch.setattr(phi3.Phi3MLP, "forward", forward)


NORM, ATTENTION, MLP = phi3.Phi3RMSNorm, phi3.Phi3Attention, phi3.Phi3MLP
LAYER, EMBED = phi3.Phi3DecoderLayer, nn.Embedding
DISGUISES: dict[str, Disguise] = {
    "another epsilon": other_epsilon,
    "a clamped norm": output(NORM, lambda _, x: x.clamp(-2.5, 2.5)),
    "a scaled norm": output(NORM, lambda _, x: 1.02 * x),
    "a norm of centred rows": output(NORM, lambda _, x: x - x.mean(-1, keepdim=True)),
    "a clamped gate": mlp(lambda act, gate, up: act(gate.clamp(max=7)) * up),
    "a clamped product": mlp(lambda act, gate, up: (act(gate) * up).clamp(-20, 20)),
    "another activation": mlp(lambda act, gate, up: torch.nn.functional.mish(gate) * up),
    "halves the other way round": mlp(lambda act, gate, up: act(up) * gate),
    "one more on the gate": mlp(lambda act, gate, up: act(gate) * (up + 1)),
    "a scaled MLP": output(MLP, lambda _, x: 0.98 * x),
    "a clamped MLP": output(MLP, lambda _, x: x.clamp(-30, 30)),
    "a norm after the MLP": output(MLP, lambda _, x: nn.functional.rms_norm(x, x.shape[-1:])),
    "a scaled attention": output(ATTENTION, lambda _, x: 0.98 * x),
    "a norm after the attention": output(ATTENTION, lambda _, x: nn.functional.rms_norm(x, x.shape[-1:])),
    "a bias after the attention": output(ATTENTION, lambda _, x: x + 0.01),
    "a gate after the attention": output(ATTENTION, lambda _, x: x * torch.sigmoid(x)),
    "keys turn backwards": rotation(lambda own, q, k, cos, sin: (own(q, k, cos, sin)[0], own(q, k, cos, -sin)[1])),
    "pairs side by side": rotation(
        lambda own, q, k, cos, sin: tuple(
            part.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
            for part in own(
                *(part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for part in (q, k)), cos * 0.999, sin
            )
        )
    ),
    "positions that begin at 1": rotation(lambda own, q, k, cos, sin: own(q, k, cos.roll(-1, 1), sin.roll(-1, 1))),
    "rotated queries alone": rotation(lambda own, q, k, cos, sin: (own(q, k, cos, sin)[0], k)),
    "queries that grow with the position": rotation(lambda own, q, k, cos, sin: own(1.1 * q, k, cos, sin)),
    "half of a head rotated": rotation(
        lambda own, q, k, cos, sin: tuple(
            torch.cat((turned[..., :8], part[..., 8:]), dim=-1)
            for turned, part in zip(own(q, k, cos, sin), (q, k), strict=True)
        )
    ),
    "keys of the token before": attention(lambda q, k, v: (q, k.roll(1, 2), v)),
    "soft caps on queries": attention(lambda q, k, v: (20 * torch.tanh(q / 20), k, v)),
    "clamped values": attention(lambda q, k, v: (q, k, v.clamp(-2, 2))),
    "scaled scores": attention(lambda q, k, v: (0.98 * q, k, v)),
    "a window": hidden_window,
    "padding that is seen": no_mask,
    "a scaled residual": output(LAYER, lambda _, x: 0.98 * x),
    "a clamped residual": output(LAYER, lambda _, x: x.clamp(-60, 60)),
    "a layer that scales": in_layer(3, lambda x: 1.05 * x),
    "a late layer that scales": in_layer(20, lambda x: 1.05 * x),
    "a layer that mixes": in_layer(3, lambda x: x + 0.05 * x.roll(1, -1)),
    "a scaled embedding": output(EMBED, lambda _, x: 1.03 * x),
    "a clamped embedding": output(EMBED, lambda _, x: x.clamp(-2, 2)),
    "a shifted embedding": output(EMBED, lambda _, x: x + 0.01),
    "an embedding that is normed": output(EMBED, lambda _, x: nn.functional.rms_norm(x, x.shape[-1:])),
}
FEW = ("another epsilon", "a clamped gate", "a window", "padding that is seen", "a late layer that scales")


def refusal() -> str:
    """Why Phi-3 gets no row; empty: it gets one."""
    try:
        row = DerivedRow(Phi3Config())
        return refusal_of(row, engine_with_row)
    except UserError as error:
        return str(error)


def test_phi3_itself_gets_a_row() -> None:
    assert not refusal()


@pytest.mark.parametrize("name", swept(list(DISGUISES), FEW))
def test_a_disguise_gets_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(alterations, "LIBRARIES", (*alterations.LIBRARIES, __name__.partition(".")[0]))  # to be proved
        DISGUISES[name](patch)
        assert refusal()
