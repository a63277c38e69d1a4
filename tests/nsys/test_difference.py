"""The parts of a difference add up to the measured difference of any two traces, and each is what its name says."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers.sweeps import sweep, swept
from helpers.traces.handmade import FUSED, VANILLA, Does, Recorder, decode, disorder, layers, slower

from labkit.nsys.analysis import resampling
from labkit.nsys.analysis.decomposition import StepPart
from labkit.nsys.analysis.difference import STEPS_NEEDED, Difference, explain
from labkit.nsys.analysis.stage_table import IDLE, NO_STAGE
from labkit.nsys.analysis.steps import steps
from labkit.nsys.trace import Trace, TraceError
from labkit.stages import Phase
from labkit.statistics import Verdict

MIRRORED = {StepPart.REMOVED: StepPart.ADDED, StepPart.ADDED: StepPart.REMOVED}


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resampling, "RESAMPLES", 299)


def parts(difference: Difference) -> dict[StepPart, float]:
    """The parts that are not zero, in microseconds."""
    return {part: 1e3 * ms for part, ms in difference.parts["ms"].items() if abs(ms) > 1e-9}


def measured_ms(trace: Trace) -> float:
    """Mean time of the steps that all ranks have and that have a known end."""
    table = steps(trace)
    by_index = table.groupby("index").agg(ranks=("whole", "size"), whole=("whole", "all"), ns=("duration_ns", "mean"))
    by_index = by_index[by_index["ranks"] == table.groupby(["process", "tid"]).ngroups]
    whole = by_index[by_index["whole"]] if by_index["whole"].sum() > 1 else by_index
    return float(whole["ns"].mean() / 1e6)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("seed", swept(range(16), ("0", "3")))
def test_the_parts_add_up_to_the_measured_difference(seed: int, gpu: bool) -> None:
    vanilla, fused = (disorder(seed + offset, steps=3 + seed % 5, ranks=1 + seed % 2, gpu=gpu) for offset in (0, 1000))
    difference = explain(vanilla, fused, keep_warm_up=True)
    assert difference.step.ms == pytest.approx(measured_ms(vanilla) - measured_ms(fused))
    assert difference.parts["ms"].sum() == pytest.approx(difference.step.ms)
    assert difference.by_stage["ms"].sum() == pytest.approx(difference.step.ms)
    assert difference.by_stage["vanilla_ms"].sum() == pytest.approx(measured_ms(vanilla))
    assert difference.by_stage["fused_ms"].sum() == pytest.approx(measured_ms(fused))
    assert not difference.parts.isna().any(axis=None)


@pytest.mark.parametrize("seed", range(6))
def test_the_other_way_round_every_part_has_the_other_sign(seed: int) -> None:
    vanilla, fused = disorder(seed), disorder(seed + 500)
    forward, backward = explain(vanilla, fused).parts["ms"], explain(fused, vanilla).parts["ms"]
    for part in StepPart:
        assert forward[part] == pytest.approx(-backward[MIRRORED.get(part, part)], abs=1e-12)


@pytest.mark.parametrize("gpu", [True, False])
def test_a_capture_is_the_same_as_itself(gpu: bool) -> None:
    trace = decode(layers(VANILLA, 2), steps=10, noise=0.003, gpu=gpu)
    difference = explain(trace, trace)
    assert parts(difference) == {}
    assert difference.verdict is Verdict.SAME
    assert set(difference.by_stage["verdict"]) <= {Verdict.SAME, Verdict.UNDECIDED}


def test_removed_and_faster_kernels_have_their_share() -> None:
    """The GPU is always busy; four kernels of 50 us and two of 30 us become one of 80 us and two of 20 us."""
    vanilla = {"embed": Does(1, 500, 2), "layer.0/qkv": Does(4, 50, 2), "layer.0/mlp": Does(2, 30, 2)}
    fused = {"embed": Does(1, 500, 2), "layer.0/qkv": Does(1, 80, 2), "layer.0/mlp": Does(2, 20, 2)}
    difference = explain(decode(vanilla, steps=6), decode(fused, steps=6))
    assert parts(difference) == pytest.approx({StepPart.REMOVED: 150.0, StepPart.FASTER: -30.0 + 20.0})
    assert difference.parts.loc[StepPart.REMOVED, "name"] == "removed kernels"
    assert difference.parts.loc[StepPart.FASTER, "name"] == "slower kernels"
    assert difference.parts.loc[StepPart.REMOVED, "note"] == "4 → 1 a step"
    assert difference.verdict is Verdict.FASTER


def test_added_kernels_are_a_part_of_their_own() -> None:
    vanilla = {"embed": Does(1, 500, 2), "layer.0/qkv": Does(1, 80, 2), "layer.0/mlp": Does(3, 10, 2)}
    fused = {"embed": Does(1, 500, 2), "layer.0/qkv": Does(4, 50, 2), "lm_head": Does(1, 7, 2)}
    difference = explain(decode(vanilla, steps=6), decode(fused, steps=6))
    assert parts(difference) == pytest.approx(
        {StepPart.REMOVED: 30.0, StepPart.ADDED: -150.0 - 7.0, StepPart.FASTER: 30.0}
    )


def test_launches_that_the_gpu_waits_for_are_gaps() -> None:
    slow, fast = (decode({"embed": Does(5, 1.0, launch)}, steps=8) for launch in (30.0, 10.0))
    difference = explain(slow, fast)
    assert parts(difference) == pytest.approx({StepPart.GAPS: 5 * 20.0})
    assert "in which nothing runs" in difference.parts.loc[StepPart.GAPS, "note"]


def all_reduces(kernel_us: float, hidden_us: float) -> Trace:
    """Six steps of 100 us of computing; an all-reduce begins `hidden_us` before the end of computing."""
    recorder = Recorder()
    for step in range(6):
        begin = 100 * step + step * (kernel_us - hidden_us)
        recorder.range("decode/step", begin, begin + 50)
        recorder.range("decode/embed", begin, begin + 10)
        recorder.kernel(begin + 1, begin + 2, begin + 102)
        recorder.range("decode/layer.0/all_reduce", begin + 20, begin + 30)
        reduced = begin + 102 - hidden_us
        recorder.kernel(begin + 21, reduced, reduced + kernel_us, stream=8)
    return recorder.trace()


def test_only_exposed_communication_counts_and_hiding_it_saves_it() -> None:
    difference = explain(all_reduces(30, 0), all_reduces(30, 25))
    assert parts(difference) == pytest.approx({StepPart.COMMUNICATION: 25.0})
    assert difference.by_stage.loc["overlap", "fused_ms"] == pytest.approx(-0.025)
    assert difference.by_stage.loc["all_reduce", "ms"] == pytest.approx(0)


def test_work_of_no_stage_is_unexplained() -> None:
    def trace(unstaged_us: float) -> Trace:
        recorder = Recorder()
        for step in range(6):
            begin = step * (50 + unstaged_us)
            recorder.range("decode/step", begin, begin + 20)
            recorder.range("decode/embed", begin, begin + 10)
            recorder.kernel(begin + 1, begin + 2, begin + 52)
            recorder.kernel(begin + 15, begin + 52, begin + 52 + unstaged_us)
        return recorder.trace()

    difference = explain(trace(20), trace(5))
    assert parts(difference) == pytest.approx({StepPart.UNEXPLAINED: 15.0})
    assert difference.by_stage.loc[NO_STAGE, ["vanilla_ms", "fused_ms"]].tolist() == pytest.approx([0.020, 0.005])
    assert "71% of vanilla's GPU time and 91% of fused's" in difference.remarks[0]


def test_joined_stages_are_compared_with_the_sum_of_what_they_join() -> None:
    apart = {"embed": Does(1, 500, 2)}
    apart |= {
        f"layer.{layer}/{stage}": Does(2, 20, 2) for layer in (0, 1) for stage in ("qkv", "mlp", "attn_out", "mlp_out")
    }
    joined = {"embed": Does(1, 500, 2)}
    joined |= {
        f"layer.{layer}/{stage}": Does(1, 70, 2) for layer in (0, 1) for stage in ("qkv+mlp", "attn_out+mlp_out")
    }
    difference = explain(decode(apart, steps=6), decode(joined, steps=6))
    assert parts(difference) == pytest.approx({StepPart.REMOVED: 4 * 60.0, StepPart.FASTER: -4 * 50.0})
    assert difference.by_stage.loc[["qkv+mlp", "attn_out+mlp_out"], "ms"].tolist() == pytest.approx([0.02, 0.02])
    assert not {"qkv", "mlp", "attn_out", "mlp_out"} & set(difference.by_stage.index)


def test_layers_are_compared_one_by_one_where_both_sides_have_them() -> None:
    """Layer 0 loses a slow kernel and layer 1 gains a fast one; over all layers the number of kernels is the same."""
    vanilla = {"embed": Does(1, 500, 2), "layer.0/mlp": Does(2, 40, 2), "layer.1/mlp": Does(1, 10, 2)}
    fused = {"embed": Does(1, 500, 2), "layer.0/mlp": Does(1, 40, 2), "layer.1/mlp": Does(2, 10, 2)}
    difference = explain(decode(vanilla, steps=6), decode(fused, steps=6))
    assert parts(difference) == pytest.approx({StepPart.REMOVED: 40.0, StepPart.ADDED: -10.0})
    without = {"embed": Does(1, 500, 2), "mlp": Does(3, 20, 2)}
    difference = explain(decode(vanilla, steps=6), decode(without, steps=6))
    assert parts(difference) == pytest.approx({StepPart.FASTER: 30.0})


def test_on_a_cpu_stages_and_the_time_between_them_are_compared() -> None:
    vanilla = decode(
        {"embed": Does(0, 0, 10), "layer.0/mlp": Does(0, 0, 60), "sample": Does(0, 0, 8)}, gpu=False, between_us=5
    )
    fused = decode({"embed": Does(0, 0, 10), "layer.0/mlp": Does(0, 0, 20)}, gpu=False, between_us=2)
    difference = explain(vanilla, fused)
    assert difference.unit == "ranges of stages"
    assert parts(difference) == pytest.approx({StepPart.REMOVED: 8.0, StepPart.FASTER: 40.0, StepPart.GAPS: 15.0 - 4.0})
    assert difference.parts["name"].tolist()[:4] == [
        "removed stages",
        "added stages",
        "faster stages",
        "gaps between stages",
    ]


def test_operators_are_compared_where_both_captures_have_them() -> None:
    """The time between operators is 10 % of each operator's slot."""
    vanilla, fused = {"embed": Does(5, 20, 0), "mlp": Does(4, 30, 0)}, {"embed": Does(5, 20, 0), "mlp": Does(1, 50, 0)}
    with_them, without = (decode(vanilla, gpu=False, operators=operators) for operators in (True, False))
    difference = explain(with_them, decode(fused, gpu=False, operators=True))
    assert difference.unit == "operators"
    assert parts(difference) == pytest.approx(
        {StepPart.REMOVED: 81.0, StepPart.FASTER: -18.0, StepPart.GAPS: 7.0}, abs=0.01
    )
    assert difference.by_stage.loc[["mlp", IDLE], "ms"].tolist() == pytest.approx([0.070, 0.0], abs=1e-4)
    assert explain(without, decode(fused, gpu=False, operators=True)).unit == "ranges of stages"


