"""Every rung of the ladder generates what vanilla generates."""

from importlib.util import find_spec

import pytest
import torch

from labkit.engine import baselines
from labkit.engine.baselines import BASELINES, Baseline, baseline
from labkit.kernels.build import unavailable
from labkit.presets import resolve

PROMPT = torch.arange(40, 49).repeat(2, 1)
PROMPT[1] += 17
ARGS = {"attention_mask": torch.ones_like(PROMPT), "do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}


def rung(name: str, model: str, dtype: torch.dtype = torch.float32) -> Baseline:
    if name == "accelerate" and find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    if name == "hf-gemm" and (reason := unavailable()):
        pytest.skip(reason)
    return baseline(name, resolve(model), dtype, threads=1)


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-llama"])
@pytest.mark.parametrize("name", sorted(set(BASELINES) - {"hf-eager", "hf-compile"}))
def test_tokens_are_those_of_vanilla(name: str, model: str) -> None:
    vanilla = rung("hf-eager", model).generate(PROMPT, **ARGS)
    assert torch.equal(rung(name, model).generate(PROMPT, **ARGS), vanilla)


@pytest.mark.slow
def test_compiled_tokens_are_those_of_vanilla() -> None:
    vanilla = rung("hf-eager", "tiny-llama").generate(PROMPT, **ARGS)
    assert torch.equal(rung("hf-compile", "tiny-llama").generate(PROMPT, **ARGS), vanilla)


def test_every_rung_says_what_computes() -> None:
    assert "sdpa" in rung("hf-eager", "tiny-gpt2").impl
    assert "labkit" in rung("fused", "tiny-gpt2").impl


def test_the_steps_of_hf_gemm_use_the_engines_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 layers of 4 linears and the head make 9 calls per step; of the prompt only the head sees few rows."""
    side = rung("hf-gemm", "tiny-gpt2")
    calls: list[int] = []
    own = baselines.gemm

    def counted(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(len(x))
        return own(x, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(baselines, "gemm", counted)
    prompt = torch.arange(70)[None]
    side.generate(
        prompt, **ARGS | {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4, "min_new_tokens": 4}
    )
    in_steps = [rows for rows in calls if rows == 1]
    assert len(in_steps) == 3 * 9 + 1


@pytest.mark.parametrize("name", ["hf-eager", "hf-gemm", "fused"])
def test_stages_are_told_apart_on_request(name: str) -> None:
    side = rung(name, "tiny-llama")
    if "reference" in side.impl:
        pytest.skip("the reference implementation keeps no stage times")
    stages = side.stage_times(lambda: side.generate(PROMPT, **ARGS))
    assert {"qkv", "attention", "attn_out", "mlp", "mlp_out", "lm_head"} <= {str(time.stage) for time in stages}


def test_an_unknown_rung_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="expected one of hf-eager"):
        rung("hf-lazy", "tiny-gpt2")
