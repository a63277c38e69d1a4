"""`labkit evaluate`: how well a model predicts a text at a precision, and how far that moved it from a reference.

Both models read the same windows, one after the other. Perplexity is Hugging Face's: windows of a fixed length, each
`stride` tokens behind the one before, of which only the tokens count that no window before has predicted
(https://huggingface.co/docs/transformers/perplexity).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from labkit.engine import init_inference
from labkit.harness.environment import read_environment
from labkit.harness.evaluation.records import Evaluation, EvaluationCase, WindowScore, starts
from labkit.harness.evaluation.text import LEAST, beginning_of, encode, read_text
from labkit.harness.stored_weights import matrix_bytes, stored_by, told
from labkit.models.dtypes import DTYPES, dtype_of
from labkit.models.policies import model_config_of
from labkit.system.bounds import check_number, check_numbers
from labkit.system.errors import UserError
from labkit.system.output_folder import check_output_folder
from labkit.system.progress import Progress, unheard
from labkit.weights.precision import Precision, precision_of
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

VANILLA = "vanilla"  # transformers' own model in float32, as a reference
TOKENS, WINDOW = 4096, 512
FEW_ROWS = 8  # as a decode step of a small batch has
AT_ONCE = 64  # tokens whose distributions are compared at a time, in float64

Logits = Callable[[Tensor], Tensor]


def evaluate(
    model: str,
    *,
    dtype: str | None = None,
    quant: Mapping[str, Any] | None = None,
    kv_dtype: str | None = None,
    rows: int | None = None,
    against: str = "float32",
    text: str | os.PathLike[str] | None = None,
    tokens: int = TOKENS,
    window: int | None = None,
    stride: int | None = None,
    bos: bool | None = None,
    threads: int | None = None,
    seed: int = 0,
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Lets the fused engine predict the first `tokens` tokens of a text, beside a reference.

    dtype: of the engine, a name of `labkit.weights.precision`; None: float32, or int8 with `quant`, which says how the
    weights are stored, as for `init_inference`. kv_dtype: as stored in the KV cache. rows: tokens that the engine reads
    at a time, into its cache; None: a whole window at once, but `FEW_ROWS` where kernels round activations or keys and
    values, because they do so for few rows only. against: the reference, the engine in another precision, or "vanilla",
    transformers' model in float32. text: a UTF-8 file; None: Python's help topics. window: tokens of the text that are
    read at once, or all of a shorter text; None: WINDOW, or as many as the model has positions for. stride: from one
    window to the next; None: a whole window. bos: whether the beginning-of-text token stands in front of every window,
    beside its tokens; None: if the tokenizer puts it in front of a text. seed: of random weights. output: a folder for
    the caller's record: it is checked, and made, before anything is computed.

    UserError for an unknown model or precision, for sizes that make no sense, and for a text of less than two tokens or
    one that cannot be read.
    """
    _check_sizes(tokens, window, stride)
    check_numbers(seed=seed, rows=rows, threads=threads, stride=stride)
    precision = _precision(dtype, quant, against)
    if output is not None:
        check_output_folder(output)
    torch.set_num_threads(threads or torch.get_num_threads())
    follow = progress or unheard
    written, text_name = read_text(text)
    source = resolve(model, seed=seed)
    cut = _cut(source, written, tokens, window, stride, bos)
    follow(0, 1, f"loading {model}, {precision.name}")
    kept = dtype_of(kv_dtype, DTYPES) if kv_dtype else None
    engine = init_inference(source, replace_with_kernel_inject=True, kv_dtype=kept, **precision.options)
    if rows is None and (kept is not None or engine.options.quant.activation.enabled):
        rows = FEW_ROWS
    follow(0, 1, f"loading {model}, {against}")
    reference = _reference(source, against)
    engines = (lambda part: _logits(engine, part, rows)), reference
    windows, seconds = _scores(engines, cut, follow)
    asked = {"model": model, "kv_dtype": kv_dtype, "rows": rows, "against": against, "text": text_name, "asked": tokens}
    return Evaluation(
        case=_case(source, precision, cut, **asked),
        environment=read_environment(torch.get_num_threads()),
        impl=engine.impl,
        windows=tuple(windows),
        seconds=seconds,
        weights=told(stored_by(engine)),
        weight_bytes=matrix_bytes(engine.weights),
    )


def _case(source: ModelSource, precision: Precision, cut: _TextCut, **asked: Any) -> EvaluationCase:
    return EvaluationCase(
        origin=source.origin,
        dtype=precision.name,
        quant=dict(precision.quant or {}),
        tokens=len(cut.ids),
        window=cut.window,
        stride=cut.stride,
        bos=bool(len(cut.first)),
        threads=torch.get_num_threads(),
        **asked,
    )


