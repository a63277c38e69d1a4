"""A mixture of experts that computes one thing differently, which nothing in its config says, gets no row."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sweeps import swept
from torch import Tensor
from torch.nn import functional
from transformers import Ernie4_5_MoeConfig, Glm4MoeConfig, PretrainedConfig, Qwen2MoeConfig, SolarOpenConfig
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen
from transformers.models.solar_open import modeling_solar_open as solar

from labkit.engine import alterations
from labkit.engine.init_inference import engine_with_row
from labkit.engine.proof import refusal_of
from labkit.models.derived.row import DerivedRow
from labkit.system.errors import UserError

Disguise = Callable[[pytest.MonkeyPatch], None]


def forward_of(kind: type, change: Callable[..., Any]) -> Disguise:
    """`change` gets a module's own forward and its arguments."""

    def disguise(patch: pytest.MonkeyPatch) -> None:
        own = kind.forward  # type: ignore[attr-defined]
        patch.setattr(kind, "forward", lambda self, *args: change(lambda *given: own(self, *given), self, *args))

    return disguise


def shares(change: Callable[[Tensor, Tensor], Tensor], kind: type = qwen.Qwen2MoeTopKRouter) -> Disguise:
    """Changes the shares of rows; `change` also gets the numbers of their experts."""

    def changed(own: Any, router: Any, x: Tensor) -> tuple[Tensor, ...]:
        logits, weights, chosen = own(x)
        return logits, change(weights, chosen), chosen

    return forward_of(kind, changed)


def logits(change: Callable[[Tensor], Tensor]) -> Disguise:
    """Changes what the router takes the softmax of."""

    def routed(own: Any, router: Any, x: Tensor) -> tuple[Tensor, ...]:
        made = change(functional.linear(x.reshape(-1, router.hidden_dim), router.weight))
        weights, chosen = made.softmax(-1).topk(router.top_k, dim=-1)
        return made, weights, chosen

    return forward_of(qwen.Qwen2MoeTopKRouter, routed)


