"""What can go wrong with a model that is streamed is said by name, and never becomes garbage."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import fused, greedy, prompt, vanilla
from offloaded import LEAST, least_gb, reader_of, stream_of, streamed
from small_models import small_model
from sweeps import sweep

import labkit
from labkit.engine.offload import prepared
from labkit.kernels import layer_stream
from labkit.kernels.layer_stream import LayerStream
from labkit.weights.checkpoint import tensor_writer
from labkit.weights.checkpoint.manifest import MANIFEST


def packed(folder: Path) -> Path:
    """The only file of weights there."""
    (found,) = folder.glob("*/*.safetensors")
    return found


def change(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 0xFF]))


def test_a_file_that_is_altered_under_a_running_engine_is_noticed(tmp_path: Path) -> None:
    """Its digest says so: the step gives an error and no tokens. Once the file is whole again, the engine goes on."""
    engine = streamed("gpt2", tmp_path)
    ids, want = prompt(1, 5), greedy(fused("gpt2"), prompt(1, 5), 8)
    assert torch.equal(greedy(engine, ids, 8), want)
    stream, file = stream_of(engine).stream, packed(tmp_path)
    block = stream.blocks[1]
    change(file, block.offset + 100)
    with pytest.raises(RuntimeError, match=rf"layer 1 of .*{file.name} was altered: its digest is not the one"):
        greedy(engine, ids, 8)
    change(file, block.offset + 100)
    assert torch.equal(greedy(engine, ids, 8), want)


def test_a_file_that_is_cut_short_under_a_running_engine_is_noticed(tmp_path: Path) -> None:
    engine = streamed("gpt2", tmp_path)
    greedy(engine, prompt(1, 5), 2)
    file, block = packed(tmp_path), stream_of(engine).stream.blocks[2]
    os.truncate(file, block.offset + 4096)
    with pytest.raises(RuntimeError, match=rf"layer 2 of .*{file.name} is missing from byte \d+ on: .* cut short"):
        greedy(engine, prompt(1, 5), 8)


def test_a_cache_is_as_it_was_before_a_step_that_failed(tmp_path: Path) -> None:
    engine = streamed("llama", tmp_path)
    ids, file, at = prompt(1, 9), packed(tmp_path), stream_of(engine).stream.blocks[0].offset
    with torch.inference_mode():
        cache = engine(ids[:, :5], use_cache=True).past_key_values
        stream = stream_of(engine).stream
        assert isinstance(stream, LayerStream)
        stream.rest()
        change(file, at)
        engine(ids)  # what was read ahead before the change is used up
        with pytest.raises(RuntimeError, match="altered"):
            engine(ids[:, 5:], past_key_values=cache)
        assert cache.length == 5
        change(file, at)
        found, want = engine(ids[:, 5:], past_key_values=cache), fused("llama")(ids)
    assert float((found.logits[:, -1] - want.logits[:, -1]).abs().max()) <= 1e-4


def test_an_error_of_the_disk_is_named_and_the_process_lives(tmp_path: Path) -> None:
    """The descriptor that is read from becomes one that can't be read: every read fails as a broken disk's does."""
    engine = streamed("gpt2", tmp_path)
    ids, want = prompt(1, 5), greedy(fused("gpt2"), prompt(1, 5), 6)
    descriptor = next(
        int(each)
        for each in os.listdir("/proc/self/fd")
        if os.path.realpath(f"/proc/self/fd/{each}") == str(packed(tmp_path).resolve())
        and fcntl.fcntl(int(each), fcntl.F_GETFL) & os.O_DIRECT
    )
    kept, folder = os.dup(descriptor), os.open(tmp_path, os.O_RDONLY)
    os.dup2(folder, descriptor)
    with pytest.raises(RuntimeError, match=r"layer \d of .* can't be read at byte \d+: Is a directory \(EISDIR\)"):
        greedy(engine, ids, 6)
    os.dup2(kept, descriptor)
    assert torch.equal(greedy(engine, ids, 6), want)
    for each in (kept, folder):
        os.close(each)


def test_without_direct_reads_nothing_stays_in_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses O_DIRECT is read through the page cache, which is emptied behind every read."""
    opened = os.open

    def refusing(path: Any, flags: int, *mode: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return opened(path, flags, *mode, **more)

    monkeypatch.setattr(layer_stream.os, "open", refusing)
    engine = streamed("gpt2", tmp_path)
    monkeypatch.undo()
    assert not reader_of(engine).direct
    assert torch.equal(greedy(engine, prompt(1, 5), 6), greedy(fused("gpt2"), prompt(1, 5), 6))
    assert reader_of(streamed("gpt2", tmp_path)).direct


def test_too_little_memory_names_the_least_that_works(tmp_path: Path) -> None:
    """With the least it runs, in more slots the least is more, and a byte less is refused."""
    least = {slots: least_gb(vanilla("gpt2"), tmp_path, slots) for slots in (2, 3)}
    assert least[3] > least[2]
    assert torch.equal(greedy(streamed("gpt2", tmp_path), prompt(1, 5), 3), greedy(fused("gpt2"), prompt(1, 5), 3))
    with pytest.raises(ValueError, match=LEAST):
        labkit.init_inference(vanilla("gpt2"), offload={"path": tmp_path, "slots": 2, "resident_gb": 0.99 * least[2]})


@pytest.mark.parametrize(
    ("offload", "words"),
    [
        ({"slots": 1}, r"offload.slots: .* expected at least 2"),
        ({"resident_gb": -1}, r"offload.resident_gb: .* expected at least 0"),
        ({"resident_gb": float("nan")}, "offload.resident_gb: .* finite"),
        ({"device": "nvme"}, "offload.device: .*'disk'"),
        ({"device": "cpu"}, "got device='cpu' without a GPU: .*; use device='disk'"),
        ({"paht": "x"}, "offload.paht: .*"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(offload: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        labkit.init_inference(vanilla("gpt2"), offload=offload)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/labkit")):
        with pytest.raises(ValueError, match=rf"offload: {path} can't be written \(.*\); name another folder as path"):
            labkit.init_inference(vanilla("gpt2"), offload={"path": path})


def test_too_little_room_on_the_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared.shutil, "disk_usage", lambda path: prepared.shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=rf"offload: {tmp_path} has 0.0 GB free, and the packed weights take"):
        labkit.init_inference(vanilla("gpt2"), offload={"path": tmp_path})
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the reason, no file its final name, and the next engine makes the weights anew."""
    write, left = tensor_writer.TensorWriter._write, [10]

    def full(self: tensor_writer.TensorWriter, *args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, *args)

    monkeypatch.setattr(tensor_writer.TensorWriter, "_write", full)
    with pytest.raises(RuntimeError, match=r"not saved: .*No space left on device"):
        labkit.init_inference(vanilla("gpt2"), offload={"path": tmp_path})
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".safetensors"]
    monkeypatch.undo()
    streamed("gpt2", tmp_path)


CONVERT = """
    import sys
    import torch
    import labkit
    from small_models import small_model
    from labkit.weights.checkpoint import tensor_writer

    write, count = tensor_writer.TensorWriter._write, 0

    def slow(self, *args):
        global count
        write(self, *args)
        count += 1
        if count == 20:
            self._file.flush()
            print("half-way", flush=True)
            sys.stdin.readline()

    tensor_writer.TensorWriter._write = slow
    torch.set_num_threads(1)
    labkit.init_inference(small_model("gpt2"), offload={"path": sys.argv[1]})
    print("done", flush=True)
"""


def converting(folder: Path) -> "subprocess.Popen[str]":
    """A process that packs the weights, and waits half-way for a line."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(CONVERT), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@sweep
def test_a_process_that_is_killed_while_it_converts_leaves_no_file_under_its_final_name(tmp_path: Path) -> None:
    """What it leaves is removed by the next, which makes the weights anew."""
    with converting(tmp_path) as process:
        assert said(process) == "half-way"
        process.send_signal(signal.SIGKILL)
    (left,) = tmp_path.rglob("*.safetensors")
    assert left.name.startswith(".")
    streamed("gpt2", tmp_path)
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["rank-00-of-01.safetensors"]


@sweep
def test_of_two_processes_that_convert_a_model_one_waits_for_the_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with converting(tmp_path) as process:
        assert said(process) == "half-way"
        assert process.stdin is not None
        waited, lock, requests = [], fcntl.flock, process.stdin

        def seen(descriptor: Any, operation: int) -> None:
            if operation == fcntl.LOCK_EX:  # this process would wait now
                waited.append(True)
                requests.write("\n")
                requests.flush()
            lock(descriptor, operation)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepared.fcntl, "flock", seen)
            engine = labkit.init_inference(vanilla("gpt2"), offload={"path": tmp_path})
        assert said(process) == "done"
    assert waited
    assert "another process packs these weights" in caplog.text
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    assert torch.equal(greedy(engine, prompt(1, 5), 3), greedy(fused("gpt2"), prompt(1, 5), 3))


def test_other_weights_types_and_models_have_folders_of_their_own(tmp_path: Path) -> None:
    for model, dtype in (
        (vanilla("gpt2"), torch.float32),
        (vanilla("gpt2"), torch.float32),
        (small_model("gpt2", seed=1), torch.float32),
        (vanilla("gpt2"), torch.bfloat16),
        (vanilla("llama"), torch.float32),
    ):
        labkit.init_inference(model, offload={"path": tmp_path}, dtype=dtype)
    assert len(list(tmp_path.rglob("labkit_checkpoint.json"))) == 4


def damaged_header(file: Path, manifest: Path) -> None:
    change(file, 100)


def damaged_length(file: Path, manifest: Path) -> None:
    change(file, 0)


def other_offsets(file: Path, manifest: Path) -> None:
    """Two tensors of one size change places."""
    data = file.read_bytes()
    first, second = (re.escape(f'"layers.{layer}.qkv.weight"'.encode()) for layer in (0, 1))
    places = [re.search(name + rb'.*?"data_offsets": (\[[^]]*\])', data) for name in (first, second)]
    one, two = (found[1] for found in places if found is not None)
    file.write_bytes(data.replace(one, b"<first>").replace(two, one).replace(b"<first>", two))


def other_type(file: Path, manifest: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"dtype": "F32"', b'"dtype": "BF16"', 1).replace(b"  ", b" ", 1))


def other_extent(file: Path, manifest: Path) -> None:
    values = json.loads(manifest.read_text())
    values["files"][0]["layers"][1]["offset"] += 4096
    manifest.write_text(json.dumps(values))


def shorter_extent(file: Path, manifest: Path) -> None:
    values = json.loads(manifest.read_text())
    values["files"][0]["layers"][2]["bytes"] -= 4096
    manifest.write_text(json.dumps(values))


@pytest.mark.parametrize(
    "damage",
    [damaged_header, damaged_length, other_offsets, other_type, other_extent, shorter_extent],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_header_or_extent_is_made_anew(
    damage: Callable[[Path, Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offload = {"path": tmp_path}
    want = labkit.init_inference(vanilla("gpt2"), offload=offload)(prompt(1, 5)).logits
    file = packed(tmp_path)
    damage(file, file.with_name(MANIFEST))
    assert torch.equal(labkit.init_inference(vanilla("gpt2"), offload=offload)(prompt(1, 5)).logits, want)
    assert "the streamed weights are made anew" in caplog.text
    caplog.clear()
    labkit.init_inference(vanilla("gpt2"), offload=offload)
    assert "made anew" not in caplog.text
