"""Faults of streamed weights are named, and never lead to wrong tokens."""

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
from helpers.models.engines import fused, greedy, prompt, vanilla
from helpers.models.offloaded import LEAST, flip_byte, least_gb, reader_of, stream_of, streamed
from helpers.models.small_models import small_model
from helpers.sweeps import sweep

import labkit
from labkit.engine.offload import prepared
from labkit.kernels import layer_stream
from labkit.kernels.layer_stream import LayerStream
from labkit.weights.checkpoint import tensor_writer
from labkit.weights.checkpoint.manifest import MANIFEST


def packed(folder: Path) -> Path:
    """The only file of weights in a folder."""
    (file,) = folder.glob("*/*.safetensors")
    return file


def test_a_file_that_is_altered_under_a_running_engine_is_noticed(tmp_path: Path) -> None:
    """The digest detects it: the step fails and gives no tokens. Once the file is repaired, the step works."""
    engine = streamed("gpt2", tmp_path)
    ids, expected = prompt(1, 5), greedy(fused("gpt2"), prompt(1, 5), 8)
    assert torch.equal(greedy(engine, ids, 8), expected)
    stream, file = stream_of(engine).stream, packed(tmp_path)
    block = stream.blocks[1]
    flip_byte(file, block.offset + 100)
    with pytest.raises(
        RuntimeError, match=rf"layer 1 of .*{file.name} was altered: its digest is not the digest of the save"
    ):
        greedy(engine, ids, 8)
    flip_byte(file, block.offset + 100)
    assert torch.equal(greedy(engine, ids, 8), expected)


def test_a_file_that_is_cut_short_under_a_running_engine_is_noticed(tmp_path: Path) -> None:
    engine = streamed("gpt2", tmp_path)
    greedy(engine, prompt(1, 5), 2)
    file, block = packed(tmp_path), stream_of(engine).stream.blocks[2]
    os.truncate(file, block.offset + 4096)
    with pytest.raises(RuntimeError, match=rf"layer 2 of .*{file.name} is missing from byte \d+ on: .* cut short"):
        greedy(engine, prompt(1, 5), 8)


def test_a_cache_is_as_it_was_before_a_step_that_failed(tmp_path: Path) -> None:
    engine = streamed("llama", tmp_path)
    ids, file, offset = prompt(1, 9), packed(tmp_path), stream_of(engine).stream.blocks[0].offset
    with torch.inference_mode():
        cache = engine(ids[:, :5], use_cache=True).past_key_values
        stream = stream_of(engine).stream
        assert isinstance(stream, LayerStream)
        stream.rest()
        flip_byte(file, offset)
        engine(ids)  # uses up the layers that were prefetched before the change
        with pytest.raises(RuntimeError, match="altered"):
            engine(ids[:, 5:], past_key_values=cache)
        assert cache.length == 5
        flip_byte(file, offset)
        output, expected = engine(ids[:, 5:], past_key_values=cache), fused("llama")(ids)
    assert float((output.logits[:, -1] - expected.logits[:, -1]).abs().max()) <= 1e-4


def test_an_error_of_the_disk_is_named_and_the_process_lives(tmp_path: Path) -> None:
    """Replaces the descriptor by one that cannot be read: every read fails, as on a broken disk."""
    engine = streamed("gpt2", tmp_path)
    ids, expected = prompt(1, 5), greedy(fused("gpt2"), prompt(1, 5), 6)
    descriptor = next(
        int(number)
        for number in os.listdir("/proc/self/fd")
        if os.path.realpath(f"/proc/self/fd/{number}") == str(packed(tmp_path).resolve())
        and fcntl.fcntl(int(number), fcntl.F_GETFL) & os.O_DIRECT
    )
    original, folder = os.dup(descriptor), os.open(tmp_path, os.O_RDONLY)
    os.dup2(folder, descriptor)
    with pytest.raises(RuntimeError, match=r"layer \d of .* can't be read at byte \d+: Is a directory \(EISDIR\)"):
        greedy(engine, ids, 6)
    os.dup2(original, descriptor)
    assert torch.equal(greedy(engine, ids, 6), expected)
    for file in (original, folder):
        os.close(file)


