"""Every rung of the ladder generates the tokens of vanilla."""

from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from helpers.models.small_models import small_model
from helpers.sweeps import swept

from labkit.engine.injected import modules
from labkit.harness.compare import vanilla_sides
from labkit.harness.compare.loaded_side import LoadedSide, comparison_device
from labkit.harness.compare.loader import check_side, load_side
from labkit.harness.compare.sides import IN_PROCESS
from labkit.harness.stored_weights import StoredWeights
from labkit.kernels import gpu
from labkit.kernels.build import unavailable
from labkit.system.errors import UserError
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

PROMPT = torch.arange(40, 49).repeat(2, 1)
PROMPT[1] += 17
ARGS = {"attention_mask": torch.ones_like(PROMPT), "do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
QUANTISED = {"fused-int4", "fused-int4-64", "fused-int4-128", "fused-stored"}
EXACT = sorted(set(IN_PROCESS) - {"hf-eager", "hf-compile", *QUANTISED})


def rung(name: str, model: str, dtype: torch.dtype = torch.float32) -> LoadedSide:
    if name == "accelerate" and find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    if name == "hf-gemm" and (torch.cuda.is_available() or unavailable()):
        pytest.skip(unavailable() or "runs on CPUs only")
    if name == "hf-graph" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return load_side(name, resolve(model), dtype, threads=1)


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-llama"])
@pytest.mark.parametrize("name", EXACT)
def test_tokens_are_those_of_vanilla(name: str, model: str) -> None:
    vanilla = rung("hf-eager", model).generate(PROMPT, **ARGS)
    assert torch.equal(rung(name, model).generate(PROMPT, **ARGS), vanilla)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("fused-int8", "int8"),
        ("fused-int4", "int4-32"),
        ("fused-int4-64", "int4-row"),
        ("fused:int8-32-asymmetric+head", "int8-32-asymmetric"),
    ],
)
def test_a_side_with_codes_says_how_they_are_stored(name: str, stored: str) -> None:
    """Most matrices of tiny-gpt2 have 64 inputs, so that a group of 64 is a row."""
    side = rung(name, "tiny-gpt2")
    assert isinstance(side.weights, StoredWeights)
    assert (side.weights.name, side.weights.head) == (stored, stored)
    assert f"{stored} weights" in side.impl


def test_codes_are_kept_only_where_there_are_some() -> None:
    with pytest.raises(UserError, match="got tiny-gpt2 for 'fused-stored', expected a model whose file holds codes"):
        rung("fused-stored", "tiny-gpt2")


@pytest.mark.parametrize("backend", swept(["eager", "inductor"], []))
def test_compiled_tokens_are_those_of_vanilla(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With backend "eager" the model is traced as for PyTorch's slow compiler, and then run op by op."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    vanilla = rung("hf-eager", "tiny-llama").generate(PROMPT, **ARGS)
    assert torch.equal(rung("hf-compile", "tiny-llama").generate(PROMPT, **ARGS), vanilla)


def test_a_rung_says_what_computes() -> None:
    assert "sdpa" in rung("hf-eager", "tiny-gpt2").impl
    assert "labkit" in rung("fused", "tiny-gpt2").impl


def test_the_steps_of_hf_gemm_use_the_engines_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 layers of 4 linears and the head make 9 calls per step; in the prompt only the head has one row."""
    side = rung("hf-gemm", "tiny-gpt2")
    calls: list[int] = []
    original = modules.gemm

    def counted(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(len(x))
        return original(x, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(modules, "gemm", counted)
    prompt = torch.arange(70)[None]
    side.generate(
        prompt, **ARGS | {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4, "min_new_tokens": 4}
    )
    in_steps = [rows for rows in calls if rows == 1]
    assert len(in_steps) == 3 * 9 + 1


@pytest.mark.parametrize("name", ["hf-eager", "hf-gemm", "hf-static", "fused"])
def test_stages_are_told_apart_on_request(name: str) -> None:
    side = rung(name, "tiny-llama")
    if any(impl in side.impl for impl in ("reference", "triton")) or side.device.type != "cpu":
        pytest.skip("only the C++ step, and hooks on a CPU, keep stage times")
    stages = side.stage_times(lambda: side.generate(PROMPT, **ARGS))
    assert {"qkv", "attention", "attn_out", "mlp", "mlp_out", "lm_head"} <= {str(time.stage) for time in stages}


def test_launch_times_are_no_stage_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another device the CPU's clock sees only launches; the stages are still announced to profilers."""
    runs: list[str] = []
    clock = SimpleNamespace(stage_times=lambda: ["launches"])
    monkeypatch.setattr(vanilla_sides, "annotate", lambda model, policy: nullcontext(clock))
    source = resolve("tiny-gpt2")
    model = source.hf_model(torch.float32)
    for device, stages in (("cpu", ["launches"]), ("meta", [])):
        side = vanilla_sides.vanilla("hf-eager", "eager", source, model.to(device))
        assert side.stage_times(lambda device=device: runs.append(device)) == stages  # type: ignore[misc]
    assert runs == ["cpu", "meta"]


def test_a_side_without_stages_makes_the_call_all_the_same() -> None:
    """`labkit profile` captures that call."""
    runs: list[int] = []
    assert LoadedSide("any", "any", torch.float32, None, None).stage_times(lambda: runs.append(1)) == []
    assert runs == [1]


@pytest.mark.parametrize("model", ["tiny-gptj", "tiny-bloom"])
def test_tokens_on_a_static_cache_are_those_of_vanilla(model: str) -> None:
    vanilla = rung("hf-eager", model).generate(PROMPT, **ARGS)
    assert torch.equal(rung("hf-static", model).generate(PROMPT, **ARGS), vanilla)


def test_a_model_without_a_static_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSource, "hf_model", lambda source, dtype: small_model("gpt-neo"))
    with pytest.raises(ValueError, match="expected a model that transformers can run on a static cache"):
        rung("hf-static", "tiny-gpt2")


@pytest.mark.parametrize("name", ["hf-eager", "hf-static", "accelerate"])
def test_every_side_runs_on_the_device_of_the_comparison(name: str) -> None:
    assert rung(name, "tiny-gpt2").device == comparison_device()


def test_tensors_follow_the_model() -> None:
    """The meta device, which has no memory, takes the place of a GPU."""
    inputs: dict[str, torch.Tensor] = {}

    class MetaModel:
        device = torch.device("meta")

        def generate(self, input_ids: torch.Tensor, **kwargs: torch.Tensor) -> None:
            inputs.update(input_ids=input_ids, **kwargs)

    LoadedSide("meta", "none", torch.float32, MetaModel(), None).generate(PROMPT, attention_mask=PROMPT, new=3)
    assert inputs["new"] == 3
    assert inputs["input_ids"].is_meta
    assert inputs["attention_mask"].is_meta


@pytest.mark.parametrize(
    ("name", "on_gpu", "message"),
    [
        ("hf-graph", False, "'hf-graph' got no GPU, expected an NVIDIA GPU and .* use hf-static"),
        ("hf-gemm", True, "hf-gemm is a side on CPUs only, and there is a GPU; use hf-graph or hide the GPU"),
        ("fused-int8", True, "'fused-int8' would not run on the GPU, where the others do: no triton"),
    ],
)
def test_a_rung_of_another_device_is_refused(
    name: str, on_gpu: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(gpu, "unavailable", lambda: "no triton")
    with pytest.raises(ValueError, match=message):
        check_side(name, dtype="float32", batch=1)


def test_an_unknown_rung_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="expected one of hf-eager"):
        rung("hf-lazy", "tiny-gpt2")
