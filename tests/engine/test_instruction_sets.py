"""The whole engine on kernels built for each instruction set."""

import pytest
import torch
from helpers.models.engines import error, greedy, prompt, vanilla

import labkit


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_kernels_that_run_everywhere_give_vanillas_logits_and_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_ISA", "portable")
    engine, ids = labkit.init_inference(vanilla(name), impl="cpp"), prompt(3, 13)
    assert "portable" in engine.module.runner.fast.step.library._name
    with torch.no_grad():
        assert error(engine(ids).logits, vanilla(name)(ids).logits) <= 1e-4
    assert torch.equal(greedy(engine, ids, 20), greedy(vanilla(name), ids, 20))


@pytest.mark.usefixtures("isa", "poisoned")
@pytest.mark.parametrize("name", ["gpt2-untied", "gptj", "gpt-neo", "bloom", "opt-post-norm", "llama", "qwen3-biased"])
def test_logits_and_tokens_equal_vanilla(name: str) -> None:
    engine, ids = labkit.init_inference(vanilla(name), impl="cpp"), prompt(3, 13)
    with torch.no_grad():
        assert error(engine(ids).logits, vanilla(name)(ids).logits) <= 1e-4
    assert torch.equal(greedy(engine, ids, 20), greedy(vanilla(name), ids, 20))


@pytest.mark.usefixtures("isa", "poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sixteen_bit_logits_are_near_vanilla(name: str, dtype: torch.dtype) -> None:
    engine, ids = labkit.init_inference(vanilla(name), impl="cpp", dtype=dtype), prompt(3, 13)
    with torch.no_grad():
        expected = vanilla(name)(ids).logits
    assert error(engine(ids).logits, expected) <= {torch.bfloat16: 0.1, torch.float16: 0.01}[dtype]


@pytest.mark.usefixtures("isa")
def test_one_call_and_single_ops_use_the_same_kernels(isa: str) -> None:
    engine, ids = labkit.init_inference(vanilla("llama"), impl="cpp"), prompt(2, 9)
    assert isa in engine.module.runner.fast.step.library._name
    with engine.module.runner.stage_by_stage():
        staged = engine(ids).logits
    assert error(staged, engine(ids).logits) <= 1e-5
