"""Record of an evaluation. It holds figures of each window, from which summaries are computed on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from labkit.harness.environment import Environment
from labkit.harness.frozen_record import FrozenRecord, ResultRecord
from labkit.models.level_names import ROW, kernels_in_words
from labkit.statistics import Mean, mean_of_groups
from labkit.system.result_table import ResultTable, Tabular, frame_of

if TYPE_CHECKING:
    import pandas as pd

RANDOM = "random weights"  # beginning of the origin of untrained weights


class EvaluationCase(FrozenRecord):
    """An evaluated model, its text and its reference. Only tokens that no earlier window has predicted count."""

    model: str
    origin: str
    dtype: str
    quant: dict[str, Any]  # as for `init_inference`
    kv_dtype: str | None = None  # of the KV cache; None: the engine's own
    rows: int | None = None  # tokens read at a time; None: whole windows
    against: str  # the reference: a precision of the engine, or "vanilla"
    text: str
    tokens: int  # of the text
    window: int  # tokens of a window
    stride: int  # tokens from one window to the next
    threads: int
    bos: bool = False  # every window begins with a beginning-of-text token
    asked: int | None = None  # requested tokens; the text may have fewer


class WindowScore(FrozenRecord):
    """Means over the tokens that one window predicted."""

    tokens: int
    nll: float  # negative logarithm of the model's probability of the following token, in nats
    reference_nll: float
    kl: float  # divergence of the model's distribution from the reference's, in nats
    agreement: float  # share of tokens for which both have the same most likely token


class Evaluation(Tabular, ResultRecord):
    """How well a model predicts a text, compared with a more exact reference."""

    kind: Literal["evaluation"] = "evaluation"
    case: EvaluationCase
    environment: Environment
    impl: str
    level: str = ROW  # of the engine
    windows: tuple[WindowScore, ...] = Field(min_length=1)
    seconds: float  # compute time of the evaluated model, without the reference
    weights: str  # stored type, with that of the LM head
    weight_bytes: int  # of the evaluated model's matrices, packed

    @property
    def predicted(self) -> int:
        """The number of predicted tokens."""
        return sum(window.tokens for window in self.windows)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the windows that the evaluated model read per second."""
        case = self.case
        begins = starts(case.tokens, case.window, case.stride, bos=case.bos)
        return sum(case.bos + min(case.window, case.tokens - begin) for begin in begins) / self.seconds

    @property
    def trained(self) -> bool:
        """Whether the weights are trained. Random weights give each token about the same probability."""
        return not self.case.origin.startswith(RANDOM)

    @property
    def perplexity(self) -> Mean:
        """exp(mean nll over tokens), with its interval over windows."""
        return self._mean("nll").map(np.exp)

    @property
    def reference_perplexity(self) -> Mean:
        """exp(mean nll of the reference over tokens), with its interval over windows."""
        return self._mean("reference_nll").map(np.exp)

    @property
    def perplexity_change(self) -> Mean:
        """Perplexity / the reference's perplexity, minus 1. The interval comes from the windows' differences, which
        vary far less than the windows themselves.
        """
        differences = [window.nll - window.reference_nll for window in self.windows]
        return mean_of_groups(differences, self._sizes).map(np.expm1)

    @property
    def kl(self) -> Mean:
        """Mean divergence over tokens, in nats."""
        return self._mean("kl").map(lambda nats: max(nats, 0.0))

    @property
    def agreement(self) -> Mean:
        """Share of tokens whose most likely next token is the reference's."""
        return self._mean("agreement").map(lambda share: min(max(share, 0.0), 1.0))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Limits of these figures."""
        limits = []
        if not self.trained:
            limits.append("perplexity means nothing here: the weights are random; look at KL and agreement")
        if (asked := self.case.asked or 0) > self.case.tokens:
            limits.append(f"the text has {self.case.tokens:,} tokens; {asked:,} were asked for")
        if len(self.windows) == 1:
            limits.append("one window gives no interval; use more tokens, or a smaller window")
        return tuple(limits)

    def to_frame(self) -> pd.DataFrame:
        """A row for each window: the machine and the case, the window's index, and the fields of `WindowScore`."""
        case = self.case.model_dump(include={"model", "origin", "dtype", "kv_dtype", "against", "text", "threads"})
        head = {"machine": self.environment.machine, **case, "impl": self.impl}
        rows = ({"window": index} | score.model_dump() for index, score in enumerate(self.windows))
        return frame_of([head | row for row in rows])

    def table(self) -> ResultTable:
        """Perplexity (of trained weights), divergence and agreement, with their intervals over windows."""
        case, rows = self.case, []
        if self.trained:
            rows += [
                ("perplexity", *_cells(self.perplexity, "{:.4f}")),
                (f"perplexity of {case.against}", *_cells(self.reference_perplexity, "{:.4f}")),
                ("change", *_cells(self.perplexity_change, "{:+.3%}")),
            ]
        rows += [
            ("KL divergence, nats a token", *_cells(self.kl, "{:.3g}")),
            ("same most likely token", *_cells(self.agreement, "{:.2%}")),
        ]
        windows = "1 window" if len(self.windows) == 1 else f"{len(self.windows)} windows"
        return ResultTable(
            title=f"{case.model}, {case.dtype}, against {case.against}",
            columns=("", "value", "95 %"),
            rows=tuple(rows),
            notes=(
                f"{self.predicted:,} tokens predicted in {windows} of {case.window} tokens, of {case.text}",
                f"{'a' if case.bos else 'no'} beginning-of-text token in front of every window",
                f"{self.tokens_per_s:,.0f} tokens a second, {kernels_in_words(self.impl, self.level)}",
                f"{self.weight_bytes / 1e6:,.1f} MB of {self.weights} weights{_deviations(case)}; {case.origin}",
                f"machine: {self.environment.machine}",
                *(f"note: {remark}" for remark in self.remarks),
            ),
        )

    def as_dict(self) -> dict[str, Any]:
        """The figures, as `labkit evaluate --json` shows them."""
        perplexities = ("perplexity", "reference_perplexity", "perplexity_change") if self.trained else ()
        means: dict[str, Mean] = {name: getattr(self, name) for name in (*perplexities, "kl", "agreement")}
        return {
            "case": self.case.model_dump(),
            "impl": self.impl,
            "level": self.level,
            **{name: {"value": mean.value, "low": mean.low, "high": mean.high} for name, mean in means.items()},
            "predicted": self.predicted,
            "tokens_per_s": self.tokens_per_s,
            "weights": self.weights,
            "weight_bytes": self.weight_bytes,
            "remarks": list(self.remarks),
        }

    def _mean(self, name: str) -> Mean:
        return mean_of_groups([getattr(window, name) for window in self.windows], self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [window.tokens for window in self.windows]


def starts(tokens: int, window: int, stride: int, *, bos: bool = False) -> list[int]:
    """The first tokens of the windows that cover a text. Each window has a token to predict, so it has two tokens, or
    one after a beginning-of-text token. The last window reaches the end.
    """
    end = max(tokens - window, 0) + stride
    return [begin for begin in range(0, end, stride) if begin < tokens - 1 + bos]


def _deviations(case: EvaluationCase) -> str:
    """Further differences from the engine's defaults, in words."""
    cache = f", {case.kv_dtype} KV cache" if case.kv_dtype else ""
    rounded = ", activations rounded to 8 bits" if case.quant.get("activation") else ""
    return cache + rounded + (f", {case.rows} tokens at a time" if case.rows else "")


def _cells(mean: Mean, form: str) -> tuple[str, str]:
    show: Callable[[float], str] = form.format
    return show(mean.value), "–" if mean.low is None or mean.high is None else f"[{show(mean.low)}, {show(mean.high)}]"
