"""Checks for the notebooks' exercises: whether an answer is right, and which mistake a wrong one suggests.

An answer may be any value that a user types into a cell. An answer of the wrong type gets a remark like any wrong
answer, not an exception. A wrong setting, such as the name of a model, raises a UserError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from IPython.display import Markdown

from labkit.notebooks.verdicts import TOLERANCE, checked, number_or_remark, require_text, shown
from labkit.studies.frames import number
from labkit.system.errors import UserTypeError
from labkit.system.nearest import did_you_mean

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from transformers import PretrainedConfig

    from labkit.harness import Comparison
    from labkit.models.config import ModelConfig
    from labkit.studies.kernels import KernelStudy
    from labkit.studies.matrix_errors import StoredMatrices
    from labkit.studies.precision_study import PrecisionStudy
    from labkit.studies.traces import CapturePair

GROWN = 8  # sequences in the exercise on the batch
YOURS = "yours"  # stands for the model of the run in the exercise on sums
BATCH, CONTEXT = 8, 1024  # in the exercise on the limit: sequences, and tokens that each attends to
BUDGET_BITS = 4.6  # bits per number of the layers, scales included, in the exercise on groups
AS_GOOD = 1.02  # an error up to this factor above the least counts as equally good
WHY_SUMS = {
    1: "its attention and its MLP start from the same rows and are both added to the residual, so a rank adds its own "
    "two parts first",
    2: "its MLP starts from the rows after attention, so these must be summed first, and the MLP's own parts are "
    "summed after it",
}
WRONG_SUMS = {
    0: "a rank has only its heads' part of each output, and the next norm needs the whole",
    1: "which rows does its MLP start from, and are they whole on every rank by then?",
    2: "two sums can be one if nothing in between needs the first; which rows does its MLP start from?",
    4: "a matrix cut by rows has whole outputs, and each rank needs only its own; which ones are cut by columns?",
}


def check_limit(comparison: Comparison, read_mb: object, limit_ms: object) -> Markdown:
    """The verdicts on two answers about a case that was not measured: the comparison's model in bfloat16, with BATCH
    sequences that attend to CONTEXT tokens each. How many MB does a decode step read, and how many ms does that take?

    An answer is right within 1 %. The time may also differ by the effect of rounding the bandwidth to whole GB/s.
    """
    from labkit.models.policies import known_policy

    bandwidth = comparison.read_bandwidth_gb_s
    if bandwidth is None:
        return Markdown("This record has no bandwidth probe, so the answers cannot be checked.")
    hf_config = _hf_config(comparison.case.model)
    policy = known_policy(hf_config)
    if policy is None:
        return Markdown("This model has no row, so labkit does not know its keys and values; take another model here.")
    single, batched, in_float32 = _read_mb(policy.model_config(hf_config))
    cache = (batched - single) / (BATCH - 1)
    mistakes = {
        single - cache: "these are the weights; every sequence has keys and values of its own",
        single: f"this is one sequence; there are {BATCH}, each with keys and values of its own",
        single * BATCH: "a step reads the weights once for all sequences",
        in_float32: "a bfloat16 number has two bytes",
    }
    bytes_verdict = checked(read_mb, batched, mistakes)
    least_ms = batched / bandwidth
    units = {least_ms / 1e3: "these are seconds", least_ms * 1e3: "these are microseconds"}
    time_verdict = checked(limit_ms, least_ms, units, tolerance=TOLERANCE + 0.5 / bandwidth)
    return Markdown(f"- MB read per step: {bytes_verdict}\n- least ms per step: {time_verdict}")


def _read_mb(config: ModelConfig) -> tuple[float, float, float]:
    """MB that a step in the exercise on the limit reads: for one sequence, for BATCH, and for BATCH in float32."""
    import torch

    from labkit.harness.roofline import decode_bytes

    cases = ((torch.bfloat16, 1), (torch.bfloat16, BATCH), (torch.float32, BATCH))
    single, batched, in_float32 = (decode_bytes(config, dtype, batch, CONTEXT) / 1e6 for dtype, batch in cases)
    return single, batched, in_float32


def try_kernel(region: str, dtype: str = "float32") -> Markdown:
    """Compiles the kernels from their current sources, judges the results of `region` on newly drawn layers, and times
    it. The kernel runs in a confined process of its own.

    The C++ of a region is in kernels/, in the folder of its op. Edit it, and run the cell again.
    """
    from labkit.harness.regions.trial import try_kernel as trial
    from labkit.harness.regions.vocabulary import OP_OF
    from labkit.kernels.build import SOURCES
    from labkit.stages import Stage

    require_text("region", region)
    require_text("dtype", dtype)
    result = trial(region, dtype=dtype)
    source = SOURCES / OP_OF[Stage(region)] / "cpp_impl.cpp"
    if result.problem is not None:
        return Markdown(f"**not yet**: `{region}`: {result.problem}\n\nIts source: `{source}`")
    assert result.fused_us is not None
    assert result.unfused_us is not None
    times = f"{number(result.fused_us)} µs, the torch ops {number(result.unfused_us)} µs, {result.gain}"
    return Markdown(
        f"**right**: `{region}` gives the right results on newly drawn layers. A call takes {times} (gpt2, batch 1). "
        f"It was confined by {', '.join(result.in_force)}."
    )


def check_gap(pair: CapturePair, stage: object, share: object, most_gain: object) -> Markdown:
    """The verdicts on three answers: the stage that fusing changed most, its share of the vanilla step in percent, and
    the vanilla step / the same step without this stage.

    The share is right within 1 percentage point, the gain within 2 %.
    """
    stages = pair.difference.by_stage
    most = str(stages["ms"].abs().idxmax())
    verdict = _check_name(stage, [str(name) for name in stages.index], most)
    if not isinstance(stage, str) or stage != most:
        rest = ("its share of the vanilla step", "the most gain")
        return Markdown("\n".join([f"- the stage: {verdict}", *(f"- {name}: name the stage first" for name in rest)]))
    step, of_stage = pair.difference.vanilla.mean_ms, float(stages.loc[most, "vanilla_ms"])
    mistakes = {
        step / of_stage: "this is the step / the stage; which time is left if the stage takes none?",
        (step - of_stage) / step: "this is the time that is left / the step; a gain is the old time / the new one",
    }
    gain = checked(most_gain, step / (step - of_stage), mistakes, tolerance=0.02)
    percent = _check_percent(share, 100 * of_stage / step)
    return Markdown(f"- the stage: {verdict}\n- its share of the vanilla step: {percent}\n- the most gain: {gain}")


def _check_name(answer: object, names: Sequence[str], right: str) -> str:
    if answer is None:
        return "not answered yet"
    if not isinstance(answer, str):
        return f"not yet: got {shown(answer)}, expected the name of a stage as text"
    if answer not in names:
        return f"not yet: got {shown(answer)}, expected the name of a stage{did_you_mean(answer, names)}"
    return f"**right**: `{right}`" if answer == right else f"not yet: another one changed more than `{answer}`"


def _check_percent(answer: object, right: float) -> str:
    share = number_or_remark(answer)
    if isinstance(share, str):
        return share
    if abs(share - right) <= 1:
        return f"**right**: {right:.1f} %"
    if abs(share * 100 - right) <= 1:
        return f"not yet: {share} is a fraction; expected percent"
    return f"not yet: {number(share)} % is too {'high' if share > right else 'low'}"


def model_cut(name: str, ranks: int) -> go.Figure:
    """A figure of the parts of the model `name` on each of `ranks` ranks. The model's weights are not loaded."""
    from labkit.figures.parallel import cut_figure

    if not isinstance(ranks, int) or ranks < 1:
        raise UserTypeError(f"ranks: got {shown(ranks)}, expected a number of ranks, such as 2")
    return cut_figure(_config(name), ranks)


