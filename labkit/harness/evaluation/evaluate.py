"""`labkit evaluate`: how well a model predicts a text at a precision, and how far that moved it from a reference.

Both models read the same windows, one after the other. Perplexity is Hugging Face's: windows of a fixed length, each
`stride` tokens behind the one before, of which only the tokens count that no window before has predicted
(https://huggingface.co/docs/transformers/perplexity).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from labkit.engine import init_inference
from labkit.harness.environment import read_environment
from labkit.harness.evaluation.records import Evaluation, EvaluationCase, WindowScore, starts
from labkit.harness.evaluation.text import encode, read_text
from labkit.models.dtypes import DTYPES, dtype_of
from labkit.models.policies import model_config_of
from labkit.models.shards import shard
from labkit.system.errors import UserError
from labkit.system.output_folder import check_output_folder
from labkit.system.progress import Progress, unheard
from labkit.weights.capacity import model_bytes
from labkit.weights.quantise import Quantization
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

VANILLA = "vanilla"  # transformers' own model in float32, as a reference
TOKENS, WINDOW = 4096, 512
AT_ONCE = 64  # tokens whose distributions are compared at a time, in float64

Logits = Callable[[Tensor], Tensor]


def evaluate(
    model: str,
    *,
    dtype: str = "float32",
    quant: Mapping[str, Any] | None = None,
    against: str = "float32",
    text: str | os.PathLike[str] | None = None,
    tokens: int = TOKENS,
    window: int = WINDOW,
    stride: int | None = None,
    threads: int | None = None,
    seed: int = 0,
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Lets the fused engine predict the first `tokens` tokens of a text, beside a reference.

    dtype, quant: of the engine, as for `init_inference`. against: the reference, the engine in another dtype or
    "vanilla", transformers' model in float32. text: a UTF-8 file; None: Python's help topics. stride: from one window
    to the next; None: a whole window. seed: of random weights. output: a folder for the caller's record: it is checked,
    and made, before anything is computed.

    UserError for an unknown model or precision, for sizes that make no sense, and for a text that is shorter than a
    window or cannot be read.
    """
    stride = window if stride is None else stride
    _check_sizes(tokens, window, stride, threads)
    weight_dtype = dtype_of(dtype, DTYPES)
    if against != VANILLA:
        dtype_of(against, DTYPES)
    if output is not None:
        check_output_folder(output)
    if threads is not None:
        torch.set_num_threads(threads)
    follow = progress or unheard
    written, text_name = read_text(text)
    source = resolve(model, seed=seed)
    config = model_config_of(source.hf_config)
    if config.max_positions is not None and window > config.max_positions:
        raise UserError(f"got window = {window}, but {model} has {config.max_positions} positions; use a smaller one")
    ids = encode(written, source.tokenizer, vocab=config.vocab_size, most=tokens, least=window)
    options = {"quant": dict(quant)} if quant else {}
    follow(0, 1, f"loading {model}, {dtype}")
    engine = init_inference(source, dtype=weight_dtype, replace_with_kernel_inject=True, **options)
    follow(0, 1, f"loading {model}, {against}")
    reference = _reference(source, against)
    windows, seconds = _scores(engine, reference, ids, window, stride, follow)
    return Evaluation(
        case=EvaluationCase(
            model=model,
            origin=source.origin,
            dtype=dtype,
            quant=dict(quant or {}),
            against=against,
            text=text_name,
            tokens=len(ids),
            window=window,
            stride=stride,
            threads=torch.get_num_threads(),
        ),
        environment=read_environment(torch.get_num_threads()),
        impl=engine.impl,
        windows=tuple(windows),
        seconds=seconds,
        weight_bytes=model_bytes(shard(config), weight_dtype, Quantization.model_validate(quant or {})),
    )


def _check_sizes(tokens: int, window: int, stride: int, threads: int | None) -> None:
    if threads is not None and threads < 1:
        raise UserError(f"got threads = {threads}, expected at least 1")
    if window < 2:
        raise UserError(f"got window = {window}, expected at least 2 tokens: the first one predicts the second")
    if not 1 <= stride <= window:
        raise UserError(f"got stride = {stride}, expected 1 to {window}, the window: no token may be left out")
    if tokens < window:
        raise UserError(f"got tokens = {tokens}, expected at least {window}, a window")


def _scores(
    engine: Any, reference: Logits, ids: Tensor, window: int, stride: int, follow: Progress
) -> tuple[list[WindowScore], float]:
    """Of all windows of a text, and the seconds that the engine computed."""
    begins = starts(len(ids), window, stride)
    found, seconds, predicted = [], 0.0, 0
    for index, begin in enumerate(begins):
        follow(index, len(begins), f"window {index + 1} of {len(begins)}")
        part = ids[begin : begin + window]
        begun = perf_counter()
        logits = _logits(engine, part)
        seconds += perf_counter() - begun
        new = slice(max(predicted - begin, 0), len(part) - 1)  # what no window before has predicted
        found.append(_compare(logits[new], reference(part)[new], part[new.start + 1 : new.stop + 1]))
        predicted = begin + len(part) - 1
    follow(len(begins), len(begins), "done")
    return found, seconds


def _reference(source: ModelSource, against: str) -> Logits:
    if against == VANILLA:
        model = source.hf_model(torch.float32)
    else:
        model = init_inference(source, dtype=dtype_of(against, DTYPES), replace_with_kernel_inject=True)
    return lambda part: _logits(model, part)


@torch.inference_mode()
def _logits(model: Any, part: Tensor) -> Tensor:
    """Of the tokens that follow each token of a window: float32 [tokens, vocabulary]."""
    logits: Tensor = model(input_ids=part[None].to(model.device), use_cache=False).logits
    return logits[0].float().cpu()


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
