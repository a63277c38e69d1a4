"""An evaluation gives the same numbers as transformers, SciPy and plain arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models.chat_models import chat_checkpoint, chat_model_without_a_row
from scipy.special import log_softmax, rel_entr, softmax

from labkit.engine import init_inference
from labkit.harness.evaluation import text as texts
from labkit.harness.evaluation.evaluate import FEW_ROWS, VANILLA, evaluate
from labkit.harness.evaluation.records import Evaluation, starts
from labkit.harness.evaluation.text import DEFAULT_TEXT, read_text
from labkit.harness.results import load_records, save
from labkit.system.processor import cpu_flags
from labkit.weights.resolve import resolve

MODEL, TOKENS, WINDOW = "tiny-llama", 100, 40


@pytest.fixture(scope="module")
def int8() -> Evaluation:
    return evaluate(MODEL, dtype="int8", tokens=TOKENS, window=WINDOW)


def ids() -> torch.Tensor:
    encoded = resolve(MODEL).tokenizer(read_text(None)[0][:2000], add_special_tokens=False)["input_ids"]
    return torch.tensor(encoded[:TOKENS])


@pytest.mark.parametrize(("tokens", "window", "stride"), [(100, 40, 40), (100, 40, 7), (81, 40, 40), (40, 40, 40)])
def test_every_token_that_follows_another_is_predicted_once(tokens: int, window: int, stride: int) -> None:
    result = evaluate(MODEL, tokens=tokens, window=window, stride=stride)
    alone = len(result.windows) if stride == window else 1  # tokens that are first in their window, or in the text
    left = 1 if tokens == 81 else 0  # a window of one token predicts nothing
    assert result.predicted == tokens - alone - left
    assert [begin + window >= tokens - left for begin in starts(tokens, window, stride)].count(True) == 1


def test_a_source_is_evaluated_like_its_name() -> None:
    by_name, by_source = (evaluate(model, tokens=40, window=40) for model in (MODEL, resolve(MODEL)))
    assert by_source.windows == by_name.windows
    assert by_source.case == by_name.case
    assert "39 tokens predicted in 1 window of 40 tokens, of" in str(by_source.table().notes)


def test_a_model_in_memory_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        TypeError, match=r"model: expected a name, .* got LlamaForCausalLM; save .* with save_pretrained"
    ):
        evaluate(resolve(MODEL).hf_model(torch.float32))  # type: ignore[arg-type]


def test_a_model_without_a_row_is_evaluated_with_hooks(tmp_path: Path) -> None:
    folder = chat_checkpoint(tmp_path, model=chat_model_without_a_row())
    evaluation = evaluate(folder, tokens=60, against=VANILLA)
    assert evaluation.agreement.value == 1
    assert evaluation.weight_bytes > 0


def test_the_loss_is_that_of_transformers() -> None:
    result = evaluate(MODEL, against=VANILLA, tokens=TOKENS, window=WINDOW)
    model = resolve(MODEL).hf_model(torch.float32)
    for window, begin in zip(result.windows, range(0, TOKENS, WINDOW), strict=True):
        part = ids()[None, begin : begin + WINDOW]
        loss = float(model(part, labels=part).loss.detach())
        assert window.reference_nll == pytest.approx(loss, rel=1e-6)
        assert window.nll == pytest.approx(loss, rel=1e-5)
        assert window.agreement == 1
        assert abs(window.kl) < 1e-9
    total = sum(window.nll * window.tokens for window in result.windows)
    assert result.perplexity.value == pytest.approx(np.exp(total / result.predicted), rel=1e-12)


def test_overlapping_windows_see_more_context() -> None:
    """The last token of each window is predicted from all tokens before it in the window."""
    result = evaluate(MODEL, tokens=WINDOW + 1, window=WINDOW, stride=1)
    model = resolve(MODEL).hf_model(torch.float32)
    logits = model(ids()[None, 1 : WINDOW + 1]).logits[0, -2].detach().double().numpy()
    assert result.windows[1].tokens == 1
    assert result.windows[1].nll == pytest.approx(-log_softmax(logits)[int(ids()[WINDOW])], rel=1e-5)


def test_divergence_and_agreement_are_those_of_the_distributions(int8: Evaluation) -> None:
    engines = [init_inference(resolve(MODEL), dtype=dtype) for dtype in (torch.int8, torch.float32)]
    part = ids()[None, :WINDOW]
    int8_logits, float32_logits = (engine(input_ids=part).logits[0, :-1].double().numpy() for engine in engines)
    divergence = rel_entr(softmax(float32_logits, axis=1), softmax(int8_logits, axis=1)).sum(axis=1)
    assert int8.windows[0].kl == pytest.approx(divergence.mean(), rel=1e-6)
    assert int8.windows[0].agreement == np.mean(int8_logits.argmax(axis=1) == float32_logits.argmax(axis=1))
    assert int8.kl.value > 0
    assert 0 <= int8.agreement.low <= int8.agreement.value <= int8.agreement.high <= 1  # type: ignore[operator]


def test_a_model_against_itself_has_no_divergence() -> None:
    result = evaluate(MODEL, dtype="bfloat16", against="bfloat16", tokens=TOKENS, window=WINDOW)
    assert (result.kl.value, result.agreement.value, result.perplexity_change.value) == (0, 1, 0)


def test_more_groups_give_less_divergence(int8: Evaluation) -> None:
    finer = evaluate(MODEL, quant={"weight": {"q_groups": 8}}, tokens=TOKENS, window=WINDOW)
    assert finer.case.dtype == "int8"
    assert 0 < finer.kl.value < int8.kl.value
    assert finer.weight_bytes > int8.weight_bytes


def test_windows_may_be_read_a_few_tokens_at_a_time() -> None:
    """A float32 KV cache gives the result of reading the window at once."""
    in_pieces = evaluate(MODEL, tokens=WINDOW + 3, window=WINDOW, rows=7)
    assert in_pieces.case.rows == 7
    assert in_pieces.kl.value < 1e-9
    assert in_pieces.agreement.value == 1


rounds = pytest.mark.skipif("avx512_vnni" not in cpu_flags(), reason="kernels round activations with AVX-512 VNNI")


@pytest.mark.parametrize(
    "options", [pytest.param({"dtype": "int8+a8"}, marks=rounds), {"dtype": "int8", "kv_dtype": "int8"}], ids=str
)
def test_rounding_of_steps_is_seen(options: dict[str, Any], int8: Evaluation) -> None:
    """In steps of few rows, kernels round activations and the KV cache rounds keys and values."""
    result = evaluate(MODEL, tokens=TOKENS, window=WINDOW, against="int8", **options)
    assert result.case.rows == FEW_ROWS
    assert result.kl.value > 1e-9


def test_random_weights_are_said_to_predict_nothing(int8: Evaluation) -> None:
    assert not int8.trained
    assert any("random" in remark for remark in int8.remarks)
    assert {"kl", "agreement"} <= int8.as_dict().keys()
    assert "perplexity" not in int8.as_dict()


def test_a_trained_models_record_has_its_perplexity_and_is_read_back(int8: Evaluation, tmp_path: Path) -> None:
    case = int8.case.model_copy(update={"origin": "checkpoint here"})
    trained = int8.model_copy(update={"case": case})
    perplexity = trained.as_dict()["perplexity"]
    assert perplexity["low"] < perplexity["value"] < perplexity["high"]
    assert load_records(save(trained, tmp_path)) == [trained]


def test_a_frame_can_be_joined_with_those_of_other_results(int8: Evaluation) -> None:
    frame = int8.to_frame()
    assert {"machine", "model", "dtype"} <= set(frame.columns)
    assert frame["window"].tolist() == list(range(len(int8.windows)))
    assert frame["tokens"].tolist() == [window.tokens for window in int8.windows]
    assert set(frame["dtype"]) == {int8.case.dtype}


def test_the_default_text_is_the_same_on_every_machine_and_long() -> None:
    written, name = read_text(None)
    assert name == DEFAULT_TEXT
    assert len(written.split()) > 50_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1}, "got window = 1, expected at least 2"),
        ({"stride": 0}, "got stride = 0, expected at least 1"),
        ({"stride": 513}, "got stride = 513, expected 1 to 512"),
        ({"stride": "256"}, "got stride = '256', expected a number"),
        ({"tokens": 1}, "got tokens = 1, expected at least 2"),
        ({"window": 8, "stride": 9}, "got stride = 9, expected 1 to 8"),
        ({"dtype": "int3"}, "unknown precision 'int3'"),
        ({"against": "gold"}, "unknown precision 'gold'"),
        ({"threads": 0}, "got threads = 0"),
        ({"text": "/no/such/file"}, "/no/such/file cannot be read"),
        ({"window": 100_000, "tokens": 100_000}, "positions; use a smaller window"),
        ({"dtype": "float32", "quant": {"lm_head": True}}, "got dtype='float32' and quant; expected int8 with quant"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(MODEL, **options)  # type: ignore[arg-type]


def test_a_short_or_unreadable_text_is_refused(tmp_path: Path) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "binary"
    short.write_text("x")
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="got a text of 1 tokens, expected at least 2; use a longer text"):
        evaluate(MODEL, text=short)
    with pytest.raises(ValueError, match=r"binary is no UTF-8 text \(byte 0\)"):
        evaluate(MODEL, text=binary)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gives token \d+, but the model has 50 tokens"):
        texts.encode("some text", resolve(MODEL).tokenizer, vocab=50, most=9)


@pytest.mark.parametrize(
    ("options", "window"), [({"tokens": 64}, 64), ({"tokens": 64, "window": 600}, 64), ({"tokens": 600}, 512)], ids=str
)
def test_the_window_follows_a_shorter_text(options: dict[str, Any], window: int) -> None:
    result = evaluate(MODEL, **options)
    assert (result.case.window, result.case.stride, result.case.tokens) == (window, window, options["tokens"])


class BeginningTokenizer:
    """A tokenizer that puts its beginning-of-text token, 7, in front of a text."""

    bos_token_id: int | None = 7

    def __call__(self, text: str, *, add_special_tokens: bool, **unused: Any) -> dict[str, list[int]]:
        ids = [10 + ord(letter) % 100 for letter in text]
        return {"input_ids": [7, *ids] if add_special_tokens else ids}


@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize(("tokens", "window", "stride"), [(80, 40, 40), (81, 40, 7), (41, 40, 40)])
def test_windows_begin_as_texts_of_the_tokenizer_do(
    tokens: int, window: int, stride: int, *, bos: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each window begins with the beginning-of-text token, which also predicts the first token of the window."""
    source, tokenizer = resolve(MODEL), BeginningTokenizer()
    monkeypatch.setattr(type(source), "tokenizer", tokenizer)
    result = evaluate(MODEL, tokens=tokens, window=window, stride=stride, bos=bos)
    assert result.case.bos is (bos is not False)
    front = [7] if result.case.bos else []
    alone = 0 if front else 1 + (tokens == 80)  # first tokens of a window, or of the text, have no token before them
    assert result.predicted == tokens - alone - (tokens == 41 and not front)
    part = [*front, *tokenizer(read_text(None)[0][:window], add_special_tokens=False)["input_ids"]]
    inputs = torch.tensor([part])
    loss = source.hf_model(torch.float32)(inputs, labels=inputs).loss
    assert result.windows[0].nll == pytest.approx(float(loss.detach()), rel=1e-5)
    sentence = "a beginning-of-text token" if front else "no beginning-of-text token"
    assert any(note.startswith(sentence) for note in result.table().notes)


