"""`labkit evaluate` measures how well a model predicts a text at a precision, and its distance from a reference.

Both models read the same windows, one after the other. Perplexity is Hugging Face's: windows have a fixed length and
begin `stride` tokens apart. Only tokens that no earlier window has predicted count
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
from labkit.engine.team_size import team_size
from labkit.harness.environment import read_environment
from labkit.harness.evaluation.records import Evaluation, EvaluationCase, WindowScore, starts
from labkit.harness.evaluation.text import LEAST, beginning_of, encode, read_text
from labkit.harness.stored_weights import packed_bytes, stored_by, weights_text
from labkit.models.dtypes import DTYPES, dtype_of
from labkit.models.policies import known_policy
from labkit.system.bounds import check_number, check_numbers
from labkit.system.errors import UserError, UserTypeError
from labkit.system.output_folder import check_output_folder
from labkit.system.progress import Progress, unheard
from labkit.weights.precision import Precision, precision_of
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

VANILLA = "vanilla"  # transformers' own model in float32 as the reference
TOKENS, WINDOW = 4096, 512
FEW_ROWS = 8  # rows of a decode step of a small batch
AT_ONCE = 64  # tokens whose distributions are compared together, in float64

Logits = Callable[[Tensor], Tensor]


def evaluate(
    model: str | os.PathLike[str] | ModelSource,
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
    """Lets the fused engine and a reference predict the first `tokens` tokens of a text.

    model: a name, a folder, a GGUF file, or the ModelSource that `labkit.resolve` returns.
    dtype: of the engine, a name of `labkit.weights.precision`; None: float32, or int8 with `quant`.
    quant: storage of the weights, as for `init_inference`.
    kv_dtype: of the KV cache.
    rows: tokens that the engine reads into its KV cache at a time; None: a whole window, or `FEW_ROWS` if kernels round
    activations or keys and values, because they do so only for few rows.
    against: the reference: another precision of the engine, or "vanilla", transformers' model in float32.
    text: a UTF-8 file; None: Python's help topics.
    window: tokens of the text that are read together; None: WINDOW, or the model's positions if they are fewer. A
    shorter text is one window.
    stride: tokens from one window to the next; None: a whole window.
    bos: whether every window begins with an additional beginning-of-text token; None: if the tokenizer puts one in
    front of a text.
    seed: of random weights; a ModelSource has its own.
    output: a folder for the caller's record, checked and made before anything is computed.

    Raises UserTypeError for another object, and UserError for an unknown model or precision, impossible sizes, and a
    text that is unreadable or has fewer than two tokens.
    """
    check_numbers(seed=seed, rows=rows, threads=threads, stride=stride)
    _check_sizes(tokens, window, stride)
    precision = _precision(dtype, quant, against)
    if output is not None:
        check_output_folder(output)
    if threads is not None:
        torch.set_num_threads(threads)
    follow = progress or unheard
    text_body, text_name = read_text(text)
    source = _source(model, seed)
    cut = _cut(source, text_body, tokens, window, stride, bos)
    follow(0, 1, f"loading {source.name}, {precision.name}")
    cache_dtype = dtype_of(kv_dtype, DTYPES) if kv_dtype else None
    engine = init_inference(source, replace_with_kernel_inject=True, kv_dtype=cache_dtype, **precision.options)
    if rows is None and (cache_dtype is not None or engine.options.quant.activation.enabled):
        rows = FEW_ROWS
    follow(0, 1, f"loading {source.name}, {against}")
    reference = _reference(source, against)
    windows, seconds = _scores(lambda part: _logits(engine, part, rows), reference, cut, follow)
    fields = {
        "model": source.name if isinstance(model, ModelSource) else os.fspath(model),
        "kv_dtype": kv_dtype,
        "rows": rows,
        "against": against,
        "text": text_name,
        "asked": tokens,
    }
    return Evaluation(
        case=_case(source, precision, cut, **fields),
        environment=read_environment(team_size()),
        impl=engine.impl,
        level=engine.level,
        windows=tuple(windows),
        seconds=seconds,
        weights=weights_text(stored_by(engine)),
        weight_bytes=packed_bytes(engine),
    )


def _source(model: str | os.PathLike[str] | ModelSource, seed: int) -> ModelSource:
    if isinstance(model, ModelSource):
        return model
    if isinstance(model, str | os.PathLike):
        return resolve(model, seed=seed, any_architecture=True)
    raise UserTypeError(
        f"model: expected a name, a path or the ModelSource of labkit.resolve, got {type(model).__name__}; save a "
        "model in memory with save_pretrained, together with its tokenizer, and pass the folder"
    )


def _case(source: ModelSource, precision: Precision, cut: _TextCut, **fields: Any) -> EvaluationCase:
    return EvaluationCase(
        origin=source.origin,
        dtype=precision.name,
        quant=dict(precision.quant or {}),
        tokens=len(cut.ids),
        window=cut.window,
        stride=cut.stride,
        bos=bool(len(cut.first)),
        threads=team_size(),
        **fields,
    )


def _precision(name: str | None, quant: Mapping[str, Any] | None, against: str) -> Precision:
    """The engine's precision. Raises UserError for an unknown one, also of the reference."""
    if against != VANILLA:
        precision_of(against)
    if not quant:
        return precision_of(name or "float32")
    if name not in (None, "int8"):
        raise UserError(f"got dtype={name!r} and quant; expected int8 with quant, or one of the two")
    return Precision("int8", torch.int8, dict(quant))