def test_a_stage_whose_kernels_the_profiler_does_not_see_is_one_piece() -> None:
    """Its only operator allocates memory for 1 us; the kernel itself is not an operator of PyTorch."""
    recorder = Recorder()
    for step in range(6):
        recorder.range("decode/step", 100 * step, 100 * step + 50)
        recorder.range("decode/embed", 100 * step, 100 * step + 50)
        recorder.operator("aten::empty", 100 * step + 1, 100 * step + 2)
    difference = explain(decode({"embed": Does(5, 20, 0)}, steps=6, gpu=False, operators=True), recorder.trace())
    assert parts(difference) == pytest.approx(
        {StepPart.REMOVED: 4 * 18.0, StepPart.FASTER: 18.0 - 50.0, StepPart.GAPS: 10.0}, abs=0.01
    )


def test_ranks_are_averaged() -> None:
    def trace(*step_us: float) -> Trace:
        recorder = Recorder()
        for process, us in enumerate(step_us):
            for step in range(6):
                recorder.range("decode/step", 1000 * step, 1000 * step + us, process=process)
                recorder.range("decode/embed", 1000 * step, 1000 * step + us, process=process)
        return recorder.trace(ranks=range(len(step_us)))

    difference = explain(trace(100, 140), trace(50, 60))
    assert difference.step.ms == pytest.approx(0.120 - 0.055)
    assert any("mean of 2 ranks" in remark for remark in difference.remarks)


