"""Attention sinks of a class without a row: they are read from its attention function's arguments, and proved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sweeps import swept
from torch import Tensor
from transformers import AutoConfig
from transformers.models.granite_swa import modeling_granite_swa as granite

from labkit.engine import alterations, init_inference
from labkit.engine.init_inference import engine_with_row
from labkit.engine.proof import refusal_of
from labkit.models.derived.row import DerivedRow
from labkit.models.derived.small_config import small_config
from labkit.models.derived.small_models import small_model
from labkit.models.shards import shard
from labkit.system.errors import UserError

CLASSES = swept(["granite_swa", "granitemoe_swa", "flint"], ["granite_swa"])
Attend = Callable[..., tuple[Tensor, Tensor]]


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_with_sinks_has_a_derived_row(kind: str) -> None:
    model = small_model(small_config(AutoConfig.for_model(kind)))
    engine = init_inference(model)
    assert engine.level == "derived row"
    ids = torch.randint(3, model.config.vocab_size, (3, 21), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.inference_mode():
        logits, expected = (side(ids, attention_mask=mask).logits[mask.bool()] for side in (engine, model))
    assert float((logits - expected).norm() / expected.norm()) < 1e-4
    texts = [
        side.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        for side in (engine, model)
    ]
    assert torch.equal(*texts)


def test_ranks_have_the_sinks_of_their_heads() -> None:
    row = DerivedRow(AutoConfig.for_model("granite_swa"))
    config = row.policy_for(row.small).model_config(row.small.config)
    assert config.attention_sinks
    parts = [shard(config, 2, rank) for rank in range(2)]
    assert [part.layer_shapes["sinks.weight"] for part in parts] == [(config.num_heads // 2,)] * 2


def with_other_sinks(change: Callable[[Any], Tensor]) -> Attend:
    """The class's own attention with other sinks than the parameter, in all calls, however it is reached."""
    own: Attend = granite.eager_attention_forward

    def attend(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        kept = module.sinks
        del module.sinks
        module.sinks = change(kept)
        try:
            return own(module, *args, **kwargs)
        finally:
            module.sinks = kept

    return attend


DISGUISES: dict[str, Attend] = {
    "no sinks": with_other_sinks(lambda sinks: torch.full_like(sinks, -1e4)),
    "scaled sinks": with_other_sinks(lambda sinks: 0.95 * sinks),
    "sinks of other heads": with_other_sinks(lambda sinks: sinks.roll(1)),
    "clamped sinks": with_other_sinks(lambda sinks: sinks.clamp(max=1)),
}


@pytest.mark.parametrize("name", swept(list(DISGUISES), ["scaled sinks", "sinks of other heads"]))
def test_a_class_that_uses_its_sinks_otherwise_gets_no_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(granite, "eager_attention_forward", DISGUISES[name])
    monkeypatch.setattr(alterations, "LIBRARIES", (*alterations.LIBRARIES, __name__.partition(".")[0]))  # to be proved
    assert refusal_of(DerivedRow(AutoConfig.for_model("granite_swa")), engine_with_row)


def test_sinks_that_are_no_parameter_of_the_attention_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    functions: Any = granite.ALL_ATTENTION_FUNCTIONS
    own = functions.get_interface

    def interface(self: Any, *names: Any) -> Any:
        inner = own(*names)
        return lambda *args, s_aux, **kwargs: inner(*args, s_aux=2 * s_aux, **kwargs)

    monkeypatch.setattr(type(functions), "get_interface", interface)
    with pytest.raises(UserError, match="the attention function gets s_aux"):
        DerivedRow(AutoConfig.for_model("granite_swa"))