class _TextCut(NamedTuple):
    """The tokens of a text and their windows."""

    ids: Tensor  # int64 [tokens]
    first: Tensor  # tokens in front of every window, int64 [1] or [0]
    window: int  # tokens of a window
    stride: int  # tokens from one window to the next


def _cut(
    source: ModelSource, text: str, tokens: int, window: int | None, stride: int | None, bos: bool | None
) -> _TextCut:
    config, token = source.hf_config.get_text_config(), beginning_of(source.tokenizer, wanted=bos)
    policy = known_policy(source.hf_config)  # None: a model with hooks
    of_config = getattr(config, "max_position_embeddings", None)
    positions = policy.model_config(source.hf_config).max_positions if policy else of_config
    ids = encode(text, source.tokenizer, vocab=config.vocab_size, most=tokens)
    first = torch.tensor([] if token is None else [token], dtype=torch.int64)
    window = _window(source, positions, window, len(ids), len(first))
    return _TextCut(ids, first, window, min(stride or window, window))


def _window(source: ModelSource, positions: int | None, requested: int | None, tokens: int, before: int) -> int:
    """Tokens of a window of a text of `tokens` tokens, with `before` other tokens in front of each window."""
    most = tokens if positions is None else positions - before
    window = min(min(WINDOW, most) if requested is None else requested, tokens)
    if window > most:
        front = " with the beginning-of-text token" if before else ""
        raise UserError(
            f"got window = {window}, but {source.name} has {positions} positions; use a smaller window: at "
            f"most {most}{front}"
        )
    return window


def _check_sizes(tokens: int, window: int | None, stride: int | None) -> None:
    for name, size in (("window", window), ("tokens", tokens)):
        if size is not None:
            check_number(name, size, least=LEAST, why="the first token predicts the second")
    if stride is not None and stride > (window or WINDOW):
        raise UserError(
            f"got stride = {stride}, expected 1 to {window or WINDOW}, the window: no token may be left out"
        )


def _scores(predict: Logits, reference: Logits, cut: _TextCut, follow: Progress) -> tuple[list[WindowScore], float]:
    """The scores of all windows of a text, and the seconds for which `predict` computed."""
    ids, first, window, stride = cut
    begins = starts(len(ids), window, stride, bos=bool(len(first)))
    scores, seconds, predicted = [], 0.0, 1 - len(first)
    for index, begin in enumerate(begins):
        follow(index, len(begins), f"window {index + 1} of {len(begins)}")
        part = torch.cat((first, ids[begin : begin + window]))
        begun = perf_counter()
        logits = predict(part)
        seconds += perf_counter() - begun
        # The part's first token has nothing before it, and earlier windows have predicted some of the others.
        known = max(predicted - begin + len(first), 1)
        scores.append(_compare(logits[known - 1 : -1], reference(part)[known - 1 : -1], part[known:]))
        predicted = begin + len(part) - len(first)
    follow(len(begins), len(begins), "done")
    return scores, seconds


def _reference(source: ModelSource, against: str) -> Logits:
    if against == VANILLA:
        model = source.hf_model(torch.float32)
    else:
        model = init_inference(source, replace_with_kernel_inject=True, **precision_of(against).options)
    return lambda part: _logits(model, part)


@torch.inference_mode()
def _logits(model: Any, part: Tensor, rows: int | None = None) -> Tensor:
    """Logits after each token of a window: float32 [tokens, vocabulary]. rows: as for `evaluate`."""
    if rows is None:
        logits: Tensor = model(input_ids=part[None].to(model.device), use_cache=False).logits
        return logits[0].float().cpu()
    cache, parts = None, []
    for chunk in part.split(rows):
        output = model(input_ids=chunk[None].to(model.device), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits[0].float().cpu())
    return torch.cat(parts)


def _compare(logits: Tensor, reference: Tensor, targets: Tensor) -> WindowScore:
    """Means over the tokens that a window predicts, from logits [tokens, vocabulary] of the model and the reference."""
    nll, reference_nll, kl, agreed = 0.0, 0.0, 0.0, 0
    for ours, theirs, target in zip(*(rows.split(AT_ONCE) for rows in (logits, reference, targets)), strict=True):
        log_p, log_q = log_softmax(theirs.double(), dim=1), log_softmax(ours.double(), dim=1)
        nll -= float(log_q.gather(1, target[:, None]).sum())
        reference_nll -= float(log_p.gather(1, target[:, None]).sum())
        kl += float((log_p.exp() * (log_p - log_q)).sum())
        agreed += int((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum())
    count = len(targets)
    return WindowScore(
        tokens=count, nll=nll / count, reference_nll=reference_nll / count, kl=kl / count, agreement=agreed / count
    )