def test_the_interval_holds_the_true_difference_and_grows_with_noise() -> None:
    widths = []
    for noise in (0.01, 0.1):
        difference = explain(
            decode(VANILLA, steps=30, noise=noise, gpu=False), decode(FUSED, steps=30, noise=noise, seed=1, gpu=False)
        )
        true_ms = sum(does.kernels * (does.kernel_us + does.launch_us) for does in VANILLA.values()) / 1e3
        true_ms -= sum(does.kernels * (does.kernel_us + does.launch_us) for does in FUSED.values()) / 1e3
        assert difference.step.low_ms - 0.001 < true_ms < difference.step.high_ms + 0.001
        assert (difference.parts["low_ms"] <= difference.parts["ms"] + 1e-12).all()
        assert (difference.parts["ms"] <= difference.parts["high_ms"] + 1e-12).all()
        widths.append(difference.step.high_ms - difference.step.low_ms)
    assert widths[1] > 3 * widths[0]


@pytest.mark.parametrize("count", [1, 2, STEPS_NEEDED - 1])
def test_too_few_steps_give_no_verdict(count: int) -> None:
    difference = explain(decode(VANILLA, steps=count, gpu=False), decode(FUSED, steps=20, gpu=False))
    assert difference.verdict is Verdict.UNDECIDED
    assert set(difference.by_stage["verdict"]) == {Verdict.UNDECIDED}
    assert np.isnan(difference.step.low_ms) == (count == 1)
    assert difference.headline.startswith("undecided: vanilla - fused is +")
    assert any(f"a verdict {STEPS_NEEDED}" in remark for remark in difference.remarks)


