"""Stages of models without a row come from the structure of their layers, the same for transformers and for hooks."""

import pytest
import torch
from helpers.models.any_models import any_model, padded_tokens, texts
from helpers.sweeps import swept

import labkit
from labkit.engine.runners.stage_clock import StageTime
from labkit.engine.vanilla.annotate import annotate
from labkit.engine.vanilla.structure import boundaries_of, layers_of
from labkit.stages import Phase, Stage

LAYERED = {
    "phimoe": [("", "attention", None), ("self_attn", None, "mlp"), ("mlp", None, "residual")],
    "mamba": [("", "attention", None)],
    "opt": [("", "attention", None), ("self_attn", None, "mlp"), ("fc2", None, "residual")],
    "gpt_neox_japanese": [("", "attention", None), ("attention", None, "mlp"), ("mlp", None, "residual")],
}


def stages(model: torch.nn.Module) -> list[StageTime]:
    with annotate(model, None) as clock:  # type: ignore[arg-type]
        texts(model, new=3)
    return clock.stage_times()


@pytest.mark.parametrize("name", LAYERED)
def test_the_last_part_of_a_layer_is_its_mlp(name: str) -> None:
    model = any_model(name)
    path = layers_of(model)
    assert path is not None
    layer = model.get_submodule(path)[0]  # type: ignore[index]
    assert [(part, *(stage and str(stage) for stage in both)) for part, *both in boundaries_of(layer)] == LAYERED[name]


@pytest.mark.parametrize("name", swept(["phimoe", "qwen3_5_text", "mamba", "deepseek_v3"], ["phimoe"]))
def test_hooks_have_the_stages_of_transformers(name: str) -> None:
    model = any_model(name)
    engine = labkit.init_inference(model, dtype=torch.float32)
    assert engine.level == "hooks"
    theirs, ours = (
        [(of.phase, of.stage, of.layer, of.calls) for of in stages(side)] for side in (model, engine.module)
    )
    assert ours == theirs
    decode = {stage for phase, stage, _, _ in ours if phase is Phase.DECODE}
    assert {Stage.EMBED, Stage.ATTENTION, Stage.LM_HEAD, Stage.SAMPLE} <= decode


def test_a_model_without_layers_has_no_stages_of_layers() -> None:
    ids, _ = padded_tokens()
    model = torch.nn.Sequential(torch.nn.Embedding(200, 8), torch.nn.Linear(8, 8))
    assert layers_of(model) is None
    assert model(ids).shape[-1] == 8
