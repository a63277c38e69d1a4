"""The error of matrices that are stored in fewer bits, and the record of the study of precisions."""

import json
from pathlib import Path

import pytest
import torch
from helpers.studies.precision_studies import NUMBERS, study

from labkit.kernels.codes import quantize
from labkit.kernels.types import Linear
from labkit.models.policies import model_config_of
from labkit.statistics.resolution import TellsApart
from labkit.studies.matrix_errors import head_error, layer_bytes, matrix_errors, reason_against, spread_of
from labkit.studies.precision import parse_precisions, window_of
from labkit.studies.precision_study import load_study, save_study
from labkit.system.errors import UserError
from labkit.weights.precision import precision_of
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

ATTN_OUT = "transformer.h.1.attn.c_proj.weight"  # stored [inputs, outputs]


class ReplacedTensors:
    """The weights of a model, with some tensors replaced."""

    def __init__(self, source: ModelSource, tensors: dict[str, torch.Tensor]) -> None:
        self._source, self._tensors = source, tensors

    def names(self) -> set[str]:
        return self._source.names()

    def get(self, name: str, dtype: torch.dtype | None = None, cut: object = None) -> torch.Tensor:
        replacement = self._tensors.get(name)
        return self._source.get(name, dtype, cut) if replacement is None else replacement.clone()  # type: ignore[arg-type]


def changed(tensors: dict[str, torch.Tensor]) -> ModelSource:
    source = resolve("tiny-gpt2")
    return ModelSource("tiny-gpt2", "changed", source.hf_config, ReplacedTensors(source, tensors))


@pytest.mark.parametrize(
    ("name", "bits", "group", "asymmetric"),
    [("int4-32", 4, 32, True), ("int4-64-symmetric", 4, 64, False), ("int8", 8, 64, False)],
)
def test_the_error_of_a_matrix_is_that_of_its_codes_by_hand(name: str, bits: int, group: int, asymmetric: bool) -> None:
    source = resolve("tiny-gpt2")
    (result,) = matrix_errors(source, [name])
    (error,) = [entry.error for entry in result.errors if (entry.layer, entry.matrix) == (1, "attn_out")]
    weight = source.get(ATTN_OUT).T.contiguous()
    codes, scales = quantize(weight, group, bits=bits, asymmetric=asymmetric)
    back = Linear(codes, None, 64, 64, "rows", scales, group, bits).floats()
    assert error == pytest.approx(float((back - weight).norm() / weight.norm()), rel=1e-5)
    assert len(result.errors) == 2 * 4


def test_weights_that_are_codes_already_lose_nothing() -> None:
    codes = torch.randint(-8, 8, (64, 64), generator=torch.Generator().manual_seed(0))
    codes[:, ::32], codes[:, 1::32] = -8, 7  # every group reaches from end to end
    (result,) = matrix_errors(changed({ATTN_OUT: (codes * 0.125).T.contiguous().float()}), ["int4-32"])
    lost = {(entry.layer, entry.matrix): entry.lost for entry in result.errors}
    assert lost.pop((1, "attn_out")) == 0
    assert all(lost.values())
    assert not result.exact


def test_more_bits_and_smaller_groups_lose_less() -> None:
    results = matrix_errors(resolve("tiny-gpt2"), ["float32", "bfloat16", "int8-32", "int8", "int4-32", "int4-64"])
    errors = [result.error for result in results]
    assert errors == sorted(errors)
    assert results[0].exact


def test_the_head_loses_what_its_own_precision_loses() -> None:
    errors = [head_error(resolve("tiny-gpt2"), f"int4-32{head}").error for head in ("", "+head8", "+head")]
    assert errors[0] < errors[1] < errors[2]  # bfloat16, int8, int4


@pytest.mark.parametrize(
    ("name", "bits"),
    [("float32", 32), ("bfloat16", 16), ("int8-32", 8.5), ("int4-32", 5), ("int4-64-symmetric", 4.25)],
)
def test_bytes_count_codes_scales_and_minima(name: str, bits: float) -> None:
    assert layer_bytes(model_config_of(resolve("tiny-gpt2").hf_config), precision_of(name)) == NUMBERS * bits / 8


def test_an_outlier_reaches_into_its_row_and_into_one_group() -> None:
    weight = torch.ones(64, 64)
    weight[:, ::2] = -1.0
    weight[3, 5] = 40.0
    spread = spread_of(changed({ATTN_OUT: weight.T.contiguous()}), 1, "attn_out")
    assert sum(spread.numbers.counts) == 64 * 64
    assert (spread.rows.counts[-1], spread.groups.counts[-1]) == (1, 1)
    assert (sum(spread.rows.counts), sum(spread.groups.counts)) == (64, 128)


@pytest.mark.parametrize(("name", "reason"), [("int4-128", "does not divide the 64 inputs"), ("stored", "no codes")])
def test_a_precision_that_a_model_cannot_have_is_said_with_the_reason(name: str, reason: str) -> None:
    assert reason in (reason_against(resolve("tiny-gpt2"), name) or "")
    assert reason_against(resolve("tiny-gpt2"), "int4-64") is None


def test_precisions_are_parsed_and_each_is_taken_once() -> None:
    assert parse_precisions(" float32,int4-64+head8 , float32,") == ("float32", "int4-64+head8")


@pytest.mark.parametrize(("text", "message"), [("", "two or more"), ("int8", "two or more"), ("int8, int5", "int5")])
def test_no_precisions_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_precisions(text)


def test_a_short_text_has_enough_windows_for_an_interval() -> None:
    assert [window_of(tokens) for tokens in (16, 128, 2048, 9999)] == [2, 16, 256, 256]


def test_the_front_goes_from_the_fastest_on_and_each_is_closer_than_the_one_before() -> None:
    assert [side.precision for side in study().by_time] == [
        "int4-64+head8", "int4-32+head8", "int8-32+head", "bfloat16", "float32",
    ]  # fmt: skip
    assert [side.precision for side in study().front] == ["int4-64+head8", "int4-32+head8", "float32"]


def test_a_study_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = study(answers={"float32": "Here."})
    assert load_study(save_study(saved, tmp_path)) == saved


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"kind": "comparison"}')
    with pytest.raises(UserError, match="no precision study"):
        load_study(path)


def test_a_frame_has_a_row_for_each_precision_and_the_repr_is_short() -> None:
    result = study()
    frame = result.to_frame()
    assert list(frame["dtype"]) == [side.precision for side in result.sides]
    assert {"machine", "model", "dtype", "batch", "prompt_tokens"} <= set(frame.columns)
    assert {"per_token_ms", "kl", "trustworthy"} <= set(frame.columns)
    assert len(repr(result)) < 600


def test_the_comparisons_of_a_study_know_how_they_were_measured(tmp_path: Path) -> None:
    """Intervals depend on the looks, and a claim on what the machine tells apart."""
    facts = {"looks": (3, 5), "why_rounds": "", "tells_apart": TellsApart(0.03, 60.0), "dropped_pairs": 2}
    result = load_study(save_study(study().model_copy(update=facts), tmp_path))
    for record in result.comparisons.values():
        assert {name: getattr(record, name) for name in facts} == facts


def test_older_studies_are_read(tmp_path: Path) -> None:
    saved = study()
    file = save_study(saved, tmp_path)
    line = json.loads(file.read_text())
    for name in ("looks", "why_rounds", "tells_apart", "dropped_pairs"):
        del line[name]
    file.write_text(json.dumps(line))
    assert load_study(file) == saved
