"""`make bench-gpu` without a GPU: every side, record, bar and page, on a tiny shape in Triton's interpreter."""

from pathlib import Path

import pytest
import torch
from helpers.studies.comparisons import comparison
from helpers.sweeps import sweep

from labkit.bench import gpu as gpu_bench
from labkit.bench.gpu import checks, main
from labkit.bench.targets import GPU_TARGETS
from labkit.harness import load_records
from labkit.harness.comparison import Comparison
from labkit.models.presets import PRESETS

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="made for the interpreter"),
]


@sweep  # its parts have tests of their own: the sides, the rounds, the records, the page
def test_a_bench_writes_records_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench, "PROMPT", 4)
    monkeypatch.setattr(gpu_bench, "QUICK_NEW", 2)
    main(model=["tiny-gptj"], against=["hf-eager"], batch=[1], quick=True, regions=False, output=tmp_path)
    (file,) = tmp_path.glob("*.jsonl")
    records = [record for record in load_records(file) if isinstance(record, Comparison)]
    sides = {(record.baseline.name, record.candidate.name, record.case.batch) for record in records}
    assert sides == {("hf-eager", name, 1) for name in ("fused", "fused-int8")}
    for record in records:
        assert "triton" in record.candidate.impl
        assert record.tokens_equal or record.candidate.name == "fused-int8"
        stages = [stage for _, stage in record.candidate.nodes]
        assert stages[:2] == ["decode/embed", "decode/layer.0/qkv+mlp"]
        assert stages[-2:] == ["decode/lm_head", "decode/sample"]
    page = file.with_suffix(".md").read_text()
    assert "interpreted on the CPU, so that no time means anything" in page
    assert "| tiny-gptj | 1 | hf-eager | fused-int8 |" in page
    judged = [check.what for _, check in checks(records, [])]
    assert judged == ["hf-eager / fused"]  # a tiny shape has no bar in milliseconds


def test_a_baseline_that_is_given_twice_is_one_side() -> None:
    """Otherwise its runs would be recorded twice under one name."""
    assert gpu_bench._baselines(["hf-static", "hf-eager", "hf-static"]) == ("hf-static", "hf-eager")


def test_a_ratio_that_is_not_trustworthy_says_so_next_to_its_bar() -> None:
    few, enough = comparison(rounds=3), comparison()
    for record, marked in ((few, True), (enough, False)):
        assert any("not trustworthy" in cell for cell in gpu_bench._step_cells(record)) is marked
        ((_, check),) = gpu_bench._ratio_checks([record])
        assert ("not trustworthy" in str(check)) is marked


@pytest.mark.parametrize(("name", "judged"), [("NVIDIA H200", "per token"), ("NVIDIA H100", "share of the limit")])
def test_milliseconds_are_judged_on_the_gpu_of_the_targets_alone(name: str, judged: str) -> None:
    record = comparison()
    candidate = record.candidate
    case = candidate.case.model_copy(update={"model": GPU_TARGETS[0].model})
    environment = candidate.environment.model_copy(update={"gpu": name})
    on_gpu = candidate.model_copy(update={"case": case, "environment": environment})
    record = record.model_copy(
        update={"candidate": on_gpu, "baseline": record.baseline.model_copy(update={"case": case})}
    )
    assert [check.what for _, check in gpu_bench._step_checks([record])] == [judged]


def test_the_models_with_bars_are_presets() -> None:
    assert {target.model for target in GPU_TARGETS} <= set(PRESETS)
    assert all(target.int8_ms < target.float16_ms for target in GPU_TARGETS)


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown side 'tf'; expected one of hf-eager"):
        main(model=["tiny-gptj"], against=["tf"], quick=True, output=tmp_path)
    with pytest.raises(ValueError, match="unknown model 'gpt-9'"):
        main(model=["gpt-9"], against=["hf-eager"], quick=True, output=tmp_path)
    with pytest.raises(ValueError, match="got the baseline 'fused', which is measured against the baselines"):
        main(model=["tiny-gptj"], against=["hf-eager", "fused"], quick=True, output=tmp_path)
    with pytest.raises(ValueError, match="'hf-graph' got no GPU"):
        main(model=["tiny-gptj"], against=["hf-graph"], quick=True, output=tmp_path)
    assert not list(tmp_path.iterdir())
