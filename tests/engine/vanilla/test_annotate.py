"""Stage annotations of vanilla models cover every policy row, cover all the time, and change no result."""

from collections import Counter
from time import perf_counter

import pytest
import torch
from helpers.models.small_models import SMALL_CONFIGS, VOCAB, small_model

from labkit.engine.vanilla.annotate import annotate
from labkit.models.policies import policy_for
from labkit.stages import Phase, Stage

LAYER_STAGES = {Stage.QKV, Stage.ATTENTION, Stage.ATTN_OUT, Stage.MLP, Stage.MLP_OUT, Stage.RESIDUAL}
PROMPT = torch.arange(1, 10)[None] % VOCAB
ARGS = {"do_sample": False, "min_new_tokens": 4, "max_new_tokens": 4, "attention_mask": torch.ones_like(PROMPT)}


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_every_layer_has_every_stage_once_per_forward(name: str) -> None:
    model = small_model(name)
    policy = policy_for(model.config)
    with annotate(model, policy) as clock:
        model.generate(PROMPT, **ARGS)
    times = clock.stage_times()
    expected = LAYER_STAGES | ({Stage.ROUTE, Stage.EXPERTS} if policy.router else set())
    if policy.router and not policy.shared_ff2:
        expected -= {Stage.MLP, Stage.MLP_OUT}
    for phase, forwards in ((Phase.PREFILL, 1), (Phase.DECODE, 3)):
        phase_times = [entry for entry in times if entry.phase == phase]
        layers = {entry.layer for entry in phase_times} - {None}
        assert layers == set(range(model.config.num_hidden_layers))
        for layer in layers:
            calls = {entry.stage: entry.calls for entry in phase_times if entry.layer == layer}
            assert calls == dict.fromkeys(expected, forwards)
        outside = Counter({entry.stage: entry.calls for entry in phase_times if entry.layer is None})
        assert outside == {Stage.EMBED: forwards, Stage.LM_HEAD: forwards, Stage.SAMPLE: forwards}


def test_the_stages_add_up_to_the_call() -> None:
    """Never to more than the call, and to most of it if no other program runs between two stages."""
    model = small_model("gpt2")
    shares = []
    for _ in range(8):
        with annotate(model, policy_for(model.config)) as clock:
            start = perf_counter()
            model.generate(PROMPT, **ARGS)
            elapsed_ms = (perf_counter() - start) * 1e3
        shares.append(sum(entry.total_ms for entry in clock.stage_times()) / elapsed_ms)
    assert 0.5 < max(shares) <= 1.05


def test_the_model_computes_what_it_did_and_keeps_no_hook() -> None:
    model = small_model("llama")
    expected = model.generate(PROMPT, **ARGS)
    with annotate(model, policy_for(model.config)) as clock:
        annotated = model.generate(PROMPT, **ARGS)
    entries = len(clock.stage_times())
    afterwards = model.generate(PROMPT, **ARGS)
    assert torch.equal(expected, annotated)
    assert torch.equal(expected, afterwards)
    assert len(clock.stage_times()) == entries
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_profiler_sees_the_names_that_the_engine_uses() -> None:
    model = small_model("gpt2")
    with torch.profiler.profile() as profiler, annotate(model, policy_for(model.config)):
        model.generate(PROMPT, **ARGS)
    names = {event.key for event in profiler.key_averages()}
    assert {"prefill/embed", "prefill/layer.0/qkv", "decode/layer.2/attention", "decode/lm_head"} <= names