def test_a_beginning_that_the_tokenizer_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = BeginningTokenizer()
    monkeypatch.setattr(tokenizer, "bos_token_id", None)
    with pytest.raises(ValueError, match="got bos=True, but the tokenizer has no beginning-of-text token"):
        texts.beginning_of(tokenizer, wanted=True)  # type: ignore[arg-type]
    assert texts.beginning_of(tokenizer, wanted=None) is None  # type: ignore[arg-type]


def test_a_tokenizer_that_joins_long_runs_gives_all_the_tokens_that_were_asked_for() -> None:
    """The text consists of dashes, and a token is up to 64 of them."""

    def joining(text: str, **unused: Any) -> dict[str, list[int]]:
        return {"input_ids": [1] * -(-len(text) // 64)}

    assert len(texts.encode("-" * 64 * 900, joining, vocab=2, most=897)) == 897  # type: ignore[arg-type]


def test_a_text_that_is_shorter_than_asked_for_is_said(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("words " * 20)
    result = evaluate(MODEL, text=short)
    assert result.case.window == 120
    assert "the text has 120 tokens; 4,096 were asked for" in result.remarks


def test_no_token_is_lost_where_the_text_is_cut_before_it_is_encoded() -> None:
    written, tokenizer = read_text(None)[0], resolve(MODEL).tokenizer
    whole = tokenizer(written[:5000], add_special_tokens=False)["input_ids"][:100]
    assert texts.encode(written, tokenizer, vocab=10**6, most=100).tolist() == whole
