"""What a rank does by itself: it chooses its GPU and draws random numbers."""

from types import SimpleNamespace

import pytest
import torch
from helpers.models.small_models import small_model
from torch import Tensor

import labkit
from labkit.engine import build, resolve
from labkit.engine.options import read_options
from labkit.engine.parallel.ranks import draw_alike
from labkit.engine.plan import make_plan
from labkit.models.policies import model_config_of, policy_for
from labkit.models.shards import shard

GPUS = [torch.device("cuda", index) for index in range(2)]


def test_the_weights_of_a_rank_go_to_the_gpu_that_it_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script started by `labkit launch` takes its GPU when it joins the other ranks, not earlier."""
    model = small_model("gpt2")
    current = [GPUS[0]]

    def join(*_: object) -> SimpleNamespace:
        current[0] = GPUS[1]
        return SimpleNamespace(
            shard=shard(model_config_of(model.config), 2, 1),
            begin_call=lambda: None,
            fail_call=lambda reason: None,
            gather=lambda value: torch.stack([value, value]),
        )

    monkeypatch.setattr(build.gpu, "default_device", lambda: current[0])
    monkeypatch.setattr(resolve, "chosen_impl", lambda requested: "triton")
    monkeypatch.setattr(build, "join_ranks", join)
    options = read_options(None, {"tensor_parallel": {"tp_size": 2}})
    plan = make_plan(resolve.resolve(model, options, model.config, policy_for(model.config)))
    assert build.join(plan).device == GPUS[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_generator_of_the_device_is_shared_too(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (1, 2)]
    device_states: list[Tensor] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", device_states.append)
    previous, received = torch.get_rng_state(), iter(states)
    try:
        draw_alike(torch.device(device), lambda state: next(received))
        assert torch.equal(torch.get_rng_state(), states[0])
    finally:
        torch.set_rng_state(previous)
    assert [torch.equal(state, states[1]) for state in device_states] == [True] * (device == "cuda")


@pytest.mark.parametrize("consume", [False, True], ids=["", "consume"])
def test_a_model_without_a_row_in_another_type_is_kept_or_consumed_whole(consume: bool) -> None:
    model = small_model("gpt2")
    policy = {"GPT2Block": ("attn.c_proj", "mlp.c_proj")}
    engine = labkit.init_inference(model, dtype=torch.bfloat16, consume_model=consume, injection_policy=policy)
    assert {parameter.dtype for parameter in engine.parameters()} == {torch.bfloat16}
    assert all((parameter.numel() == 0) == consume for parameter in model.parameters())
    assert engine(torch.tensor([[1, 2]])).logits.isfinite().all()
