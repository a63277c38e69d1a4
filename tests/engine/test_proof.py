"""Rows that are derived from a class: proved once, kept by class and switches, and as exact as a row."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.any_models import any_model, texts
from helpers.sweeps import swept
from transformers import Phi3ForSequenceClassification

import labkit
from labkit.engine.engine import DecoderEngine, InjectedEngine
from labkit.engine.init_inference import engine_with_row
from labkit.engine.proof import KEPT, derive
from labkit.models.derived.head_linears import NotRecognised
from labkit.models.derived.row import DerivedRow
from labkit.models.derived.small_models import without_memory
from labkit.models.policies import policy_for
from labkit.statistics import kept_records

DERIVED = (
    *("arcee", "bart", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "emu3", "exaone4", "falcon"),
    *("jais2", "marian", "mbart", "mpt", "mvp", "nanochat", "nemotron", "olmo", "openai-gpt", "pegasus", "plbart"),
    *("trocr", "vaultgemma", "whisper"),
    *("cohere", "cohere2", "ernie4_5", "gemma", "gemma3_text", "glm", "glm4", "gpt_bigcode", "granite", "helium"),
    *("internlm3", "ministral", "olmo2", "olmo3", "phi", "phi3", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)


@pytest.mark.parametrize("name", swept(list(DERIVED), ["gemma3_text", "olmo2", "granite", "bart", "falcon"]))
def test_a_derived_row_gives_the_tokens_of_transformers(name: str) -> None:
    model = any_model(name, seed=3)
    engine = labkit.init_inference(model, dtype=torch.float32)
    assert isinstance(engine, DecoderEngine)
    assert engine.level == "derived row"
    assert torch.equal(texts(engine), texts(model))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("phi3", {"sliding_window": 5}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("starcoder2", {"use_bias": False}),
        ("stablelm", {"use_qkv_bias": True, "use_parallel_residual": True}),
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {"residual_multiplier": 0.2, "embedding_multiplier": 12.0, "logits_scaling": 8.0}),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 13}),
        ("smollm3", {"no_rope_layer_interval": 2}),
        ("glm4", {"attention_bias": True}),
        ("bart", {"scale_embedding": True}),
        ("falcon", {"multi_query": False, "bias": True}),
        ("falcon", {"parallel_attn": False}),
        ("nanochat", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("olmo", {"attention_bias": True}),
    ],
)
@pytest.mark.sweep
def test_switches_of_a_class_are_derived_too(name: str, changes: dict[str, Any]) -> None:
    model = any_model(name, **changes)
    engine = labkit.init_inference(model, dtype=torch.float32)
    assert isinstance(engine, DecoderEngine)
    assert torch.equal(texts(engine), texts(model))


def test_a_rotation_that_changes_with_every_length_of_the_text_gets_no_row() -> None:
    """Short texts, which a proof reads, do not show it."""
    model = any_model("olmo2", rope_parameters={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0})
    engine = labkit.init_inference(model, dtype=torch.float32)
    assert isinstance(engine, InjectedEngine)
    assert "changes with the length of the text" in engine.why
    assert torch.equal(texts(engine), texts(model))


@pytest.mark.sweep
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    "name", ["gemma3_text", "smollm3", "granite", "cohere", "bart", "blenderbot-small", "arcee", "mpt"]
)
def test_derived_rows_run_on_the_other_kernels(name: str, impl: str) -> None:
    model = any_model(name)
    engine = labkit.init_inference(model, dtype=torch.float32, impl=impl)
    assert engine.impl == impl
    assert torch.equal(texts(engine, new=3), texts(model, new=3))


def test_norms_over_all_heads_are_refused_where_kernels_lack_them() -> None:
    with pytest.raises(NotImplementedError, match=r"norms over all heads .* pass impl='cpp'"):
        labkit.init_inference(any_model("olmo2"), dtype=torch.float32, impl="triton")


def test_a_proof_is_kept_for_the_class_and_its_switches(tmp_path: Path) -> None:
    proofs: list[str] = []

    def counted(model: object, policy: object) -> object:
        proofs.append(type(model).__name__)
        return engine_with_row(model, policy)  # type: ignore[arg-type]

    assert derive(any_model("phi3"), counted, tmp_path).policy is not None
    first = len(proofs)
    assert derive(any_model("phi3", seed=5), counted, tmp_path).policy is not None
    assert len(proofs) == first > 0
    assert derive(any_model("phi3", sliding_window=5), counted, tmp_path).policy is not None
    assert len(proofs) == 2 * first
    assert (tmp_path / KEPT).exists()


def test_a_refusal_is_kept_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.engine.proof.refusal_of", lambda row, build: "its logits differ")
    assert derive(any_model("phi3"), engine_with_row, tmp_path).refusal == "its logits differ"
    monkeypatch.undo()
    assert derive(any_model("phi3"), engine_with_row, tmp_path).refusal == "its logits differ"


@pytest.mark.parametrize("name", swept(["granite", "gemma3_text", "starcoder2"], ["granite"]))
def test_a_folder_of_such_a_class_is_loaded_with_its_row(name: str, tmp_path: Path) -> None:
    model = any_model(name)
    model.save_pretrained(tmp_path)
    engine = labkit.init_inference(tmp_path, dtype=torch.float32)
    assert isinstance(engine, DecoderEngine)
    assert torch.equal(texts(engine), texts(model))


def test_a_folder_without_a_row_is_run_by_transformers(tmp_path: Path) -> None:
    model = any_model("phimoe")
    model.save_pretrained(tmp_path)
    engine = labkit.init_inference(tmp_path)
    assert (engine.level, engine.dtype) == ("hooks", torch.float32)
    assert torch.equal(texts(engine), texts(model))


def test_the_policy_of_a_class_that_no_row_describes_says_why() -> None:
    with pytest.raises(ValueError, match=r"'phimoe', from whose class no row can be derived \(a router that no row"):
        policy_for(any_model("phimoe").config)


def test_a_number_that_two_fields_explain_is_traced_to_one_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of them the model would be right, and with the other one wrong."""
    config = any_model("granite", embedding_multiplier=7.0, logits_scaling=7.0).config
    row = DerivedRow(config)
    other = copy.deepcopy(config)
    other.logits_scaling = 9.0
    fields = row.policy_for(without_memory(other)).read(other)
    assert (fields["embedding_scale"], fields["logit_scale"]) == (7.0, 1 / 9.0)
    monkeypatch.setattr(DerivedRow, "_decides", lambda row, name, number_in: False)
    with pytest.raises(NotRecognised, match="the number 7, which several of the config's numbers may be"):
        row.policy_for(without_memory(other))


def test_a_changed_model_runs_with_its_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kept_records, "cache_root", lambda: tmp_path)
    model = any_model("phi3")
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 2 * output)
    engine = labkit.init_inference(model, dtype=torch.float32)
    assert isinstance(engine, InjectedEngine)
    assert "has the forward hook" in engine.why
    assert torch.equal(texts(engine), texts(model))


def test_a_model_for_another_task_runs_with_hooks() -> None:
    config = any_model("phi3").config
    torch.manual_seed(0)
    model = Phi3ForSequenceClassification(config).eval()
    engine = labkit.init_inference(model, dtype=torch.float32)
    assert isinstance(engine, InjectedEngine)
    assert "no linear for the logits" in engine.why
    ids = torch.randint(3, 100, (1, 9))
    with torch.no_grad():
        assert torch.allclose(engine(ids).logits, model(ids).logits, atol=1e-4)


def test_a_model_outside_of_transformers_gets_no_row() -> None:
    model = any_model("phi3")

    class Mine(type(model)):  # type: ignore[misc]
        pass

    model.__class__ = Mine
    assert derive(model, engine_with_row).policy is None
