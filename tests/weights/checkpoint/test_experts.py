"""Faults of a folder with a mixture of experts: one line names the tensor or the number that is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.models.any_models import any_model
from helpers.models.small_models import small_model
from safetensors.torch import load_file, save_file
from torch import Tensor

import labkit
from labkit.system.errors import UserError
from labkit.weights.checkpoint.manifest import MANIFEST
from labkit.weights.resolve import resolve

Tensors = dict[str, Tensor]
ROUTER, EXPERT = "model.layers.1.block_sparse_moe.gate.weight", "model.layers.1.block_sparse_moe.experts.4.w2.weight"
LAST = "model.layers.1.mlp.experts.4.w2.weight"  # the same expert, by the name of today's class


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    small_model("mixtral").save_pretrained(folder)
    return folder


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(EXPERT), rf"1 missing: {LAST}\)"),
        (without(ROUTER), r"1 missing: model.layers.1.mlp.gate.weight\)"),
        (
            changed(EXPERT, lambda tensor: tensor[:, :-8]),
            rf"cannot be joined: {LAST} is \[\d+, \d+\], expected \[rows, ",
        ),
        (changed(EXPERT, lambda tensor: tensor[:-8]), r"ff2.weight of shape \[\d+, \d+\], expected \[\d+, \d+\]"),
        (changed(ROUTER, lambda tensor: tensor[:-1]), r"mlp.gate.weight .*\[4, \d+\], expected \[5, \d+\]"),
        (changed(ROUTER, lambda tensor: tensor * torch.nan), "mlp.gate.weight holds values that are not finite"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_damaged_expert_or_router_is_named(
    change: Callable[[Tensors], Tensors], words: str, dtype: str, mixtral: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((mixtral / "config.json").read_text())
    save_file(change(load_file(mixtral / "model.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=words) as caught:
        labkit.init_inference(tmp_path, dtype=dtype)
    assert len(str(caught.value)) < 900


@pytest.mark.parametrize("chosen", [0, 6])
def test_a_number_of_chosen_experts_that_the_layer_does_not_have_is_refused(
    chosen: int, mixtral: Path, tmp_path: Path
) -> None:
    config = json.loads((mixtral / "config.json").read_text()) | {"num_experts_per_tok": chosen}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(mixtral / "model.safetensors")
    with pytest.raises(UserError, match=r"num_experts_per_tok = 0; expected|got 6 experts for each token of 5 experts"):
        labkit.init_inference(tmp_path)


def test_a_checkpoint_from_before_a_field_of_mixtures_is_read(tmp_path: Path) -> None:
    model = small_model("mixtral")
    saved = tmp_path / "saved"
    labkit.init_inference(model, dtype=torch.float32, save_mp_checkpoint_path=str(saved))
    manifest = json.loads((saved / MANIFEST).read_text())
    for later in ("scores", "choice_bias", "factor"):
        del manifest["model"]["experts"][later]
    (saved / MANIFEST).write_text(json.dumps(manifest))
    tokens = torch.arange(3, 12)[None]
    engine = labkit.init_inference(saved, dtype=torch.float32)
    assert torch.allclose(engine(tokens).logits, model(tokens).logits, atol=1e-4)
    manifest["model"]["experts"]["scores"] = "sigmoid"
    (saved / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="is of another model than the config given with it: experts"):
        labkit.init_inference(saved)


def test_the_bias_of_a_choice_is_never_rounded(tmp_path: Path) -> None:
    """It is a buffer in transformers, which folders store as a weight, and which stays float32 in other types."""
    model = any_model("solar_open", routed_scaling_factor=2.5)
    model.save_pretrained(tmp_path / "folder")
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert not torch.equal(bias, bias.bfloat16().float())
    source, tokens = resolve(str(tmp_path / "folder")), torch.arange(3, 12)[None]
    assert torch.allclose(source.hf_model(torch.float32)(tokens).logits, model(tokens).logits, atol=1e-5)
    narrow = source.hf_model(torch.bfloat16).model.layers[1].mlp.gate.e_score_correction_bias
    assert torch.equal(narrow.float(), bias)
    saved = str(tmp_path / "saved")
    for whence, options in ((source, {"save_mp_checkpoint_path": saved}), (saved, {}), (saved, {"dtype": "float32"})):
        engine = labkit.init_inference(whence, **{"dtype": "bfloat16"} | options)
        assert engine.level == "derived row"
        assert torch.equal(engine.weights.layers[1].mlp.router.choice_bias, bias)
