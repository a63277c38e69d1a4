"""The probes are as fast as the best known reader and multiplier of this machine."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import pytest
import torch

from labkit.kernels import build, probe
from labkit.kernels.reading import READINGS

ATTEMPTS = 6  # other programs change the machine within seconds
NOISE = 1.1


def test_the_names_are_those_of_the_header() -> None:
    assert build.CONSTANTS["kReadingCount"] == len(READINGS)


def test_the_ways_of_a_probe_are_the_fastest_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(way: probe.Way, threads: int) -> float:
        return 10.0 * way.streams + way.reading + threads

    monkeypatch.setattr(probe, "_pass_gb_s", rate)
    ways = probe.best_ways.__wrapped__(3)
    assert [str(way) for way in ways] == ["l2-6k x4", "l2-2k x4", "l1-6k x4", "l1-2k x4"]
    monkeypatch.setattr(probe, "best_ways", lambda threads: ways)
    monkeypatch.setattr(probe, "_won", probe.defaultdict(probe.Counter))
    assert probe.probe_winner(3) == ""
    assert [probe.read_bandwidth_gb_s(3, seconds=0.0) for _ in range(2)] == [47.0, 47.0]
    assert probe.probe_winner(3) == "l2-6k x4, the fastest in 2 of 2 probes"


def test_in_each_turn_the_best_ways_read_other_parts_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ways, read = probe.WAYS[:4], []

    def rate(data: torch.Tensor, way: probe.Way, threads: int) -> float:
        read.append((way, data.data_ptr() - probe._buffer().data_ptr(), data.numel()))
        return float(ways.index(way))

    monkeypatch.setattr(probe, "best_ways", lambda threads: ways)
    monkeypatch.setattr(probe, "_gb_s", rate)
    monkeypatch.setattr(probe, "_won", probe.defaultdict(probe.Counter))
    turns = [probe.rates_now_gb_s(2) for _ in range(4)]
    part = probe.PROBE_BYTES // 4
    timed = [(way, begin) for way, begin, size in read if size == part]
    assert set(timed) == {(way, number * part) for way in ways for number in range(4)}
    assert probe.fastest_of(turns, 2) == ways[3]
    assert probe.probe_winner(2) == f"{ways[3]}, the fastest in 4 of 4 probes"
    assert probe.probe_memory()[0].numel() == probe.PROBE_BYTES


@pytest.mark.parametrize("threads", [1, 2])
def test_no_independent_reader_beats_the_probe(threads: int) -> None:
    """The C library's search for an absent byte also reads each line once."""
    data = probe._buffer()
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    share = data.numel() // threads

    def searched(thread: int) -> None:
        assert search(data.data_ptr() + thread * share, 7, share) is None

    with ThreadPoolExecutor(threads) as pool:
        for _ in range(ATTEMPTS):
            search_gb_s = 0.0
            probe_gb_s = probe.read_bandwidth_gb_s(threads, seconds=0.1)
            for _ in range(4):
                start = perf_counter()
                list(pool.map(searched, range(threads)))
                search_gb_s = max(search_gb_s, data.numel() / (perf_counter() - start) / 1e9)
            probe_gb_s = max(probe_gb_s, probe.read_bandwidth_gb_s(threads, seconds=0.1))
            if search_gb_s < NOISE * probe_gb_s:
                return
    raise AssertionError(f"the C library read {search_gb_s:.1f} GB/s, the probe {probe_gb_s:.1f}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_independent_gemm_multiplies_faster_than_the_probe(dtype: torch.dtype) -> None:
    """Compares with PyTorch, for matrices that stay in the caches."""
    size = 384
    a, b, out = (torch.ones(size, size, dtype=dtype) for _ in range(3))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        probe_gflop_s = torch_gflop_s = 0.0
        for _ in range(ATTEMPTS):
            probe_gflop_s = max(probe_gflop_s, probe.peak_gflop_s(dtype, 1))
            for _ in range(20):
                start = perf_counter()
                torch.mm(a, b, out=out)
                torch_gflop_s = max(torch_gflop_s, 2 * size**3 / (perf_counter() - start) / 1e9)
            if torch_gflop_s < NOISE * probe_gflop_s:
                return
    finally:
        torch.set_num_threads(threads)
    raise AssertionError(f"PyTorch made {torch_gflop_s:.0f} GFLOP/s, the probe {probe_gflop_s:.0f}")
