"""Progress of packing: megabytes of all weights, up to the whole model."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers.models.engines import greedy, prompt, vanilla

import labkit
from labkit.system import progress
from labkit.weights import build
from labkit.weights.capacity import model_bytes
from labkit.weights.checkpoint.manifest import MANIFEST


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


@pytest.mark.parametrize("offload", [None, {"device": "disk"}])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_an_interrupt_while_packing_keeps_nothing_that_is_half(
    offload: dict[str, str] | None, layers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model packs as before, and a folder of packed weights is made anew."""
    model, options = vanilla("llama"), {} if offload is None else {"offload": {**offload, "path": str(tmp_path)}}
    expected = greedy(model, prompt(2, 5), 4)
    calls = iter(range(layers))

    def interrupted(*_: object) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(build, "WORTH_A_BAR", 1)
        patched.setattr(build, "progress_bar", lambda *_: nullcontext(interrupted))
        with pytest.raises(KeyboardInterrupt):
            labkit.init_inference(model, impl="cpp", **options)
    assert not list(tmp_path.rglob(MANIFEST))
    assert torch.equal(greedy(model, prompt(2, 5), 4), expected)
    assert torch.equal(greedy(labkit.init_inference(model, impl="cpp", **options), prompt(2, 5), 4), expected)
    assert len(list(tmp_path.rglob(MANIFEST))) == (offload is not None)


def test_small_models_have_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "progress_bar", lambda *_: pytest.fail("a bar"))
    labkit.init_inference(vanilla("llama"), impl="cpp")
