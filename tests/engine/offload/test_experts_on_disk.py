"""Engines that read experts from a file by need give the results of engines with all experts in memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.engines import greedy, prompt
from helpers.models.offloaded import LEAST_OF_EXPERTS, flip_byte
from helpers.models.small_models import small_model
from helpers.sweeps import crossed
from transformers import PreTrainedModel

import labkit
from labkit.engine.engine import FusedEngine
from labkit.engine.offload.footprint import Footprint
from labkit.kernels.expert_store import ExpertStore
from labkit.stages import Stage
from labkit.weights.checkpoint.manifest import MANIFEST
from labkit.weights.spec import WeightSpec

OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.int8},
    "int4": {"quant": {"weight": {"num_bits": 4, "q_groups": 2}}},
}
MODELS = ("qwen2-moe", "mixtral", "qwen3-moe", "olmoe", "granite-moe", "gpt-oss")


def larger_model(name: str) -> PreTrainedModel:
    """A small model whose experts are many pages long."""
    wide: dict[str, Any] = {"moe_intermediate_size" if name in ("qwen2-moe", "qwen3-moe") else "intermediate_size": 320}
    return small_model(name, **wide)


def on_disk(model: PreTrainedModel, folder: Path, part: float = 0.5, **options: Any) -> FusedEngine:
    """The engine with memory for this part of its experts."""
    with pytest.raises(ValueError, match=LEAST_OF_EXPERTS) as refused:
        labkit.init_inference(model, offload={"path": folder, "resident_gb": 0}, **options)
    least = LEAST_OF_EXPERTS.search(str(refused.value))
    assert least is not None
    smallest = _loaded(model, folder, float(least[1]), options)
    store = store_of(smallest)
    more = max(0.0, part * store.layers * store.per_layer - store.slots) * store.slot_bytes / 1e9
    return _loaded(model, folder, float(least[1]) + more, options)


def _loaded(model: PreTrainedModel, folder: Path, resident_gb: float, options: dict[str, Any]) -> FusedEngine:
    engine = labkit.init_inference(model, offload={"path": folder, "resident_gb": resident_gb}, **options)
    assert isinstance(engine, FusedEngine)
    return engine


def store_of(engine: FusedEngine) -> ExpertStore:
    assert engine.expert_store is not None
    return engine.expert_store


@pytest.mark.parametrize(("options", "name"), crossed(OPTIONS, MODELS))
def test_tokens_and_logits_are_those_of_the_resident_engine(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    """A padded batch, a prompt of more rows than one chunk, and the ops of a step one by one."""
    model = larger_model(name)
    engine, resident = on_disk(model, tmp_path, **options), labkit.init_inference(model, **options)
    assert store_of(engine).slots < store_of(engine).layers * store_of(engine).per_layer
    assert engine.streamed is None
    ids, mask = prompt(3, 11), torch.ones(3, 11, dtype=torch.long)
    mask[0, :4] = 0
    assert torch.equal(*(greedy(side, ids, 9, attention_mask=mask) for side in (engine, resident)))
    long = prompt(6, 100)
    with torch.inference_mode():
        assert torch.equal(*(side(long).logits for side in (engine, resident)))
        staged, expected = (side(ids, output_hidden_states=True).hidden_states[-1] for side in (engine, resident))
    assert float((staged - expected).abs().max()) <= (1e-5 if options == {} else 0.05)
    store_of(engine).check()


def test_counts_say_what_was_in_memory_and_what_was_read(tmp_path: Path) -> None:
    engine = on_disk(larger_model("qwen3-moe"), tmp_path)
    store, ids = store_of(engine), prompt(1, 5)
    greedy(engine, ids, 4)
    before = store.counts
    engine.stage_times()  # begins to count anew
    greedy(engine, ids, 12)
    counts, read = store.counts.since(before), engine.experts_read()
    assert counts.wanted == pytest.approx(sum(part.calls * sum(part.by_layer) for part in read))
    assert 0 < counts.hits < counts.wanted
    assert counts.guessed_hits <= counts.hits
    assert 0 < counts.right <= min(counts.guesses, counts.wanted)
    assert counts.wasted_bytes < counts.bytes_read
    assert counts.bytes_read >= counts.reads * store.bytes_per_expert
    assert store.counts.hit_rate <= 1
    assert Stage.FETCH in {time.stage for time in engine.stage_times()}


def test_more_memory_holds_more_experts_until_all_are_resident(tmp_path: Path) -> None:
    model = larger_model("mixtral")
    slots = [store_of(on_disk(model, tmp_path, part)).slots for part in (0.4, 0.7)]
    assert slots[0] < slots[1]
    whole = labkit.init_inference(model, offload={"path": tmp_path, "resident_gb": 1})
    assert isinstance(whole, FusedEngine)
    assert whole.expert_store is whole.streamed is None


def test_layers_are_streamed_on_request_and_from_checkpoints_without_digests_of_experts(tmp_path: Path) -> None:
    model = larger_model("qwen3-moe")
    resident_gb = 0.8 * Footprint.of(WeightSpec.of(model.config, torch.float32)).weights / 1e9
    layers = labkit.init_inference(
        model, offload={"path": tmp_path, "resident_gb": resident_gb, "slots": 2, "experts": False}
    )
    assert layers.streamed is not None
    assert layers.expert_store is None
    labkit.init_inference(model, save_mp_checkpoint_path=tmp_path / "saved")
    manifest = json.loads((tmp_path / "saved" / MANIFEST).read_text())
    for layer in manifest["files"][0]["layers"]:
        del layer["experts"]
    (tmp_path / "saved" / MANIFEST).write_text(json.dumps(manifest | {"format": 3}))
    offload = {"path": tmp_path / "packed", "resident_gb": resident_gb, "slots": 2}
    again = labkit.init_inference(str(tmp_path / "saved"), offload=offload)  # packed anew
    assert torch.equal(*(greedy(side, prompt(1, 5), 5) for side in (again, layers)))


def test_the_least_memory_that_is_named_works_and_less_does_not(tmp_path: Path) -> None:
    model = larger_model("qwen2-moe")
    smallest = on_disk(model, tmp_path, 0.0)
    assert store_of(smallest).slots == 2 * model.config.num_experts_per_tok
    assert torch.equal(greedy(smallest, prompt(2, 9), 5), greedy(labkit.init_inference(model), prompt(2, 9), 5))


def test_an_altered_expert_ends_the_step_and_a_whole_file_goes_on(tmp_path: Path) -> None:
    engine = on_disk(larger_model("qwen3-moe"), tmp_path)
    ids = prompt(2, 9)
    expected = greedy(engine, ids, 5)
    size, file = store_of(engine).path.stat().st_size, store_of(engine).path
    places = range(size // 2, size, store_of(engine).bytes_per_expert // 2)
    for offset in places:
        flip_byte(file, offset)
    with pytest.raises(RuntimeError, match=r"expert \d+ of layer \d in .* was altered"):
        greedy(engine, ids, 5)
    for offset in places:
        flip_byte(file, offset)
    assert torch.equal(greedy(engine, ids, 5), expected)