def _precision(name: str | None, quant: Mapping[str, Any] | None, against: str) -> Precision:
    """The engine's precision. Raises UserError for an unknown one, also of the reference."""
    if against != VANILLA:
        precision_of(against)
    if not quant:
        return precision_of(name or "float32")
    if name not in (None, "int8"):
        raise UserError(f"got dtype={name!r} and quant; expected int8 beside quant, or one of the two")
    return Precision("int8", torch.int8, dict(quant))


class _TextCut(NamedTuple):
    """The tokens of a text, int64 [tokens], in windows of `window` tokens, each `stride` tokens after the one before.

    first: the tokens in front of every window, int64 [1] or [0].
    """

    ids: Tensor
    first: Tensor
    window: int
    stride: int


def _cut(
    source: ModelSource, text: str, tokens: int, window: int | None, stride: int | None, bos: bool | None
) -> _TextCut:
    config, token = model_config_of(source.hf_config), beginning_of(source.tokenizer, wanted=bos)
    ids = encode(text, source.tokenizer, vocab=config.vocab_size, most=tokens)
    first = torch.tensor([] if token is None else [token], dtype=torch.int64)
    window = _window(source, config.max_positions, window, len(ids), len(first))
    return _TextCut(ids, first, window, min(stride or window, window))


def _window(source: ModelSource, positions: int | None, asked: int | None, tokens: int, before: int) -> int:
    """Tokens of a window of a text of `tokens` tokens, where `before` other tokens stand in front of the window."""
    most = tokens if positions is None else positions - before
    window = min(min(WINDOW, most) if asked is None else asked, tokens)
    if window > most:
        front = " with the beginning-of-text token" if before else ""
        raise UserError(
            f"got window = {window}, but {source.name} has {positions} positions; use a smaller one: at most "
            f"{most}{front}"
        )
    return window


def _check_sizes(tokens: int, window: int | None, stride: int | None) -> None:
    for name, size in (("window", window), ("tokens", tokens)):
        if size is not None:
            check_number(name, size, least=LEAST, why="the first token predicts the second")
    if stride is not None and not 1 <= stride <= (window or WINDOW):
        raise UserError(
            f"got stride = {stride}, expected 1 to {window or WINDOW}, the window: no token may be left out"
        )


def _scores(engines: tuple[Logits, Logits], cut: _TextCut, follow: Progress) -> tuple[list[WindowScore], float]:
    """The scores of all windows of a text, and the seconds that the first engine, the candidate, computed."""
    (predict, reference), (ids, first, window, stride) = engines, cut
    begins = starts(len(ids), window, stride, bos=bool(len(first)))
    found, seconds, predicted = [], 0.0, 1 - len(first)
    for index, begin in enumerate(begins):
        follow(index, len(begins), f"window {index + 1} of {len(begins)}")
        part = torch.cat((first, ids[begin : begin + window]))
        begun = perf_counter()
        logits = predict(part)
        seconds += perf_counter() - begun
        known = max(predicted - begin + len(first), 1)  # of the part: given, or predicted in a window before
        found.append(_compare(logits[known - 1 : -1], reference(part)[known - 1 : -1], part[known:]))
        predicted = begin + len(part) - len(first)
    follow(len(begins), len(begins), "done")
    return found, seconds


def _reference(source: ModelSource, against: str) -> Logits:
    if against == VANILLA:
        model = source.hf_model(torch.float32)
    else:
        model = init_inference(source, replace_with_kernel_inject=True, **precision_of(against).options)
    return lambda part: _logits(model, part)


@torch.inference_mode()
def _logits(model: Any, part: Tensor, rows: int | None = None) -> Tensor:
    """Of the tokens that follow each token of a window: float32 [tokens, vocabulary]. rows: as for `evaluate`."""
    if rows is None:
        logits: Tensor = model(input_ids=part[None].to(model.device), use_cache=False).logits
        return logits[0].float().cpu()
    cache, found = None, []
    for some in part.split(rows):
        said = model(input_ids=some[None].to(model.device), past_key_values=cache, use_cache=True)
        cache = said.past_key_values
        found.append(said.logits[0].float().cpu())
    return torch.cat(found)


def _compare(logits: Tensor, reference: Tensor, targets: Tensor) -> WindowScore:
    """Means over the tokens that a window predicts, of `logits` [tokens, vocabulary] and of the reference's."""
    nll, reference_nll, kl, agreed = 0.0, 0.0, 0.0, 0
    for ours, theirs, target in zip(*(each.split(AT_ONCE) for each in (logits, reference, targets)), strict=True):
        log_p, log_q = log_softmax(theirs.double(), dim=1), log_softmax(ours.double(), dim=1)
        nll -= float(log_q.gather(1, target[:, None]).sum())
        reference_nll -= float(log_p.gather(1, target[:, None]).sum())
        kl += float((log_p.exp() * (log_p - log_q)).sum())
        agreed += int((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum())
    count = len(targets)
    return WindowScore(
        tokens=count,
        nll=nll / count,
        reference_nll=reference_nll / count,
        kl=kl / count,
        agreement=agreed / count,
    )