def check_batches(study: KernelStudy, mlp_times: object, attention_times: object) -> Markdown:
    """The verdicts on two predictions for the model, type and context of a run. For GROWN sequences, how many times the
    bytes of one sequence do `mlp` and `attention` read?

    An answer is right within 5 %.
    """
    from labkit.harness.roofline import region_bytes
    from labkit.models.dtypes import dtype_of
    from labkit.stages import Stage

    case = study.regions[0].case
    config, dtype = _config(case.model), dtype_of(case.dtype)
    mistakes = {
        Stage.MLP: {float(GROWN): "a step reads the weights once for all sequences"},
        Stage.ATTENTION: {1.0: "every sequence has keys and values of its own"},
    }
    lines = []
    for region, answer in ((Stage.MLP, mlp_times), (Stage.ATTENTION, attention_times)):
        few, many = (region_bytes(config, region, dtype, batch, case.context) for batch in (1, GROWN))
        lines.append(f"- `{region}`: {checked(answer, many / few, mistakes[region], tolerance=0.05)}")
    return Markdown("\n".join(lines))


def check_sums(model: str, all_reduces: object, kb_per_token: object) -> Markdown:
    """The verdicts on two answers about sums over the ranks.

    - all_reduces: number of sums in a layer, by the model's name; "yours" stands for `model`.
    - kb_per_token: KB (1,000 bytes) that a rank of `model` contributes to the sums of all layers in one decode step at
      batch 1.

    Every model is judged by its own architecture.
    """
    config = _config(model)
    if isinstance(all_reduces, Mapping):
        counts = {model if name == YOURS else name: count for name, count in all_reduces.items()}
        verdicts = [f"- a layer of {name}: {_check_count(_config(name), count)}" for name, count in counts.items()]
    else:
        verdicts = [f"- sums of a layer: not yet: got {shown(all_reduces)}, expected a dict such as {{{model!r}: 3}}"]
    layer_kb = sums_per_layer(config) * config.hidden_size * 4 / 1e3
    right = config.num_layers * layer_kb
    mistakes = {
        layer_kb: "this is for one layer; a step has all layers",
        right / 2: "this is half of it: two bytes each? The parts are summed in float32, whatever the weights' type is",
        right / 1.024: "a KB of 1,024 bytes; here it has 1,000",
        right / 4: "this counts numbers; each has four bytes in float32",
    }
    return Markdown(
        "\n".join([*verdicts, f"- KB per rank and token of {model}: {checked(kb_per_token, right, mistakes)}"])
    )


