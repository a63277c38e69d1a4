"""Models in which some layers have an MLP and the others a mixture of experts."""

from pathlib import Path

import pytest
import torch
from helpers.models.any_models import padded_tokens, texts
from helpers.models.dense_among_experts import DENSE, OTHERS, dense_model
from helpers.models.engines import distance, prompt
from helpers.models.offloaded import least_gb
from helpers.sweeps import swept
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import labkit
from labkit.engine.engine import DecoderEngine
from labkit.engine.offload.experts import memory_for
from labkit.engine.vanilla.annotate import annotate
from labkit.kernels.decode_step import MixtureMlp
from labkit.stages import Stage
from labkit.weights.capacity import model_bytes
from labkit.weights.checkpoint.manifest import MANIFEST
from labkit.weights.checkpoint.saved import saved_weights

OF_EXPERTS, OF_MLP = {Stage.ROUTE, Stage.EXPERTS}, {Stage.MLP, Stage.MLP_OUT}
each_model = pytest.mark.parametrize("name", DENSE)


def engine_of(model: PreTrainedModel | Path, **options: object) -> DecoderEngine:
    engine = labkit.init_inference(model, **{"dtype": torch.float32} | options)  # type: ignore[arg-type]
    assert isinstance(engine, DecoderEngine)
    assert engine.level == "derived row"
    return engine


@pytest.mark.parametrize("name", swept([*DENSE, *OTHERS], [*DENSE, "ernie-4.5"]))
def test_logits_and_tokens_are_those_of_transformers(name: str) -> None:
    model = dense_model(name, seed=3)
    engine, (ids, mask) = engine_of(model), padded_tokens()
    assert 0 < len(engine.weights.mixtures) < len(engine.weights.layers)
    with torch.no_grad():
        pairs = [(engine(ids).logits, model(ids).logits)]
        padded = [side(ids, attention_mask=mask).logits for side in (engine, model)]
    pairs.append((padded[0][mask.bool()], padded[1][mask.bool()]))
    for ours, theirs in pairs:
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)
    assert torch.equal(texts(engine), texts(model))


@each_model
def test_int8_and_the_ops_one_by_one_are_near(name: str) -> None:
    model, ids = dense_model(name), prompt(2, 12) % 100
    expected = engine_of(model)(ids).logits
    assert 0 < distance(engine_of(model, dtype=torch.int8)(ids).logits, expected) < 0.25
    assert distance(engine_of(model, impl="reference")(ids).logits, expected) < 1e-5
    staged = engine_of(model)(ids, output_hidden_states=True).logits
    assert distance(staged, expected) < 1e-5


@each_model
def test_saved_weights_and_folders_give_the_same_logits(name: str, tmp_path: Path) -> None:
    model, ids = dense_model(name), prompt(2, 9) % 100
    model.save_pretrained(tmp_path / "folder")
    expected = engine_of(model)(ids).logits
    assert torch.equal(engine_of(tmp_path / "folder")(ids).logits, expected)
    for dtype in (torch.float32, torch.int8):
        saved = tmp_path / str(dtype)
        written = engine_of(model, dtype=dtype, save_mp_checkpoint_path=str(saved))(ids).logits
        assert torch.equal(engine_of(saved, dtype=dtype)(ids).logits, written)
    config = engine_of(model).model_config
    checkpoint = saved_weights(
        tmp_path / "torch.float32", engine_of(model).fused.runner.layer_range.spec.policy, config
    )
    assert checkpoint is not None
    assert checkpoint.names() == set(model.state_dict())


def test_a_matrix_that_a_dense_layer_lacks_is_named(tmp_path: Path) -> None:
    dense_model("qwen3 list").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lacking = "model.layers.1.mlp.up_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lacking}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"1 missing: {lacking}\)"):
        engine_of(tmp_path)