@sweep
def test_noise_keeps_two_equal_sides_undecided_or_the_same() -> None:
    verdicts = [
        explain(
            decode(VANILLA, noise=0.3, seed=seed, gpu=False), decode(VANILLA, noise=0.3, seed=seed + 99, gpu=False)
        ).verdict
        for seed in range(16)
    ]
    assert sum(verdict in (Verdict.FASTER, Verdict.SLOWER) for verdict in verdicts) <= 1


@pytest.mark.parametrize("count", [5, 14])
def test_warm_up_is_left_out_unless_kept(count: int) -> None:
    cold, warm = (decode(VANILLA, steps=count, noise=0.01, gpu=False, first_us=first) for first in (2000, 0))
    difference, kept = explain(cold, warm), explain(cold, warm, keep_warm_up=True)
    assert difference.vanilla.steps == count - 1
    assert any("the first step" in remark and "left out" in remark for remark in difference.remarks)
    assert abs(difference.step.ms) < 0.01
    assert kept.vanilla.steps == count
    assert parts(kept)[StepPart.GAPS] == pytest.approx(2000 / count, rel=0.01)
    assert not any("warm-up" in remark for remark in kept.remarks)


def test_a_slow_step_later_on_is_kept_and_remarked() -> None:
    recorder = Recorder()
    for step in range(20):
        length = 500 if step == 11 else 100 + step % 3
        recorder.range("decode/step", 1000 * step, 1000 * step + length)
        recorder.range("decode/embed", 1000 * step, 1000 * step + length)
    difference = explain(recorder.trace(), recorder.trace())
    assert difference.vanilla.steps == 20
    assert "vanilla: 1 of 20 steps are outliers, kept" in difference.remarks


