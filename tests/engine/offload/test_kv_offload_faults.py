"""What can go wrong with keys and values on a disk is said by name, and costs no token that was there before."""

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
from engines import fused, greedy, prompt, vanilla
from offloaded import READ, WRITE, able_only_to, descriptors, kv_on_disk, kv_stream_of
from torch import Tensor

import labkit
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.offload import cache_folder
from labkit.kernels.cache_stream import file as cache_file


def go_on(engine: Any, cache: KVCache, tokens: Tensor) -> Tensor:
    logits: Tensor = engine(tokens, past_key_values=cache).logits
    return logits


def failing(code: int) -> Callable[..., Any]:
    def fails(*given: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fails


@pytest.mark.parametrize("staged", [False, True], ids=["one-call", "staged"])
@pytest.mark.parametrize(("can", "said"), [(WRITE, "read"), (READ, "written")], ids=["reads", "writes"])
def test_a_disk_that_fails_is_named_and_no_token_is_lost(can: int, said: str, staged: bool, tmp_path: Path) -> None:
    """The cache is as it was before the step that failed. Once the disk is whole, the text goes on as in memory.

    What could not be written stays in its slot meanwhile, and a change of the cache waits for it, too.
    """
    engine, resident = kv_on_disk(vanilla("llama"), tmp_path), fused("llama")
    mine, theirs = (each(prompt(2, 9)).past_key_values for each in (engine, resident))
    words = rf"keys and values of layer \d, which .* {tmp_path}, can't be {said} at byte \d+: Bad file .* \(EBADF\)"
    for size in (1, 2, 5):
        step = prompt(2, size, seed=size)
        with able_only_to(can, tmp_path):
            for _ in range(2):
                runs = engine.module.runner.stage_by_stage() if staged else nullcontext()
                with runs, pytest.raises(RuntimeError, match=words):
                    go_on(engine, mine, step)
                assert mine.length == theirs.length
            with pytest.raises(RuntimeError, match="Bad file descriptor"):
                mine.reorder_cache(torch.tensor([1, 0]))
        twin = copy.deepcopy(mine)
        want = go_on(resident, theirs, step)
        assert torch.equal(go_on(engine, mine, step), want)
        assert torch.equal(go_on(engine, twin, step), want)


def test_a_file_that_is_cut_short_is_named_and_the_engine_goes_on_with_others(tmp_path: Path) -> None:
    engine = kv_on_disk(vanilla("gpt2"), tmp_path)
    cache = engine(prompt(1, 5)).past_key_values
    kv_stream_of(cache).flush()
    descriptor = os.open(f"/proc/self/fd/{descriptors(tmp_path)[0]}", os.O_RDWR)
    os.ftruncate(descriptor, 0)
    with pytest.raises(RuntimeError, match=r"keys and values of layer \d, .*, are missing from byte \d+ on: .* anew"):
        go_on(engine, cache, prompt(1, 1))
    os.close(descriptor)
    assert torch.equal(greedy(engine, prompt(1, 5), 4), greedy(fused("gpt2"), prompt(1, 5), 4))


@pytest.mark.parametrize("full", ["seen", "met"])
def test_too_little_room_is_said_before_anything_is_computed(
    full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a new cache, and for one that grows, which goes on once there is room."""
    engine, resident = kv_on_disk(vanilla("llama"), tmp_path), fused("llama")
    mine, theirs = (each(prompt(1, 9)).past_key_values for each in (engine, resident))
    step = prompt(1, mine.capacity - 8, seed=1)
    if full == "seen":
        usage = cache_file.shutil._ntuple_diskusage(10, 10, 0)  # type: ignore[attr-defined]
        monkeypatch.setattr(cache_file.shutil, "disk_usage", lambda path: usage)
    else:
        monkeypatch.setattr(cache_file.os, "posix_fallocate", failing(errno.ENOSPC))
    words = rf"kv_offload: {tmp_path} has .* GB free, and keys and values of 1 x \d+ tokens take .* \(No sp"
    for cache in (None, mine):
        with pytest.raises(ValueError, match=words):
            engine(step, past_key_values=cache)
    monkeypatch.undo()
    assert mine.length == 9
    assert torch.equal(go_on(engine, mine, step), go_on(resident, theirs, step))


def test_a_cache_whose_copy_fails_half_way_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, resident = kv_on_disk(vanilla("llama"), tmp_path), fused("llama")
    mine, theirs = (each(prompt(2, 9)).past_key_values for each in (engine, resident))
    write, left = os.pwritev, [2]

    def breaking(*given: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*given)

    monkeypatch.setattr(cache_file.os, "pwritev", breaking)
    with pytest.raises(RuntimeError, match=rf"layer 2 can't be copied in {tmp_path}: Input/output error; see whether"):
        mine.batch_select_indices(torch.tensor([1]))
    monkeypatch.undo()
    assert torch.equal(go_on(engine, mine, prompt(2, 1)), go_on(resident, theirs, prompt(2, 1)))


def test_a_file_system_that_refuses_direct_access_is_used_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = kv_on_disk(vanilla("gpt2"), tmp_path)
    for refused in (False, True):
        if refused:
            monkeypatch.setattr(cache_file.fcntl, "fcntl", lambda file, what, *flags: _without_direct(what, flags))
        cache = greedy(engine, prompt(2, 5), 6, return_dict_in_generate=True)
        assert kv_stream_of(cache.past_key_values).direct != refused
        cache.past_key_values.reorder_cache(torch.tensor([0, 1]))
        assert torch.equal(cache.sequences, greedy(fused("gpt2"), prompt(2, 5), 6))


def _without_direct(what: int, flags: tuple[int, ...]) -> int:
    if what == fcntl.F_SETFL:
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
    where = {"path": tmp_path}
    with pytest.raises(ValueError, match=r"kv_offload needs the C\+\+ or Triton kernels, got impl='reference'; leave"):
        labkit.init_inference(vanilla("gpt2"), kv_offload=where, impl="reference")
    with pytest.raises(ValueError, match="kv_offload needs kernels, and there are none for GPT2LMHeadModel; leave"):
        labkit.init_inference(vanilla("gpt2"), kv_offload=where, injection_policy={"GPT2Block": ("attn.c_proj",)})


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/labkit")):
        with pytest.raises(ValueError, match=rf"kv_offload: {path} can't be written \(.*\); name another folder as"):
            labkit.init_inference(vanilla("gpt2"), kv_offload={"path": path})


def test_memory_is_never_taken_for_a_disk_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that somebody names is used, and said to be memory; by default it is none."""
    monkeypatch.setattr(cache_folder, "cache_root", lambda: tmp_path)
    labkit.init_inference(vanilla("gpt2"), kv_offload={})
    assert (tmp_path / "kv").is_dir()
    assert not caplog.records
    monkeypatch.setattr(cache_folder, "_file_system", lambda folder: "tmpfs")
    with pytest.raises(ValueError, match=rf"kv_offload: {tmp_path}/kv is a tmpfs, which is memory itself; name a fol"):
        labkit.init_inference(vanilla("gpt2"), kv_offload={})
    kv_on_disk(vanilla("gpt2"), tmp_path)
    assert f"kv_offload: {tmp_path} is a tmpfs, which is memory itself" in caplog.text


def test_the_kind_of_a_file_system_is_that_of_the_deepest_mount() -> None:
    assert cache_folder._file_system(Path("/proc/self")) == "proc"
    assert cache_folder._file_system(Path("/")) != "proc"
