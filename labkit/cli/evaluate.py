"""`labkit evaluate`: a thin layer over `labkit.harness.evaluation`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.cli.measuring import PRECISIONS, AsJson, Model, Output, Threads
from labkit.system.errors import UserError
from labkit.system.progress import progress_bar
from labkit.system.terminal import terminal

out = terminal()
err = terminal(stderr=True)


def evaluate(
    model: Model,
    dtype: Annotated[str | None, typer.Option(help=f"{PRECISIONS}; by default float32, or int8 with --quant.")] = None,
    quant: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='Quantisation of weights: {"weight": {"num_bits": 4, "group_size": 32}}.'),
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Type of the KV cache: int8, or the engine's own.")] = None,
    rows: Annotated[
        int | None, typer.Option(help="Tokens in one step. Default: a window, or fewer if only these show rounding.")
    ] = None,
    against: Annotated[
        str, typer.Option(help="The reference: a precision of the engine, or vanilla (transformers in float32).")
    ] = "float32",
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file. Default: Python's help topics.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text, from its beginning.")] = 4096,
    window: Annotated[
        int | None, typer.Option(help="Tokens of a window. Default: 512, or the most that model and text allow.")
    ] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens between window starts. Default: a window.")] = None,
    bos: Annotated[
        bool | None,
        typer.Option(
            "--bos/--no-bos", help="A beginning-of-text token before every window. Default: as the tokenizer does."
        ),
    ] = None,
    threads: Threads = None,
    seed: Annotated[int, typer.Option(help="Seed of random weights.")] = 0,
    *,
    output: Output,
    as_json: AsJson = False,
) -> None:
    """Measure what a precision costs in quality: perplexity on a text, and change of the model's answers."""
    from labkit.harness.evaluation.evaluate import evaluate as run_evaluation
    from labkit.harness.results import save

    with progress_bar(err) as follow:
        evaluation = run_evaluation(
            model,
            dtype=dtype,
            quant=_quant_options(quant),
            kv_dtype=kv_dtype,
            rows=rows,
            against=against,
            text=text,
            tokens=tokens,
            window=window,
            stride=stride,
            bos=bos,
            threads=threads,
            seed=seed,
            output=output,
            progress=follow,
        )
    if as_json:
        typer.echo(json.dumps(evaluation.as_dict()))
    else:
        out.print(evaluation)
    save(evaluation, output)  # last, so that the result is shown even if it cannot be saved


def _quant_options(quant: str | None) -> dict[str, Any] | None:
    """The options in the JSON of `--quant`."""
    if quant is None:
        return None
    try:
        options = json.loads(quant)
    except ValueError as error:
        raise UserError(f"got --quant {quant!r}, which is not JSON ({error}); expected an object of options") from None
    if not isinstance(options, dict):
        raise UserError(f'got --quant {quant!r}, expected an object of options, such as {{"lm_head": true}}')
    return options