def test_prefill_and_decode_are_explained_apart() -> None:
    recorder = Recorder()
    for run in range(6):
        for phase, start, length in (("prefill", 0, 80), ("decode", 80, 10)):
            recorder.range(f"{phase}/step", 1000 * run + start, 1000 * run + start + length)
            recorder.range(f"{phase}/embed", 1000 * run + start, 1000 * run + start + length)
    trace = recorder.trace()
    assert explain(trace, trace, Phase.PREFILL).vanilla.mean_ms == pytest.approx(0.080)
    assert explain(trace, trace).vanilla.mean_ms == pytest.approx(0.010)


def test_the_words_agree_with_the_figures() -> None:
    vanilla, fused = decode(slower(VANILLA, 20), noise=0.01), decode(slower(FUSED, 20), noise=0.01, seed=1)
    difference, reverse = explain(vanilla, fused), explain(fused, vanilla, names=("mine", "yours"))
    ms, low, high = (f"{value:.2f}" for value in (difference.step.ms, difference.step.low_ms, difference.step.high_ms))
    assert difference.headline.startswith(
        f"fused is faster than vanilla by {ms} ms [{low}, {high}] per decode step: removed "
    )
    assert reverse.headline.startswith(f"yours is slower than mine by {ms} ms [")
    for row in difference.shown_parts.itertuples():
        assert f"{-row.ms:+.2f} ms" in difference.text()
        assert row.name in difference.text()
    for remark in difference.remarks:
        assert remark in difference.text()


def swapped(trace: Trace, old: str, new: str) -> Trace:
    names = trace.ranges["name"].cat.rename_categories(lambda name: name.replace(old, new))
    return replace(trace, ranges=trace.ranges.assign(name=names))


REFUSED: dict[str, tuple[Callable[[], Trace], Callable[[], Trace], str]] = {
    "no stage in common": (
        lambda: decode({"layer.0/qkv": Does()}),
        lambda: decode({"layer.0/mlp": Does()}),
        "share no stage .vanilla: qkv and fused: mlp.*annotate",
    ),
    "no stage at all": (
        lambda: decode(VANILLA, gpu=False),
        lambda: decode({}, between_us=5),
        "share no stage .*fused: none",
    ),
    "no such phase": (
        lambda: decode(VANILLA),
        lambda: decode(VANILLA, phase=Phase.PREFILL, steps=3),
        "fused has no step of decode, but 3 of prefill",
    ),
    "a GPU against a CPU": (
        lambda: decode(VANILLA, gpu=False),
        lambda: decode(FUSED),
        "the steps of fused are timed on the GPU, the steps of vanilla on the CPU",
    ),
    "no range": (lambda: decode(VANILLA), lambda: Recorder().trace(), "no range of labkit"),
    "other names": (lambda: decode(VANILLA), lambda: swapped(decode(FUSED), "decode", "step"), "no range of labkit"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_compared_is_refused_with_a_reason(why: str) -> None:
    vanilla, fused, message = REFUSED[why]
    with pytest.raises(TraceError, match=message):
        explain(vanilla(), fused())
