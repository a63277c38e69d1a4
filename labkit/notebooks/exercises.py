"""Checks for the notebooks' exercises: which answers are right, and which mistake a wrong one suggests.

An answer may be anything that somebody types into a cell. One that is no number is told so like any other wrong answer,
without an exception; settings such as the name of a model raise a UserError.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING

from IPython.display import Markdown

from labkit.figures.frames import number
from labkit.system.errors import UserTypeError

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from labkit.harness import Comparison
    from labkit.models.config import ModelConfig
    from labkit.studies.traces import CapturePair

TOLERANCE = 0.01
WHY_SUMS = {
    1: "its attention and its MLP start from the same rows and are both added to the residual, so a rank adds up its "
    "own two parts first",
    2: "its MLP starts from rows that attention was added to, so these must be whole first, and the MLP's own parts "
    "are summed behind it",
}
WRONG_SUMS = {
    0: "a rank has only its heads' part of each output, and the next norm needs the whole",
    1: "what does its MLP start from, and is that whole on every rank by then?",
    2: "two sums can be one where nothing in between needs the first; what does its MLP start from?",
    4: "a matrix cut by rows has whole outputs, and each rank needs only its own; which ones are cut by columns?",
}


def model_shape(name: str) -> Markdown:
    """What a model is made of, and where its weights come from: the numbers that every exercise starts with."""
    from labkit.models.policies import model_config_of
    from labkit.weights.resolve import resolve

    _require_text("model", name)
    source = resolve(name)
    config = model_config_of(source.hf_config)
    rows = {
        "weights": source.origin,
        "architecture": config.architecture,
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "heads": f"{config.num_heads} of {config.head_dim}; {config.num_kv_heads} for keys and values",
        "MLP size": f"{config.intermediate_size:,}" + (", gated" if config.gated else ""),
        "vocabulary": f"{config.vocab_size:,}; the head {'is' if config.tied_head else 'is not'} the embedding",
    }
    return Markdown(f"| | {name} |\n|---|---|\n" + "\n".join(f"| {row} | {value} |" for row, value in rows.items()))


def check_limit(comparison: Comparison, read_mb: object, limit_ms: object) -> Markdown:
    """The verdicts on two answers: the MB that a decode step has to read, and the least milliseconds that this takes.

    An answer is right within 1 % of what the record counts.
    """
    work, bandwidth = comparison.candidate.work, comparison.read_bandwidth_gb_s
    if work is None or bandwidth is None:
        return Markdown("This record counts no bytes or has no bandwidth probe: there is nothing to check against.")
    bytes_verdict = _check(
        read_mb,
        work.decode_bytes / 1e6,
        {
            work.weight_bytes / 1e6: "these are all weights; a step also reads the keys and values of the context, "
            "and of the embedding only one row per sequence",
        },
    )
    time_verdict = _check(
        limit_ms,
        work.floor_ms(bandwidth),
        {work.floor_ms(bandwidth) / 1e3: "these are seconds", work.floor_ms(bandwidth) * 1e3: "these are microseconds"},
    )
    return Markdown(f"- MB read per step: {bytes_verdict}\n- least ms per step: {time_verdict}")


def try_kernel(region: str, dtype: str = "float32") -> Markdown:
    """Compiles the kernels as their sources are now, compares `region` with the unfused ops, and times it.

    The C++ of a region is in kernels/, in the folder of its op; edit it, and run the cell again.
    """
    from labkit.harness.regions.trial import try_kernel as trial
    from labkit.harness.regions.vocabulary import OP_OF
    from labkit.kernels.build import SOURCES
    from labkit.stages import Stage

    _require_text("region", region)
    _require_text("dtype", dtype)
    found = trial(region, dtype=dtype)
    source = SOURCES / OP_OF[Stage(region)] / "cpp_impl.cpp"
    if found.problem is not None:
        return Markdown(f"**not yet**: `{region}`: {found.problem}\n\nIts source: `{source}`")
    assert found.fused_us is not None
    assert found.unfused_us is not None
    times = f"{number(found.fused_us)} µs, the torch ops {number(found.unfused_us)} µs"
    return Markdown(f"**right**: `{region}` computes what the unfused ops do. A call takes {times} (gpt2, batch 1).")


def check_gap(pair: CapturePair, share: object) -> Markdown:
    """The verdict on an answer: the share of the vanilla step, in percent, of the stage that fusing changed most.

    It is right within 1 percentage point of the stage table.
    """
    stages = pair.difference.by_stage
    most = stages["ms"].abs().idxmax()
    right = 100 * float(stages.loc[most, "vanilla_ms"]) / pair.difference.vanilla.mean_ms
    answer = _number_or_remark(share)
    if isinstance(answer, str):
        return Markdown(f"- `{most}` changed most; its share of the vanilla step: {answer}")
    if abs(answer - right) <= 1:
        return Markdown(f"- `{most}`: **right**: {right:.1f} % of the vanilla step")
    if abs(answer * 100 - right) <= 1:
        return Markdown(f"- `{most}`: not yet: {answer} is a fraction; expected percent")
    return Markdown(f"- `{most}`: not yet: {number(answer)} % is too {'high' if answer > right else 'low'}")


def model_cut(name: str, ranks: int) -> go.Figure:
    """What each of `ranks` ranks holds of the model called `name`. Its weights are not needed for it."""
    from labkit.figures.parallel import cut_figure

    if not isinstance(ranks, int) or ranks < 1:
        raise UserTypeError(f"ranks: got {_shown(ranks)}, expected a number of ranks, such as 2")
    return cut_figure(_config(name), ranks)


def check_sums(model: str, all_reduces: object, kb_per_token: object) -> Markdown:
    """The verdicts on two answers about sums over the ranks.

    all_reduces: how many a layer of a model needs, by the model's name. kb_per_token: the KB (of 1,000 bytes) that a
    rank of `model` brings to the sums of all layers in one decode step at batch 1.

    Every model is judged by its own architecture.
    """
    config = _config(model)
    if isinstance(all_reduces, Mapping):
        verdicts = [f"- a layer of {name}: {_check_count(_config(name), count)}" for name, count in all_reduces.items()]
    else:
        verdicts = [f"- sums of a layer: not yet: got {_shown(all_reduces)}, expected a dict such as {{{model!r}: 3}}"]
    layer_kb = sums_per_layer(config) * config.hidden_size * 4 / 1e3
    right = config.num_layers * layer_kb
    mistakes = {
        layer_kb: "this is one layer's; a step has all of them",
        right / 2: "these are half of it: two bytes each? The parts are summed in float32, whatever the weights are",
        right / 1.024: "a KB of 1,024 bytes; here it has 1,000",
        right / 4: "these are numbers; of float32, each has four bytes",
    }
    return Markdown(
        "\n".join([*verdicts, f"- KB per rank and token of {model}: {_check(kb_per_token, right, mistakes)}"])
    )


def sums_per_layer(config: ModelConfig) -> int:
    """How many sums over the ranks a layer needs: one where attention and MLP start from the same rows, else two."""
    return 1 if config.parallel_residual else 2


def _check_count(config: ModelConfig, answer: object) -> str:
    right, count = sums_per_layer(config), _number_or_remark(answer)
    if isinstance(count, str):
        return count
    if count == right:
        return f"**right**: {right}; {WHY_SUMS[right]}"
    if count in WRONG_SUMS:
        return f"not yet: {WRONG_SUMS[int(count)]}"
    if count == right * config.num_layers:
        return "not yet: these are those of all layers"
    return "not yet: which of its matrices leave every rank with a part of every output?"


def _config(name: str) -> ModelConfig:
    from labkit.models.policies import model_config_of
    from labkit.models.presets import PRESETS
    from labkit.weights.resolve import resolve

    _require_text("model", name)
    hf_config = PRESETS[name].hf_config if name in PRESETS else resolve(name).hf_config
    return model_config_of(hf_config)


def _require_text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise UserTypeError(f"{what}: got {_shown(value)}, expected its name as text")


def _number_or_remark(answer: object) -> float | str:
    """The answer as a number, or what to say of one that is missing or is no number."""
    if answer is None:
        return "not answered yet"
    if not isinstance(answer, Real) or isinstance(answer, bool):
        return f"not yet: got {_shown(answer)}, expected a number, such as 12.5"
    try:
        value = float(answer)
    except OverflowError:
        value = math.inf
    return value if math.isfinite(value) else f"not yet: got {_shown(answer)}, expected a finite number"


def _shown(value: object) -> str:
    """A value of any type in a few words on one line."""
    return f"`{' '.join(reprlib.repr(value).split())}` ({type(value).__name__})"


def _check(given: object, right: float, mistakes: dict[float, str]) -> str:
    answer = _number_or_remark(given)
    if isinstance(answer, str):
        return answer
    if _close(answer, right):
        return f"**right**: {number(answer)}"
    for value, hint in mistakes.items():
        if _close(answer, value):
            return f"not yet: {hint}"
    for factor in (2, 4):
        if _close(answer, right * factor) or _close(answer, right / factor):
            return f"not yet: off by a factor of {factor}; bytes of a number, or something counted twice?"
    return f"not yet: {number(answer)} is too {'high' if answer > right else 'low'}"


def _close(answer: float, value: float) -> bool:
    return abs(answer - value) <= TOLERANCE * abs(value)
