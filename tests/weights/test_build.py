"""Progress of packing: megabytes of all weights, up to the whole model."""

import pytest
import torch
from helpers.models.engines import vanilla

import labkit
from labkit.system import progress
from labkit.weights import build
from labkit.weights.capacity import model_bytes


@pytest.mark.parametrize("offload", [None, {"device": "disk"}])
def test_a_bar_counts_up_to_the_bytes_of_the_model(
    offload: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    seen: list[tuple[float, float, str]] = []
    update = progress.bars.Progress.update

    def noted(bar: progress.bars.Progress, task: object, **state: object) -> None:
        seen.append((state["completed"], state["total"], state["description"]))  # type: ignore[arg-type]
        update(bar, task, **state)  # type: ignore[arg-type]

    monkeypatch.setattr(progress.bars.Progress, "update", noted)
    monkeypatch.setattr(build, "WORTH_A_BAR", 1)
    monkeypatch.setattr(build, "MEGABYTE", 1)
    options = {} if offload is None else {"offload": {**offload, "path": str(tmp_path)}}
    engine = labkit.init_inference(vanilla("llama"), dtype=torch.bfloat16, impl="cpp", **options)
    packed, totals, labels = zip(*seen, strict=True)
    assert list(packed) == sorted(set(packed))
    assert packed[0] == 0
    assert packed[-1] == totals[-1] > 0
    assert set(labels) == {"MB packed"}
    if offload is None:
        assert totals[-1] == pytest.approx(model_bytes(engine.module.runner.layer_range.spec), rel=0.01)


def test_small_models_have_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "progress_bar", lambda *_: pytest.fail("a bar"))
    labkit.init_inference(vanilla("llama"), impl="cpp")
