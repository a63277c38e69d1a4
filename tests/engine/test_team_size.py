"""A step uses at most as many threads as the process may use processors, for every setting of PyTorch."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.small_models import small_model

import labkit
from labkit.engine import team_size
from labkit.harness.compare.compare import comparison_case
from labkit.harness.regions.case import layer_case
from labkit.kernels import DecodeStep
from labkit.system import processors


@pytest.fixture
def one_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allows one processor, and gives PyTorch eight threads."""
    for name in processors.BINDINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(team_size, "_usable", team_size._usable)  # restores the value after the test
    monkeypatch.setattr(team_size, "_asked_again_at", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_processor")
def test_threads_are_no_more_than_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    run = DecodeStep.run

    def record_and_run(step: DecodeStep, *args: Any, **settings: Any) -> None:
        threads.append(settings["threads"])
        run(step, *args, **settings)

    monkeypatch.setattr(DecodeStep, "run", record_and_run)
    model = small_model("gpt2")
    engine = labkit.init_inference(model, dtype=torch.float32)
    ids = torch.arange(5, 12).view(1, -1)
    assert torch.equal(engine.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))
    assert set(threads) == {1}


def test_fewer_threads_of_pytorch_stay_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_size, "_usable", 64)
    monkeypatch.setattr(team_size, "_asked_again_at", math.inf)
    assert team_size.team_size() == torch.get_num_threads()


@pytest.mark.usefixtures("one_processor")
def test_the_system_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(team_size, "monotonic", lambda: now[0])
    assert team_size.team_size() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert team_size.team_size() == 1
    now[0] += team_size.RECHECK_S
    assert team_size.team_size() == 2


@pytest.mark.usefixtures("one_processor")
def test_what_is_compared_with_the_engine_takes_its_threads() -> None:
    size: dict[str, Any] = {"model": "gpt2", "dtype": "float32", "batch": 1, "prompt": 4, "new": 4}
    assert comparison_case(**size).threads == 1
    assert layer_case("gpt2", layers=1).threads == 1


def test_only_this_module_asks_pytorch_for_the_threads_of_a_step() -> None:
    """The doctor reports PyTorch's own number, too."""
    folder = Path(labkit.__file__).parent
    asking = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if not path.is_relative_to(folder / "kernels") and "get_num_threads" in path.read_text()
    }
    assert asking == {"engine/team_size.py", "nsys/doctor/inventory.py"}
