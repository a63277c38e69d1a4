"""`labkit generate`: one answer of a chat model, or the continuation of a text by any model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.cli.measuring import OrTrained, Precision, Threads
from labkit.cli.speaking import (
    NEW_OF_ANSWER,
    OffloadPath,
    ResidentGb,
    Seed,
    System,
    Temperature,
    find_model,
    load_engine,
    remark,
    sampling,
    write,
)
from labkit.system.errors import UserError
from labkit.system.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from labkit.conversation import Answer
    from labkit.engine import InferenceEngine
    from labkit.weights.source import ModelSource

NEW_OF_TEXT = 64


def generate(
    prompt: Annotated[str, typer.Option(help="The message to answer, or the text to continue.")],
    model: OrTrained = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, even with a chat model.")
    ] = False,
    system: System = None,
    new: Annotated[
        int | None,
        typer.Option(
            help=f"Most tokens to generate. Default: {NEW_OF_ANSWER} for an answer, {NEW_OF_TEXT} for a text."
        ),
    ] = None,
    dtype: Precision = "stored",
    threads: Threads = None,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    resident_gb: ResidentGb = None,
    offload: OffloadPath = None,
) -> None:
    """Answer a prompt with the fused engine, printing the text as it is generated.

    A model without a chat template continues the prompt.
    """
    source = find_model(model, dtype=dtype, threads=threads, seed=seed)
    answers = source.tokenizer.chat_template is not None and not raw
    if not prompt:
        raise UserError("got an empty prompt, expected text of at least one token")
    if system is not None and not answers:
        raise UserError("got --system for a text to continue; leave it out, or use a chat model without --raw")
    engine = load_engine(source, dtype=dtype, seed=seed, resident_gb=resident_gb, offload=offload)
    options = sampling(temperature)
    if answers:
        from labkit.conversation import Conversation

        conversation = Conversation(engine, source.tokenizer, system=system, new=new or NEW_OF_ANSWER, **options)
        answer = conversation.say(prompt, write)
    else:
        answer = _continued(engine, source, prompt, new=new or NEW_OF_TEXT, **options)
    typer.echo()
    _show_speed(engine, answer)


def _continued(engine: InferenceEngine, source: ModelSource, prompt: str, *, new: int, **options: Any) -> Answer:
    from labkit.conversation import speak
    from labkit.conversation.answer import stop_tokens
    from labkit.engine.engine import DecoderEngine
    from labkit.harness.compare.plan import check_positions

    ids = source.tokenizer(prompt, return_tensors="pt")["input_ids"]
    if isinstance(engine, DecoderEngine):
        check_positions(engine.model_config, ids.shape[1], new)
    return speak(engine, source.tokenizer, ids, write, new=new, stops=stop_tokens(engine), with_prompt=True, **options)


def _show_speed(engine: InferenceEngine, answer: Answer) -> None:
    from labkit.conversation.speed import floor_share, speed_line

    if answer.ended == "interrupted":
        remark(speed_line(answer))
        raise typer.Exit(INTERRUPTED)
    remark(speed_line(answer, floor_share(engine, answer)))
