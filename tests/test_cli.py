"""The command line as a user meets it: in a process of its own, by its exit code, stdout and stderr."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from labkit.cli import main

SMALL = ("--prompt", "9", "--new", "5", "--threads", "1", "--rounds", "3")
SIDE_KEYS = {"name", "ttft_ms", "per_token_ms", "end_to_end_ms", "floor_share", "peak_rss_mb"}
KEYS = {
    *("model", "dtype", "batch", "baseline", "candidate", "verdict", "tokens_equal", "read_bandwidth_gb_s"),
    *("per_token_ratio", "per_token_ratio_low", "per_token_ratio_high", "ttft_ratio", "end_to_end_ratio"),
}
REGION_KEYS = {
    *("region", "impl", "batch", "dtype", "reference_us", "unfused_own_gemm_us", "fused_us", "published"),
    *("ratio", "ratio_low", "ratio_high", "floor_share"),
}
LABKIT = (sys.executable, "-P", "-c", "from labkit.cli import main; main()")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
ENVIRONMENT |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def labkit(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LABKIT, *arguments], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
    )


def test_compare_ends_with_one_json_object(tmp_path: Path) -> None:
    done = labkit("compare", "tiny-gpt2", *SMALL, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) >= KEYS
    for side, name in (("baseline", "hf-eager"), ("candidate", "fused")):
        assert set(figures[side]) >= SIDE_KEYS
        assert figures[side]["name"] == name
    assert figures["per_token_ratio_low"] <= figures["per_token_ratio"] <= figures["per_token_ratio_high"]
    assert figures["tokens_equal"] is True
    assert len(list((tmp_path / "runs").glob("*.jsonl"))) == 1


def test_compare_shows_speed_with_interval_baseline_and_limit(tmp_path: Path) -> None:
    done = labkit("compare", "tiny-llama", *SMALL, "--dtype", "bfloat16", "--output", "elsewhere", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "random weights" in done.stdout
    assert "fused against hf-eager: " in done.stdout
    assert "share of the limit" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "gpt-17"), "gpt-17"),
        (("compare", "tiny-gpt2", "--baseline", "hf-lazy"), "expected one of hf-eager"),
        (("compare", "tiny-gpt2", "--dtype", "int3"), "expected one of float32"),
        (("compare", "tiny-gpt2", "--threads", "0"), "got threads = 0, expected at least 1"),
        (("compare", "tiny-gpt2", "--prompt", "4000"), "2048; use a shorter prompt"),
        (("compare", "tiny-gpt2", "--batch", "many"), "--batch"),
        (("generate", "tiny-gpt2", "--prompt", ""), "got an empty prompt"),
        (("generate", "tiny-gpt2", "--prompt", "a", "--new", "0"), "got new = 0"),
        (("generate", "tiny-gpt2", "--prompt", "a", "--new", "3000"), "use a shorter prompt or fewer new tokens"),
        (("generate", "tiny-gpt2", "--prompt", "a", "--threads", "0"), "got threads = 0"),
        (("kernels", "--op", "all_reduce", "--op", "qkv"), "expected it alone"),
        (("kernels", "--op", "all_reduce", "--ranks", "1"), "got ranks = 1"),
        (("run", "absent.ipynb"), "no notebook at absent.ipynb"),
        (("run", "absent.ipynb", "-p", "rounds"), "expected -p NAME VALUE"),
        (("run", "absent.ipynb", "-p", "a", "1", "-p", "a", "2"), "given twice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_explained_without_a_traceback(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, to spare each of them the seconds that torch takes to load."""
    for name in ("HF_HUB_OFFLINE", "COLUMNS"):
        monkeypatch.setenv(name, ENVIRONMENT[name])
    monkeypatch.setattr(sys, "argv", ["labkit", *arguments])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_kernels_ends_with_one_json_object(tmp_path: Path) -> None:
    done = labkit("kernels", "--model", "tiny-gpt2", "--rounds", "2", "--context", "9", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["region"] for row in rows] == ["qkv", "attention", "mlp", "residual"]
    assert set(rows[0]) >= REGION_KEYS
    assert len(list((tmp_path / "runs").glob("*.jsonl"))) == 1


def test_kernels_shows_each_region_with_its_interval_and_what_was_published(tmp_path: Path) -> None:
    done = labkit("kernels", "--op", "mlp", "--op", "mlp_out", "--model", "tiny-llama", "--rounds", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("mlp_out", "unfused, own GEMM", "3.0x", "published, not measured here", "machine: ", "[95 %]"):
        assert text in done.stdout


def test_interrupted_compare_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    arguments = ("compare", "tiny-gpt2", "--new", "200", "--rounds", "500", "--threads", "1")
    process = subprocess.Popen([*LABKIT, *arguments], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    workers: list[psutil.Process] = []
    deadline = time.monotonic() + 120
    while len(workers) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
        workers = [child for child in psutil.Process(process.pid).children() if "worker" in " ".join(child.cmdline())]
    assert len(workers) == 2
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not any(worker.is_running() for worker in workers)
    assert list(tmp_path.rglob("*.*")) == []


def test_generate_continues_the_prompt_and_says_where_the_weights_come_from(tmp_path: Path) -> None:
    done = labkit("generate", "tiny-gpt2", "--prompt", "Once upon", "--new", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon")
    assert len(done.stdout.strip()) > len("Once upon")
    assert "random weights, seed 0" in done.stderr


def test_sampling_repeats_with_its_seed(tmp_path: Path) -> None:
    texts = [
        labkit(
            *("generate", "tiny-llama", "--prompt", "Once", "--new", "8", "--temperature", "1", "--seed", seed),
            cwd=tmp_path,
        ).stdout
        for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_models_lists_the_presets(tmp_path: Path) -> None:
    done = labkit("models", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("gpt2-medium", "gpt-j-6b", "bloom-7b1", "gpt-neox-20b", "llama-2-7b"):
        assert name in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "arguments", [("tune",), ("kernels", "--impl", "triton", "--model", "tiny-gpt2")], ids=" ".join
)
def test_without_a_gpu_triton_says_what_to_do(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = labkit(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "impl 'triton' needs an NVIDIA GPU" in done.stderr
    assert "use impl='cpp'" in done.stderr
    assert not list(tmp_path.iterdir())
