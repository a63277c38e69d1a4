"""A study of precisions with known figures, for tests of tables and figures made from such a study."""

from helpers.studies.comparisons import environment, measurement

from labkit.harness.evaluation.records import Evaluation, EvaluationCase, WindowScore
from labkit.harness.records import Measurement
from labkit.studies.matrix_errors import Histogram, MatrixError, Spread, StoredMatrices
from labkit.studies.precision_study import PrecisionSide, PrecisionStudy, Refused

NUMBERS = 2 * (192 * 64 + 64 * 64 + 2 * 256 * 64)  # in the layers of tiny-gpt2
SIDES = {  # ms per token, KL, error of the layers
    "float32": (40.0, 0.0, 0.0),
    "bfloat16": (20.0, 0.0002, 0.002),
    "int8-32+head": (12.0, 0.001, 0.005),
    "int4-64+head8": (8.0, 0.3, 0.08),
    "int4-32+head8": (9.0, 0.0002, 0.0),
}
CHOICES = {  # bits per number, including its share of the scales, and the error
    "int8": (8.25, 0.009), "int8-32": (8.5, 0.005), "int4-32": (5.0, 0.0), "int4-32-symmetric": (4.5, 0.085),
    "int4-64": (4.5, 0.08), "int4-64-symmetric": (4.25, 0.1),
}  # fmt: skip
TRAINED, RANDOM = "a trained model", "random weights, seed 0"


def study(*, origin: str = TRAINED, answers: dict[str, str] | None = None) -> PrecisionStudy:
    """Study of the sides above, in that order, and of int4-128, which the model cannot have."""
    stored = [stored_matrices(name, bits, error) for name, (bits, error) in CHOICES.items()]
    stored.append(stored_matrices("bfloat16", 16, 0.002))
    histogram = Histogram(begin=-1.0, width=0.5, counts=(1, 100, 0, 7))
    return PrecisionStudy(
        sides=tuple(side(name, origin, (answers or {}).get(name)) for name in SIDES),
        refused=(Refused(precision="int4-128", reason="group_size=128 does not divide the 64 inputs"),),
        stored=tuple(stored),
        spread=Spread(layer=1, matrix="ff2", group=32, numbers=histogram, rows=histogram, groups=histogram,
                      row_median=5.0, group_median=2.5),
    )  # fmt: skip


def side(name: str, origin: str, answer: str | None) -> PrecisionSide:
    ms, kl, error = SIDES[name]
    return PrecisionSide(
        precision=name, measurement=measured(name, ms, origin, answer), evaluation=evaluation(name, kl, origin),
        head=MatrixError(layer=None, matrix="embed", lost=error**2, norm=1.0) if error else None,
        first_difference=None if name == "float32" else 3,
    )  # fmt: skip


def measured(name: str, ms: float, origin: str, answer: str | None) -> Measurement:
    whole = measurement("fused")
    runs = tuple(run.model_copy(update={"decode_ms": (ms,) * 3}) for run in whole.runs)
    case = whole.case.model_copy(update={"model": "tiny-gpt2", "origin": origin})
    question = {"question": "Where?", "answer": answer}
    return whole.model_copy(update={"name": f"fused:{name}", "case": case, "runs": runs, **question})


def evaluation(name: str, kl: float, origin: str) -> Evaluation:
    windows = tuple(
        WindowScore(tokens=15, nll=3 + kl + mood, reference_nll=3 + mood, kl=kl * (1 + mood), agreement=0.9)
        for mood in (-0.1, 0.0, 0.1)
    )
    case = EvaluationCase(model="tiny-gpt2", origin=origin, dtype=name, quant={}, against="float32", text="a text",
                          tokens=48, window=16, stride=16, threads=1)  # fmt: skip
    return Evaluation(case=case, environment=environment(), impl="cpp", windows=windows, seconds=1.0, weights=name,
                      weight_bytes=1_000_000)  # fmt: skip


def stored_matrices(name: str, bits: float, error: float) -> StoredMatrices:
    errors = [
        MatrixError(layer=layer, matrix=role, lost=error**2, norm=1.0)
        for layer in range(2)
        for role in ("qkv", "attn_out", "ff1", "ff2")
    ]
    return StoredMatrices(precision=name, layer_bytes=round(NUMBERS * bits / 8), errors=tuple(errors))