def test_tensors_that_transformers_leaves_out_are_left_out(tmp_path: Path) -> None:
    """GLM has such tensors in a layer after the last one, to predict a second token."""
    model = dense_model("glm-4.5")
    model.save_pretrained(tmp_path)
    tensors, file = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    save_file(tensors | {"model.layers.46.eh_proj.weight": torch.zeros(2, 2)}, file)
    assert torch.equal(texts(engine_of(tmp_path)), texts(model))
    save_file(tensors | {"model.layers.45.eh_proj.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(ValueError, match=r"model\.layers\.45\.eh_proj\.weight"):
        engine_of(tmp_path)


@each_model
def test_layers_are_streamed_and_experts_are_read_by_need(name: str, tmp_path: Path) -> None:
    model, ids = dense_model(name), prompt(2, 9) % 100
    options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = engine_of(model).generate(ids, attention_mask=torch.ones_like(ids), **options)
    least = least_gb(model, tmp_path, dtype=torch.float32)
    layers = engine_of(model, offload={"path": tmp_path, "slots": 2, "experts": False, "resident_gb": least})
    assert layers.streamed is not None
    folder = next(tmp_path.glob(f"*/{MANIFEST}")).parent
    spec = layers.fused.runner.layer_range.spec
    saved = saved_weights(folder, spec.policy, spec.config)
    assert saved is not None
    chosen = 2 * model.config.num_experts_per_tok
    experts = engine_of(model, offload={"path": tmp_path, "resident_gb": memory_for(spec, saved, chosen) / 1e9 + 1e-6})
    store = experts.expert_store
    assert store is not None
    assert (store.layers, store.slots < store.layers * store.per_layer) == (len(experts.weights.mixtures), True)
    for engine in (layers, experts):
        assert torch.equal(engine.generate(ids, attention_mask=torch.ones_like(ids), **options), expected)
        hidden = engine(ids, output_hidden_states=True).hidden_states[-1]
        assert distance(hidden, engine_of(model)(ids, output_hidden_states=True).hidden_states[-1]) < 1e-5


@each_model
def test_stages_and_experts_are_those_of_each_kind_of_layer(name: str) -> None:
    engine = engine_of(dense_model(name))
    dense = [number for number, layer in enumerate(engine.weights.layers) if not isinstance(layer.mlp, MixtureMlp)]
    engine.stage_times()
    with engine.noting_experts() as passes:
        texts(engine)
    (read, *_) = engine.experts_read()
    assert [number for number, count in enumerate(read.by_layer) if not count] == dense
    assert all(len(chosen) == len(engine.weights.mixtures) for chosen in passes)
    count = engine.model_config.experts.count if engine.model_config.experts else 0
    assert all(0 <= int(chosen.min()) <= int(chosen.max()) < count for chosen in passes)
    for time in engine.stage_times():
        if time.layer is not None and time.stage in OF_EXPERTS:
            assert bool(time.total_ms) == (time.layer not in dense)
        if time.layer in dense and time.stage in OF_MLP:
            assert time.total_ms


@each_model
def test_stages_of_transformers_own_model_are_those_of_each_kind_of_layer(name: str) -> None:
    model = dense_model(name)
    engine = engine_of(model)
    with annotate(model, engine.fused.runner.layer_range.spec.policy) as clock:
        texts(model)
    for number, layer in enumerate(engine.weights.layers):
        stages = {time.stage for time in clock.stage_times() if time.layer == number}
        assert stages >= (OF_EXPERTS if isinstance(layer.mlp, MixtureMlp) else OF_MLP)
        assert isinstance(layer.mlp, MixtureMlp) or not OF_EXPERTS & stages


@each_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_the_counted_bytes_are_those_of_the_matrices(name: str, dtype: torch.dtype) -> None:
    engine = engine_of(dense_model(name, hidden_size=96), dtype=dtype)
    weights, head = engine.weights, engine.weights.head
    assert head is not None
    matrices = [matrix for layer in weights.layers for matrix in layer.matrices.values()]
    stored = sum(matrix.weight.nbytes for matrix in (*matrices, head.matrix))
    assert stored <= model_bytes(engine.fused.runner.layer_range.spec) <= 1.6 * stored