def test_without_direct_reads_nothing_stays_in_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT is read through the page cache, which is emptied after every read."""
    original_open = os.open

    def refusing(path: Any, flags: int, *mode: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return original_open(path, flags, *mode, **options)

    monkeypatch.setattr(layer_stream.os, "open", refusing)
    engine = streamed("gpt2", tmp_path)
    monkeypatch.undo()
    assert not reader_of(engine).direct
    assert torch.equal(greedy(engine, prompt(1, 5), 6), greedy(fused("gpt2"), prompt(1, 5), 6))
    assert reader_of(streamed("gpt2", tmp_path)).direct


def test_too_little_memory_names_the_least_that_works(tmp_path: Path) -> None:
    """With the least memory it runs; more slots need more; one percent less is refused."""
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
    """The message has the reason, no file has its final name, and the next engine packs the weights again."""
    write, remaining = tensor_writer.TensorWriter._write, [10]

    def write_or_fail(self: tensor_writer.TensorWriter, *args: Any) -> None:
        remaining[0] -= 1
        if remaining[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, *args)

    monkeypatch.setattr(tensor_writer.TensorWriter, "_write", write_or_fail)
    with pytest.raises(RuntimeError, match=r"not saved: .*No space left on device"):
        labkit.init_inference(vanilla("gpt2"), offload={"path": tmp_path})
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".safetensors"]
    monkeypatch.undo()
    streamed("gpt2", tmp_path)


CONVERT = """
    import sys
    import torch
    import labkit
    from helpers.models.small_models import small_model
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
    """Process that packs the weights, and waits for a line half-way."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(CONVERT), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@sweep
def test_a_process_that_is_killed_while_it_converts_leaves_no_file_under_its_final_name(tmp_path: Path) -> None:
    """The next engine removes the unfinished file and packs the weights again."""
    with converting(tmp_path) as process:
        assert line_of(process) == "half-way"
        process.send_signal(signal.SIGKILL)
    (unfinished,) = tmp_path.rglob("*.safetensors")
    assert unfinished.name.startswith(".")
    streamed("gpt2", tmp_path)
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["rank-00-of-01.safetensors"]


@sweep
def test_of_two_processes_that_convert_a_model_one_waits_for_the_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with converting(tmp_path) as process:
        assert line_of(process) == "half-way"
        assert process.stdin is not None
        waited, lock, requests = [], fcntl.flock, process.stdin

        def lock_and_record(descriptor: Any, operation: int) -> None:
            if operation == fcntl.LOCK_EX:  # this process would wait now
                waited.append(True)
                requests.write("\n")
                requests.flush()
            lock(descriptor, operation)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepared.fcntl, "flock", lock_and_record)
            engine = labkit.init_inference(vanilla("gpt2"), offload={"path": tmp_path})
        assert line_of(process) == "done"
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
    flip_byte(file, 100)


def damaged_length(file: Path, manifest: Path) -> None:
    flip_byte(file, 0)


def other_offsets(file: Path, manifest: Path) -> None:
    """Swaps two tensors of the same size."""
    data = file.read_bytes()
    first, second = (re.escape(f'"layers.{layer}.qkv.weight"'.encode()) for layer in (0, 1))
    matches = [re.search(name + rb'.*?"data_offsets": (\[[^]]*\])', data) for name in (first, second)]
    first_offsets, second_offsets = (match[1] for match in matches if match is not None)
    file.write_bytes(
        data.replace(first_offsets, b"<first>")
        .replace(second_offsets, first_offsets)
        .replace(b"<first>", second_offsets)
    )


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
    expected = labkit.init_inference(vanilla("gpt2"), offload=offload)(prompt(1, 5)).logits
    file = packed(tmp_path)
    damage(file, file.with_name(MANIFEST))
    assert torch.equal(labkit.init_inference(vanilla("gpt2"), offload=offload)(prompt(1, 5)).logits, expected)
    assert "the streamed weights are made anew" in caplog.text
    caplog.clear()
    labkit.init_inference(vanilla("gpt2"), offload=offload)
    assert "made anew" not in caplog.text
