"""Exit code, stdout and stderr of command lines.

Most run in this process, which saves each test the seconds in which torch and transformers are loaded.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers.processes.children import children_that_run
from helpers.processes.command_line import Labkit, command_line
from helpers.studies.comparisons import comparison
from helpers.sweeps import sweep
from rich.console import Console

from labkit.cli import compare as compare_cli
from labkit.cli import kernels as kernels_cli
from labkit.cli import models as models_cli
from labkit.cli import tune as tune_cli
from labkit.harness import Case, Comparison
from labkit.harness.compare.plan import Schedule
from labkit.harness.results import load_records
from labkit.kernels import gpu
from labkit.kernels.reading import READINGS

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
LABKIT = (sys.executable, "-P", "-c", "from labkit.cli.main import main; main()")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
ENVIRONMENT |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


@pytest.fixture
def labkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Runs a command line in the test's folder: (exit code, stdout, stderr)."""
    monkeypatch.setenv("HF_HUB_OFFLINE", ENVIRONMENT["HF_HUB_OFFLINE"])
    for module in (models_cli, tune_cli, compare_cli, kernels_cli):
        monkeypatch.setattr(module, "out", Console(width=200))
    monkeypatch.chdir(tmp_path)
    return command_line(monkeypatch, capsys)


@pytest.mark.sweep
@pytest.mark.timeout(240)
def test_a_measured_compare_ends_with_one_json_object(tmp_path: Path) -> None:
    """Compares two ranks with one process, in a process of its own. The fourth notebook measures the same."""
    process = subprocess.run(
        [*LABKIT, "compare", "tiny-gpt2", "--baseline", "fused", "--tp", "2", *SMALL, "--json"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    check_figures(json.loads(process.stdout.splitlines()[-1]), "fused", "fused-tp2")
    assert len(list((tmp_path / "runs").glob("*.jsonl"))) == 1


def check_figures(figures: dict[str, Any], baseline: str, candidate: str) -> None:
    assert set(figures) >= KEYS
    for side, name in (("baseline", baseline), ("candidate", candidate)):
        assert set(figures[side]) >= SIDE_KEYS
        assert figures[side]["name"] == name
    assert figures["per_token_ratio_low"] <= figures["per_token_ratio"] <= figures["per_token_ratio_high"]
    assert figures["limit_ratio"] > 0
    assert figures["tokens_equal"] is True


def test_compare_ends_with_one_json_object(labkit: Labkit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is made up."""
    monkeypatch.setattr("labkit.harness.compare.compare.compare_with_each", lambda *sides, **settings: (comparison(),))
    code, output, errors = labkit("compare", "tiny-gpt2", *SMALL, "--json")
    assert code == 0, errors
    check_figures(json.loads(output.splitlines()[-1]), "hf-eager", "fused")


def test_compare_shows_speed_with_interval_baseline_and_limit(labkit: Labkit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is made up."""
    recorded: dict[str, Any] = {}

    def measured(
        baselines: tuple[str, ...], candidate: str, case: Case, schedule: Schedule, **options: Any
    ) -> tuple[Comparison, ...]:
        recorded.update(
            baselines=baselines, candidate=candidate, case=case, schedule=schedule, output=options["output"]
        )
        return (comparison(dtype=case.dtype),)

    monkeypatch.setattr("labkit.harness.compare.compare.compare_with_each", measured)
    code, output, errors = labkit("compare", "tiny-llama", *SMALL, "--dtype", "bfloat16", "--output", "elsewhere")
    assert code == 0, errors
    assert "random weights" in output
    assert "FASTER  fused against hf-eager: " in output
    assert "share of the limit" in output
    assert recorded["baselines"] == ("hf-eager",)
    assert recorded["candidate"] == "fused"
    case = recorded["case"]
    assert (case.dtype, case.prompt_tokens, case.new_tokens, case.threads) == ("bfloat16", 9, 5, 1)
    assert recorded["schedule"] == Schedule(rounds=3)
    assert recorded["output"] == Path("elsewhere")
    assert load_records("elsewhere") == [comparison(dtype="bfloat16")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "gpt-17"), "gpt-17"),
        (("compare", "tiny-gpt2", "--baseline", "hf-lazy"), "expected one of hf-eager"),
        (("compare", "tiny-gpt2", "--dtype", "int3"), "expected one of float32"),
        (("compare", "tiny-gpt2", "--threads", "0"), "got threads = 0, expected at least 1"),
        (("compare", "tiny-gpt2", "--prompt", "4000"), "2048; use a shorter prompt"),
        (("compare", "tiny-gpt2", "--batch", "many"), "--batch"),
        (("kernels", "--op", "all_reduce", "--op", "qkv"), "expected it alone"),
        (("kernels", "--op", "all_reduce", "--ranks", "1"), "got ranks = 1"),
        (("kernels", "--op", "all_reduce", "--rounds", "1", "--wait-quiet"), "got rounds = 1"),
        (("kernels", "--op", "all_reduce", "--impl", "cpp", "--batch", "1"), "got --impl, --batch; all_reduce runs no"),
        (("kernels", "--ranks", "2"), "got --ranks; only --op all_reduce runs on ranks"),
        (("run", "absent.ipynb"), "no notebook at absent.ipynb"),
        (("run", "absent.ipynb", "-p", "rounds"), "expected -p NAME VALUE"),
        (("run", "absent.ipynb", "-p", "a", "1", "-p", "a", "2"), "given twice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_explained_without_a_traceback(
    arguments: tuple[str, ...], message: str, labkit: Labkit, tmp_path: Path
) -> None:
    code, output, errors = labkit(*arguments)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors
    assert output == ""
    assert list(tmp_path.iterdir()) == []


def test_kernels_ends_with_one_json_object(labkit: Labkit, tmp_path: Path) -> None:
    code, output, errors = labkit("kernels", "--model", "tiny-gpt2", "--rounds", "2", "--context", "9", "--json")
    assert code == 0, errors
    rows = json.loads(output.splitlines()[-1])["rows"]
    assert [row["region"] for row in rows] == ["qkv", "attention", "mlp", "residual"]
    assert set(rows[0]) >= REGION_KEYS
    assert len(list((tmp_path / "runs").glob("*.jsonl"))) == 1


def test_kernels_shows_each_region_with_its_interval_and_what_was_published(labkit: Labkit) -> None:
    code, output, errors = labkit("kernels", "--op", "mlp", "--op", "mlp_out", "--model", "tiny-llama", "--rounds", "2")
    assert code == 0, errors
    for text in (
        "mlp_out",
        "unfused, own GEMM",
        "3.0x",
        "published, not measured here",
        "machine: ",
        "[95%]",
        "verdict",
        "scatter between placements",
        "2 epochs",
    ):
        assert text in output


def test_interrupted_compare_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    arguments = ("compare", "tiny-gpt2", "--new", "200", "--rounds", "500", "--threads", "1")
    process = subprocess.Popen([*LABKIT, *arguments], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    workers: list[psutil.Process] = []
    deadline = time.monotonic() + 120
    try:
        while len(workers) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
            workers = children_that_run("worker", below=process.pid)
        assert len(workers) == 2
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not any(worker.is_running() for worker in workers)
    assert list(tmp_path.rglob("*.*")) == []


def test_models_lists_the_presets_in_80_columns_and_cuts_nothing(
    labkit: Labkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_cli, "out", Console(width=80))
    code, output, errors = labkit("models")
    assert code == 0, errors
    assert "…" not in output
    for name in ("gpt2-medium", "gpt-j-6b", "bloom-7b1", "gpt-neox-20b", "llama-2-7b"):
        assert name in output


@sweep
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_tune_shows_the_ways_to_read(labkit: Labkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(gpu, "unavailable", gpu.unavailable.__wrapped__)
    code, output, errors = labkit("tune", "--model", "tiny-llama", "--dtype", "int8", "--batch", "2")
    assert code == 0, errors
    assert "tiny-llama, int8, batch 2" in output
    for name in READINGS:
        assert re.search(rf"{name} .* ms .*\d", output)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_triton_says_what_to_do(labkit: Labkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(gpu, "unavailable", gpu.unavailable.__wrapped__)  # the cached answer is for the interpreter
    code, _, errors = labkit("kernels", "--impl", "triton", "--model", "tiny-gpt2")
    assert code == 2
    assert "impl 'triton' needs an NVIDIA GPU" in errors
    assert "use impl='cpp'" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "waited"),
    [(("--wait-quiet",), 300.0), (("--wait-quiet", "20"), 20.0), ((), None), (("--wait-quiet", "--json"), 300.0)],
    ids=("alone", "a number", "left out", "an option"),
)
def test_wait_quiet_may_stand_without_a_number(
    arguments: tuple[str, ...], waited: float | None, labkit: Labkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules: list[Schedule] = []

    def measured(baselines: Any, candidate: Any, case: Any, schedule: Schedule, **options: Any) -> tuple[Comparison]:
        schedules.append(schedule)
        return (comparison(),)

    monkeypatch.setattr("labkit.harness.compare.compare.compare_with_each", measured)
    for line in ((*arguments, "gpt2"), ("gpt2", *arguments)):
        assert labkit("compare", *line)[0] == 0
        assert schedules[-1].wait_quiet_s == waited


@pytest.mark.parametrize("as_json", [True, False])
def test_a_comparison_is_shown_though_it_cannot_be_saved(
    as_json: bool, labkit: Labkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labkit.harness.compare.compare.compare_with_each", lambda *rest, **more: (comparison(),))
    monkeypatch.setattr("labkit.harness.results.write_whole", full)
    code, output, errors = labkit("compare", "gpt2", *(["--json"] if as_json else []))
    assert code == 1
    assert "Traceback" not in errors
    assert "could not be saved as runs/" in errors
    assert "No space left on device; make room there" in errors
    if as_json:
        assert json.loads(output.splitlines()[-1])["verdict"] == "FASTER"
    else:
        assert "FASTER  fused against hf-eager" in output


def test_regions_are_shown_though_they_cannot_be_saved(labkit: Labkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.harness.results.write_whole", full)
    code, output, errors = labkit("kernels", "--model", "tiny-gpt2", "--op", "residual", "--rounds", "2", "--json")
    assert code == 1
    assert json.loads(output.splitlines()[-1])["rows"][0]["region"] == "residual"
    assert "No space left on device" in errors


@pytest.mark.parametrize("command", [("compare", "tiny-gpt2"), ("kernels", "--model", "tiny-gpt2")], ids=" ".join)
def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_measured(
    command: tuple[str, ...], labkit: Labkit, tmp_path: Path
) -> None:
    (tmp_path / "runs").write_text("mine")
    code, output, errors = labkit(*command)
    assert (code, output) == (2, "")
    assert "cannot be written to the folder runs" in errors
    assert "there is a file of that name; name another folder" in errors


def full(path: Path, text: str) -> None:
    """Replaces `write_whole`, as on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
