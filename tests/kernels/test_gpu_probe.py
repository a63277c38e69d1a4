"""The GPU's probe reads every byte, and its bandwidth is bytes over time."""

import pytest
import torch

from labkit.kernels import gpu, gpu_probe

pytestmark = pytest.mark.skipif(gpu.unavailable() is not None, reason=str(gpu.unavailable()))


@pytest.mark.parametrize("programs", [1, 3])
def test_the_sums_are_those_of_all_numbers(programs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(-999, 999, (programs * gpu_probe.NUMBERS,), dtype=torch.int32, generator=generator)
    data = data.to(gpu.default_device())
    sums = torch.full((programs,), -1, dtype=torch.int32, device=data.device)
    gpu_probe.read(data, sums)
    assert torch.equal(sums.long(), data.view(programs, -1).long().sum(dim=1))


class Clock:
    """An event of a GPU on which every pass takes 2 ms, except for the fourth, which takes 1 ms."""

    now_ms, passes = 0.0, 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Clock.passes += 1
        Clock.now_ms += 1.0 if Clock.passes == 4 else 2.0
        self.at_ms = Clock.now_ms

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end: "Clock") -> float:
        return end.at_ms - self.at_ms


def test_the_bandwidth_is_that_of_the_best_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    data, sums = torch.zeros(gpu_probe.NUMBERS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(gpu_probe, "_buffers", lambda device: (data, sums))
    monkeypatch.setattr(gpu_probe, "read", lambda data, sums: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    assert gpu_probe.read_bandwidth_gb_s(seconds=0.0) == pytest.approx(4 * gpu_probe.NUMBERS / 1e-3 / 1e9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpus_bandwidth_is_of_a_gpus_size() -> None:
    assert 50 < gpu_probe.read_bandwidth_gb_s() < 50_000