def sums_per_layer(config: ModelConfig) -> int:
    """Number of sums over the ranks in a layer: one if attention and MLP start from the same rows, else two."""
    return 1 if config.parallel_residual else 2


def byte_budget(study: PrecisionStudy) -> Markdown:
    """The byte budget for the matrices of the layers in the exercise on groups, and the ways to store them."""
    names = ", ".join(f"`{name}`" for name in _choices(study))
    model = study.first.measurement.case.model
    return Markdown(
        f"The matrices of all layers of {model}, scales included, may take **{number(_budget_mb(study), 4)} MB** "
        f"(of 10^6 bytes). Choose among {names}."
    )


def check_groups(study: PrecisionStudy, precision: object, layer_mb: object) -> Markdown:
    """The verdicts on two answers: the precision of the layers that fits the byte budget and is closest to the model's
    own weights, and its size in MB.

    A precision whose error is within 2 % of the least is right, too.
    """
    verdict = _check_choice(study, precision)
    chosen = _choices(study).get(precision.strip()) if isinstance(precision, str) else None
    if chosen is None:
        return Markdown(f"- precision: {verdict}\n- MB of the layers: name one of the precisions first")
    codes = _layer_numbers(study) * _bits(chosen.precision) / 8e6
    right = chosen.layer_bytes / 1e6
    scales = right - codes
    mistakes = {
        codes: "this counts only the codes; each group has a scale, and an asymmetric group also a minimum",
        codes + scales / 2: "half of the groups' scales and minima is missing: a minimum, or the second byte of each",
        codes + 2 * scales: "scales and minima are float16: two bytes each; and a symmetric group has no minimum",
        right / 1.048576: "a MB of 1,024 x 1,024 bytes; here it has 10^6",
        right / _config(study.first.measurement.case.model).num_layers: "this is for one layer; count all layers",
    }
    return Markdown(f"- precision: {verdict}\n- MB of the layers in it: {checked(layer_mb, right, mistakes)}")


def _check_choice(study: PrecisionStudy, answer: object) -> str:
    choices, budget = _choices(study), _budget_mb(study) * 1e6
    if answer is None:
        return "not answered yet"
    if not isinstance(answer, str):
        return f"not yet: got {shown(answer)}, expected its name as text, such as `int8-32`"
    if (chosen := choices.get(answer.strip())) is None:
        remark = "; leave the LM head out" if "+" in answer else ""
        return f"not yet: got {shown(answer)}, expected one of {', '.join(f'`{name}`' for name in choices)}{remark}"
    if chosen.layer_bytes > budget:
        if _layer_numbers(study) * _bits(chosen.precision) / 8 > budget:
            return "not yet: its codes alone are more than the budget"
        return "not yet: its codes alone would fit, but not with the scales and minima of the groups"
    better = [
        choice for choice in choices.values() if choice.layer_bytes <= budget and choice.error * AS_GOOD < chosen.error
    ]
    if not better:
        return "**right**: it fits, and no other choice that fits is closer to the model's own weights"
    if all(choice.layer_bytes > chosen.layer_bytes for choice in better):
        return "not yet: it fits, but leaves bytes unused that would bring the weights closer to the model's own"
    return "not yet: it fits, but its bytes can be spent better: on smaller groups, or on a minimum for each?"


def _choices(study: PrecisionStudy) -> dict[str, StoredMatrices]:
    """The choices of the exercise that the model supports, by precision."""
    from labkit.studies.precision import CHOICES

    stored = {matrices.precision: matrices for matrices in study.stored}
    return {name: stored[name] for name in CHOICES if name in stored}


def _layer_numbers(study: PrecisionStudy) -> int:
    """Number of weights in the matrices of all layers."""
    config = _config(study.first.measurement.case.model)
    shapes = [shape for layer in range(config.num_layers) for shape in config.layer_shapes(layer).values()]
    return sum(math.prod(shape) for shape in shapes if len(shape) == 2)


def _budget_mb(study: PrecisionStudy) -> float:
    return _layer_numbers(study) * BUDGET_BITS / 8e6


def _bits(precision: str) -> int:
    return 4 if precision.startswith("int4") else 8


def _check_count(config: ModelConfig, answer: object) -> str:
    right, count = sums_per_layer(config), number_or_remark(answer)
    if isinstance(count, str):
        return count
    if count == right:
        return f"**right**: {right}; {WHY_SUMS[right]}"
    if count in WRONG_SUMS:
        return f"not yet: {WRONG_SUMS[int(count)]}"
    if count == right * config.num_layers:
        return "not yet: this is the number for all layers"
    return "not yet: which of its matrices leave every rank with a part of every output?"


def _config(name: str) -> ModelConfig:
    from labkit.models.policies import model_config_of

    return model_config_of(_hf_config(name))


def _hf_config(name: str) -> PretrainedConfig:
    from labkit.models.presets import PRESETS
    from labkit.weights.resolve import resolve

    require_text("model", name)
    return PRESETS[name].hf_config if name in PRESETS else resolve(name, any_architecture=True).hf_config
