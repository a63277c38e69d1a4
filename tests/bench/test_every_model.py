"""The bench of models without a row of their own: its bars, its page, the models' folders, and a bench that goes on."""

from pathlib import Path

import pytest
from helpers.studies.comparisons import comparison
from helpers.sweeps import sweep

from labkit.bench import every_model as bench
from labkit.bench.every_model import MODELS, SIDES, BenchedModel, BenchedSides, checks, page, written
from labkit.harness import Comparison, load_records
from labkit.weights.resolve import resolve

SMALL = BenchedModel(
    "small",
    "granite",
    {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 300},
)


def of_model(name: str) -> Comparison:
    """A comparison in float32 of hf-eager and fused."""
    record = comparison()
    sides = {
        role: side.model_copy(update={"case": side.case.model_copy(update={"model": f"runs/{name}"})})
        for role, side in (("baseline", record.baseline), ("candidate", record.candidate))
    }
    return record.model_copy(update=sides)


def test_a_figure_on_its_bar_is_met_and_one_below_it_missed() -> None:
    record = of_model("gemma-3-like")
    reached = record.ratio("per_token").value
    for factor, met in ((1.0, True), (1.001, False)):
        sides = BenchedSides("hf-eager", "fused", "float32", reached * factor)
        assert next(checks(MODELS[0], sides, record)).met is met


def test_the_page_has_a_line_for_each_comparison_and_names_missed_bars() -> None:
    text = page([of_model("gemma-3-like"), of_model("phi-3-like")])
    assert text.count("| float32 | hf-eager / fused |") == 2
    assert "bars met" in text


def test_a_model_is_written_once(tmp_path: Path) -> None:
    path = written(SMALL, tmp_path)
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert written(SMALL, tmp_path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    assert [child.name for child in tmp_path.iterdir()] == ["small"]
    assert resolve(path, any_architecture=True).hf_config.vocab_size == 300


@sweep
def test_a_stopped_bench_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MODELS", (SMALL,))
    monkeypatch.setattr(bench, "SIDES", SIDES[:1])
    monkeypatch.setattr(bench, "PROMPT", 4)
    monkeypatch.setattr(bench, "NEW", 8)
    for _ in range(2):
        bench.main(folder=tmp_path / "models", rounds=3, output=tmp_path / "pages")
    (records,) = (tmp_path / "pages").glob("*.jsonl")
    assert len(load_records(records)) == 1
