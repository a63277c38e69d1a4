"""ZeRO-Inference gets the settings that its parameters need; where it is installed, its tokens equal vanilla's."""

import os
from pathlib import Path

import pytest
import torch
from helpers.sweeps import sweep
from torch.utils.file_baton import FileBaton

from labkit.harness.compare.compare import compare_with_each, comparison_case
from labkit.harness.compare.peers import deepspeed
from labkit.harness.compare.peers.deepspeed import DEEPSPEED_ZERO, DeepSpeed, remove_abandoned_locks, zero_settings
from labkit.harness.compare.plan import Schedule
from labkit.weights.resolve import resolve
from labkit.weights.source import hf_shapes

MISSING = DeepSpeed().unavailable()
pytestmark = pytest.mark.timeout(900)  # DeepSpeed compiles its operators on first use


def test_a_buffer_holds_the_largest_tensor(tmp_path: Path) -> None:
    source = resolve("tiny-llama")
    settings = zero_settings(source, torch.bfloat16, tmp_path)
    param = settings["zero_optimization"]["offload_param"]
    assert param["buffer_size"] == max(torch.Size(shape).numel() for shape in hf_shapes(source.hf_config).values())
    assert param["nvme_path"] == str(tmp_path)
    assert settings["bf16"] == {"enabled": True}


def test_without_libaio_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deepspeed, "compiler", lambda: ("false",))
    with pytest.raises(ValueError, match="apt-get install libaio-dev"):
        DeepSpeed().install(None, tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_no_process_has_open_is_removed(tmp_path: Path) -> None:
    """A killed compilation leaves a lock, and torch would wait for it forever."""
    held_lock, abandoned = FileBaton(str(tmp_path / "mine" / "lock")), FileBaton(str(tmp_path / "left" / "lock"))
    for baton in (held_lock, abandoned):
        Path(baton.lock_file_path).parent.mkdir()
        assert baton.try_acquire()
    assert abandoned.fd is not None
    os.close(abandoned.fd)
    remove_abandoned_locks(tmp_path)
    assert Path(held_lock.lock_file_path).exists()
    assert not Path(abandoned.lock_file_path).exists()
    held_lock.release()


@sweep  # takes a minute, or several if it compiles
@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
def test_tokens_are_those_of_vanilla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    case = comparison_case(model="gpt2", dtype="float32", batch=2, prompt=9, new=3, threads=1)
    (record,) = compare_with_each((DEEPSPEED_ZERO,), "hf-eager", case, Schedule(rounds=2, stages=False))
    assert record.tokens_equal
