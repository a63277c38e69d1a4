"""Faults of an offloaded KV cache on the disk are named, and lose no earlier token."""

import copy
import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.engines import fused, greedy, prompt, vanilla
from helpers.models.offloaded import READ, WRITE, able_only_to, descriptors, kv_on_disk, kv_stream_of
from torch import Tensor

import labkit
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.offload import cache_folder
from labkit.kernels.cache_stream import file as cache_file


def logits_of(engine: Any, cache: KVCache, tokens: Tensor) -> Tensor:
    logits: Tensor = engine(tokens, past_key_values=cache).logits
    return logits


def failing(code: int) -> Callable[..., Any]:
    def fails(*arguments: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fails


@pytest.mark.parametrize("staged", [False, True], ids=["one-call", "staged"])
@pytest.mark.parametrize(("can", "verb"), [(WRITE, "read"), (READ, "written")], ids=["reads", "writes"])
def test_a_disk_that_fails_is_named_and_no_token_is_lost(can: int, verb: str, staged: bool, tmp_path: Path) -> None:
    """The failed step leaves the cache unchanged. After the disk is repaired, the text continues as in memory.

    Data that could not be written stays in its slot, and a change of the cache waits for the write, too.
    """
    engine, resident = kv_on_disk(vanilla("llama"), tmp_path), fused("llama")
    disk_cache, memory_cache = (side(prompt(2, 9)).past_key_values for side in (engine, resident))
    words = rf"keys and values of layer \d, which .* {tmp_path}, can't be {verb} at byte \d+: Bad file .* \(EBADF\)"
    for size in (1, 2, 5):
        step = prompt(2, size, seed=size)
        with able_only_to(can, tmp_path):
            for _ in range(2):
                runs = engine.module.runner.stage_by_stage() if staged else nullcontext()
                with runs, pytest.raises(RuntimeError, match=words):
                    logits_of(engine, disk_cache, step)
                assert disk_cache.length == memory_cache.length
            with pytest.raises(RuntimeError, match="Bad file descriptor"):
                disk_cache.reorder_cache(torch.tensor([1, 0]))
        twin = copy.deepcopy(disk_cache)
        expected = logits_of(resident, memory_cache, step)
        assert torch.equal(logits_of(engine, disk_cache, step), expected)
        assert torch.equal(logits_of(engine, twin, step), expected)


def test_a_file_that_is_cut_short_is_named_and_the_engine_goes_on_with_others(tmp_path: Path) -> None:
    engine = kv_on_disk(vanilla("gpt2"), tmp_path)
    cache = engine(prompt(1, 5)).past_key_values
    kv_stream_of(cache).flush()
    descriptor = os.open(f"/proc/self/fd/{descriptors(tmp_path)[0]}", os.O_RDWR)
    os.ftruncate(descriptor, 0)
    with pytest.raises(RuntimeError, match=r"keys and values of layer \d, .*, are missing from byte \d+ on: .* anew"):
        logits_of(engine, cache, prompt(1, 1))
    os.close(descriptor)
    assert torch.equal(greedy(engine, prompt(1, 5), 4), greedy(fused("gpt2"), prompt(1, 5), 4))


@pytest.mark.parametrize("detected", ["seen", "met"])
def test_too_little_room_is_said_before_anything_is_computed(
    detected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a new cache, and for a growing one, which works again once there is room."""
    engine, resident = kv_on_disk(vanilla("llama"), tmp_path), fused("llama")
    disk_cache, memory_cache = (side(prompt(1, 9)).past_key_values for side in (engine, resident))
    step = prompt(1, disk_cache.capacity - 8, seed=1)
    if detected == "seen":
        usage = cache_file.shutil._ntuple_diskusage(10, 10, 0)  # type: ignore[attr-defined]
        monkeypatch.setattr(cache_file.shutil, "disk_usage", lambda path: usage)
    else:
        monkeypatch.setattr(cache_file.os, "posix_fallocate", failing(errno.ENOSPC))
    words = rf"kv_offload: {tmp_path} has .* GB free, and keys and values of 1 x \d+ tokens take .* \(No sp"
    for cache in (None, disk_cache):
        with pytest.raises(ValueError, match=words):
            engine(step, past_key_values=cache)
    monkeypatch.undo()
    assert disk_cache.length == 9
    assert torch.equal(logits_of(engine, disk_cache, step), logits_of(resident, memory_cache, step))


def test_a_cause_that_is_no_lack_of_room_is_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = kv_on_disk(vanilla("llama"), tmp_path)
    for code, words in (
        (errno.EFBIG, r"File too large; raise the limit of a file's size \(ulimit -f\)"),
        (errno.EIO, "Input"),
    ):
        monkeypatch.setattr(cache_file.os, "posix_fallocate", failing(code))
        with pytest.raises(ValueError, match=words) as refused:
            engine(prompt(1, 9))
        assert "free" not in str(refused.value)
        assert str(tmp_path) in str(refused.value)


def test_a_cache_whose_copy_fails_half_way_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, resident = kv_on_disk(vanilla("llama"), tmp_path), fused("llama")
    disk_cache, memory_cache = (side(prompt(2, 9)).past_key_values for side in (engine, resident))
    write, remaining = os.pwritev, [2]

    def write_or_fail(*arguments: Any) -> int:
        remaining[0] -= 1
        if remaining[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*arguments)

    monkeypatch.setattr(cache_file.os, "pwritev", write_or_fail)
    with pytest.raises(RuntimeError, match=rf"layer 2 can't be copied in {tmp_path}: Input/output error; see whether"):
        disk_cache.batch_select_indices(torch.tensor([1]))
    monkeypatch.undo()
    assert torch.equal(logits_of(engine, disk_cache, prompt(2, 1)), logits_of(resident, memory_cache, prompt(2, 1)))


def test_a_file_system_that_refuses_direct_access_is_used_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = kv_on_disk(vanilla("gpt2"), tmp_path)
    for refused in (False, True):
        if refused:
            monkeypatch.setattr(
                cache_file.fcntl, "fcntl", lambda file, command, *flags: _without_direct(command, flags)
            )
        output = greedy(engine, prompt(2, 5), 6, return_dict_in_generate=True)
        assert kv_stream_of(output.past_key_values).direct != refused
        output.past_key_values.reorder_cache(torch.tensor([0, 1]))
        assert torch.equal(output.sequences, greedy(fused("gpt2"), prompt(2, 5), 6))


def _without_direct(command: int, flags: tuple[int, ...]) -> int:
    if command == fcntl.F_SETFL:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.O_RDWR


@pytest.mark.parametrize(
    ("kv_offload", "words"),
    [
        ({"slots": 1}, r"kv_offload.slots: .* expected at least 2"),
        ({"device": "nvme"}, "kv_offload.device: .*'disk'"),
        (
            {"device": "cpu"},
            "kv_offload: got device='cpu' without a GPU: the keys and values are in CPU memory",
        ),
        ({"paht": "x"}, "kv_offload.paht: .*"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(kv_offload: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        labkit.init_inference(vanilla("gpt2"), kv_offload=kv_offload)


def test_what_has_no_cache_of_its_own_here_is_refused(tmp_path: Path) -> None:
    kv_offload = {"path": tmp_path}
    with pytest.raises(ValueError, match=r"kv_offload needs the C\+\+ or Triton kernels, got impl='reference'; leave"):
        labkit.init_inference(vanilla("gpt2"), kv_offload=kv_offload, impl="reference")
    with pytest.raises(ValueError, match="kv_offload needs a row, and GPT2LMHeadModel has none with an inj"):
        labkit.init_inference(vanilla("gpt2"), kv_offload=kv_offload, injection_policy={"GPT2Block": ("attn.c_proj",)})


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/labkit")):
        with pytest.raises(ValueError, match=rf"kv_offload: {path} can't be written \(.*\); name another folder as"):
            labkit.init_inference(vanilla("gpt2"), kv_offload={"path": path})


def test_memory_is_never_taken_for_a_disk_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that the user names is used, with a warning that it is memory; the default folder is refused."""
    monkeypatch.setattr(cache_folder, "cache_root", lambda: tmp_path)
    labkit.init_inference(vanilla("gpt2"), kv_offload={})
    assert (tmp_path / "kv").is_dir()
    assert not [record for record in caplog.records if record.name.startswith("labkit")]
    monkeypatch.setattr(cache_folder, "_file_system", lambda folder: "tmpfs")
    with pytest.raises(ValueError, match=rf"kv_offload: {tmp_path}/kv is a tmpfs, which is memory itself; name a fol"):
        labkit.init_inference(vanilla("gpt2"), kv_offload={})
    kv_on_disk(vanilla("gpt2"), tmp_path)
    assert f"kv_offload: {tmp_path} is a tmpfs, which is memory itself" in caplog.text


def test_the_kind_of_a_file_system_is_that_of_the_deepest_mount() -> None:
    assert cache_folder._file_system(Path("/proc/self")) == "proc"
    assert cache_folder._file_system(Path("/")) != "proc"