def expert(formula: Callable[[Tensor, Tensor], Tensor]) -> Disguise:
    """Another formula of gate and up."""

    def summed(own: Any, experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for number, (first, second) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
            act = formula(*functional.linear(x, first).chunk(2, dim=-1))
            total += weights.masked_fill(chosen != number, 0).sum(1, keepdim=True) * functional.linear(act, second)
        return total

    return forward_of(qwen.Qwen2MoeExperts, summed)


def before_the_expert(own: Any, experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Each expert gets rows that are multiplied by their shares, and its output is added as it is."""
    total = torch.zeros_like(x)
    for choice in range(chosen.shape[1]):
        total += own(x * weights[:, [choice]], chosen[:, [choice]], torch.ones_like(weights[:, [choice]]))
    return total


def limited(weights: Tensor, chosen: Tensor) -> Tensor:
    """An expert takes no more than nine rows of a call."""
    counts = functional.one_hot(chosen, 4).sum(1).cumsum(0).gather(1, chosen)
    return weights.masked_fill(counts > 9, 0)


def of_three(own: Any, router: Any, x: Tensor) -> tuple[Tensor, ...]:
    """The softmax is taken over the three largest logits."""
    made = functional.linear(x.reshape(-1, router.hidden_dim), router.weight)
    largest, chosen = made.topk(3, dim=-1)
    return made, largest.softmax(-1)[:, : router.top_k], chosen[:, : router.top_k]


def always_two(own: Any, router: Any, x: Tensor) -> tuple[Tensor, ...]:
    made, weights, chosen = own(x)
    return made, weights[:, :2], chosen[:, :2]


def shared_once_more(own: Any, block: Any, x: Tensor) -> Tensor:
    return own(x) + 0.02 * block.shared_expert(x)


def in_layer(number: int, change: Callable[[Tensor], Tensor]) -> Disguise:
    """The mixture of one layer is another one."""

    def disguise(patch: pytest.MonkeyPatch) -> None:
        own = qwen.Qwen2MoeDecoderLayer.__init__

        def init(self: Any, config: Any, layer_idx: int) -> None:
            own(self, config, layer_idx)
            self.mlp.number = layer_idx

        patch.setattr(qwen.Qwen2MoeDecoderLayer, "__init__", init)
        block = qwen.Qwen2MoeSparseMoeBlock.forward
        patch.setattr(
            qwen.Qwen2MoeSparseMoeBlock,
            "forward",
            lambda self, x: change(block(self, x)) if self.number == number else block(self, x),
        )

    return disguise


def biased(
    choose: Callable[[Tensor, Tensor], Tensor],
    score: Callable[[Tensor, Tensor], Tensor],
    *,
    renormalised: bool = True,
) -> Disguise:
    """A router that adds the choice bias in another place: to what it compares, or to the scores."""

    def routed(own: Any, router: Any, x: Tensor) -> tuple[Tensor, ...]:
        made = functional.linear(x.view(-1, router.hidden_dim), router.weight)
        chosen = choose(made, router.e_score_correction_bias).topk(router.top_k, dim=-1).indices
        weights = score(made, router.e_score_correction_bias).gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) if renormalised else weights
        return made, weights * router.routed_scaling_factor, chosen

    return forward_of(solar.SolarOpenTopkRouter, routed)


def in_one_group(made: Tensor, bias: Tensor) -> Tensor:
    """The experts of a row are of one half of them."""
    halves = (made.sigmoid() + bias).unflatten(1, (2, -1))
    better = halves.sum(-1, keepdim=True) == halves.sum(-1, keepdim=True).amax(1, keepdim=True)
    return halves.masked_fill(~better, 0).flatten(1)


def dense_layer(change: Callable[[Any, Any, Tensor], Tensor], least: int = 0) -> Disguise:
    """The MLP of layers without experts is another one, from layer `least` on."""

    def disguise(patch: pytest.MonkeyPatch) -> None:
        own = glm.Glm4MoeDecoderLayer.__init__

        def init(self: Any, config: Any, layer_idx: int) -> None:
            own(self, config, layer_idx)
            if layer_idx >= least and not hasattr(self.mlp, "experts"):
                self.mlp.changed = True

        def forward(mlp: Any, x: Tensor) -> Tensor:
            return change(of_mlp, mlp, x) if hasattr(mlp, "changed") else of_mlp(mlp, x)

        patch.setattr(glm.Glm4MoeDecoderLayer, "__init__", init)
        of_mlp = glm.Glm4MoeMLP.forward
        patch.setattr(glm.Glm4MoeMLP, "forward", forward)

    return disguise


def with_gate(act: Callable[[Tensor], Tensor]) -> Callable[[Any, Any, Tensor], Tensor]:
    return lambda own, mlp, x: mlp.down_proj(act(mlp.gate_proj(x)) * mlp.up_proj(x))


BLOCK = qwen.Qwen2MoeSparseMoeBlock
OF_QWEN: dict[str, Disguise] = {
    "a scaled share": shares(lambda weights, chosen: 0.98 * weights),
    "a limit of rows": shares(limited),
    "an expert that is skipped": shares(lambda weights, chosen: weights.masked_fill(chosen == 3, 0)),
    "a least share": shares(lambda weights, chosen: weights.masked_fill(weights < 0.15, 0)),
    "half of the renormalisation": shares(lambda weights, chosen: weights / weights.sum(1, keepdim=True).sqrt()),
    "a softmax over other experts": forward_of(qwen.Qwen2MoeTopKRouter, of_three),
    "always two experts": forward_of(qwen.Qwen2MoeTopKRouter, always_two),
    "capped logits": logits(lambda made: 30 * torch.tanh(made / 30)),
    "warmer logits": logits(lambda made: made / 1.05),
    "noise": logits(lambda made: made + 0.05 * torch.randn(made.shape)),
    "an expert that is preferred": logits(lambda made: made + torch.tensor([0.05, 0, 0, 0])),
    "a choice by position": logits(lambda made: made + 0.1 * functional.one_hot(torch.arange(len(made)) % 4, 4)),
    "a normed row in the router": forward_of(
        qwen.Qwen2MoeTopKRouter, lambda own, router, x: own(functional.rms_norm(x, x.shape[-1:]))
    ),
    "shares before the experts": forward_of(qwen.Qwen2MoeExperts, before_the_expert),
    "a clamped gate": expert(lambda gate, up: functional.silu(gate.clamp(max=7)) * up),
    "a clamped product": expert(lambda gate, up: (functional.silu(gate) * up).clamp(-20, 20)),
    "halves the other way round": expert(lambda gate, up: functional.silu(up) * gate),
    "one more on the gate": expert(lambda gate, up: functional.silu(gate) * (up + 1)),
    "another activation": expert(lambda gate, up: functional.mish(gate) * up),
    "more of the shared expert": forward_of(BLOCK, shared_once_more),
    "a clamped mixture": forward_of(BLOCK, lambda own, block, x: own(x).clamp(-30, 30)),
    "rows of another token": forward_of(BLOCK, lambda own, block, x: own(x + 0.02 * x.roll(1, -1))),
    "a mixture that scales": in_layer(2, lambda y: 1.02 * y),
    "a late mixture that scales": in_layer(17, lambda y: 1.05 * y),
}
OF_SOLAR: dict[str, Disguise] = {
    "a bias of the logits": biased(lambda made, bias: made + bias, lambda made, bias: made.sigmoid()),
    "a bias of the shares": biased(lambda made, bias: made.sigmoid() + bias, lambda made, bias: made.sigmoid() + bias),
    "half of the bias": biased(lambda made, bias: made.sigmoid() + bias / 2, lambda made, bias: made.sigmoid()),
    "no bias": biased(lambda made, bias: made, lambda made, bias: made.sigmoid()),
    "an epsilon": biased(
        lambda made, bias: made.sigmoid() + bias,
        lambda made, bias: made.sigmoid() / (made.sigmoid().sum(1, keepdim=True) + 0.01),
        renormalised=False,
    ),
    "groups": biased(in_one_group, lambda made, bias: made.sigmoid()),
}
OF_GLM: dict[str, Disguise] = {
    "an MLP that scales": dense_layer(lambda own, mlp, x: 1.02 * own(mlp, x)),
    "a later MLP that scales": dense_layer(lambda own, mlp, x: 1.02 * own(mlp, x), 1),
    "the last MLP that scales": dense_layer(lambda own, mlp, x: 1.05 * own(mlp, x), 5),
    "an MLP with another activation": dense_layer(with_gate(functional.gelu)),
    "an MLP with a clamped gate": dense_layer(with_gate(lambda gate: functional.silu(gate).clamp(max=7))),
    "a clamped MLP": dense_layer(lambda own, mlp, x: own(mlp, x).clamp(-30, 30)),
    "an MLP of a normed row": dense_layer(lambda own, mlp, x: own(mlp, functional.rms_norm(x, x.shape[-1:]))),
    "an MLP without its input": dense_layer(lambda own, mlp, x: own(mlp, x) - 0.02 * x),
}
OF: dict[str, dict[str, Disguise]] = {"qwen": OF_QWEN, "solar": OF_SOLAR, "glm": OF_GLM, "deep glm": OF_GLM}
SMALL: dict[str, PretrainedConfig] = {
    "qwen": Qwen2MoeConfig(),
    "solar": SolarOpenConfig(routed_scaling_factor=2.5),
    "glm": Glm4MoeConfig(first_k_dense_replace=2, num_hidden_layers=12),
    "deep glm": Glm4MoeConfig(first_k_dense_replace=6, num_hidden_layers=8),
}
FEW = ("a clamped gate", "always two experts", "capped logits", "half of the bias", "a later MLP that scales")


def refusal(kind: str) -> str:
    """Why a class gets no row; empty: it gets one."""
    try:
        return refusal_of(DerivedRow(SMALL[kind]), engine_with_row)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("kind", SMALL)
def test_the_class_itself_gets_a_row(kind: str) -> None:
    assert not refusal(kind)


@pytest.mark.parametrize("name", swept([*OF_QWEN, *OF_SOLAR, *OF_GLM], FEW))
def test_a_disguise_gets_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [kind for kind, disguises in OF.items() if name in disguises]
    with monkeypatch.context() as patch:
        patch.setattr(alterations, "LIBRARIES", (*alterations.LIBRARIES, __name__.partition(".")[0]))  # to be proved
        OF[kinds[0]][name](patch)
        assert refusal(kinds[-1])


def test_a_least_sum_of_scores_that_matters_gets_no_row() -> None:
    """ERNIE's default divides by a sum of at least 1e-12."""
    assert not refusal_of(DerivedRow(Ernie4_5_MoeConfig()), engine_with_row)
    with pytest.raises(UserError, match="a router that no row describes"):
        DerivedRow(Ernie4_5_MoeConfig(moe_norm_min=0.01))
