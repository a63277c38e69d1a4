"""`labkit chat`: a thin layer over `labkit.conversation`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated

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
from labkit.cli.words import check_text
from labkit.system.errors import UserError

if TYPE_CHECKING:
    from labkit.conversation import Answer, Conversation

BYE, NEW = "/bye", "/new"
MOST_OF_A_LINE = 1 << 20  # characters


def chat(
    model: OrTrained = None,
    system: System = None,
    new: Annotated[int, typer.Option(help="Most tokens of an answer.")] = NEW_OF_ANSWER,
    dtype: Precision = "stored",
    threads: Threads = None,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    resident_gb: ResidentGb = None,
    offload: OffloadPath = None,
) -> None:
    """Talk to a chat model, line by line, with the fused engine.

    /new begins a new conversation, /bye or Ctrl-D ends the command, Ctrl-C stops an answer.
    """
    from labkit.conversation import ContextFullError, Conversation
    from labkit.models.chat_template import check_chat_template

    source = find_model(model, dtype=dtype, threads=threads, seed=seed)
    check_chat_template(source.tokenizer)
    engine = load_engine(source, dtype=dtype, seed=seed, resident_gb=resident_gb, offload=offload)
    conversation = Conversation(engine, source.tokenizer, system=system, new=new, **sampling(temperature))
    for line in _lines():
        if line == BYE:
            return
        if line == NEW:
            conversation.start_over()
            remark("a new conversation")
        elif line:
            try:
                check_text(line, "a message")
                answer = conversation.say(line, write)
            except ContextFullError as error:
                remark(f"{error} ({NEW})")
            except UserError as error:  # concerns only this message: the conversation stays
                remark(f"error: {error}")
            else:
                typer.echo()
                remark(_summary(conversation, answer))


def _lines() -> Iterator[str]:
    """The user's messages, line by line, until the input ends. Bytes that are not UTF-8 become lone surrogates."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if not sys.stdin.isatty():
        while line := sys.stdin.readline(MOST_OF_A_LINE):
            if len(line) == MOST_OF_A_LINE:
                raise UserError(
                    f"got a line of more than {MOST_OF_A_LINE:,} characters, expected messages line by line"
                )
            yield line.strip()
        return
    with suppress(ImportError):  # readline gives input() a history and arrow keys
        import readline  # noqa: F401
    remark(f"{NEW} begins a new conversation, {BYE} or Ctrl-D ends, Ctrl-C stops an answer")
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt) as ended:
            typer.echo()  # the next output begins on a new line
            if isinstance(ended, EOFError):
                return
            raise
        yield line.strip()


def _summary(conversation: Conversation, answer: Answer) -> str:
    """The speed of an answer, the length of the context, and why the answer ended early, if it did."""
    speed = "" if answer.tokens_per_s is None else f"{answer.tokens_per_s:.1f} tokens/s, "
    limit = "" if conversation.positions is None else f" of {conversation.positions}"
    return f"{speed}context {conversation.context}{limit} tokens{_cut(conversation, answer)}"


def _cut(conversation: Conversation, answer: Answer) -> str:
    if conversation.context == conversation.positions:
        return f": the model has no positions left, {NEW} begins a new conversation"
    return {"stop": "", "length": ", cut off by --new", "interrupted": ", stopped"}[answer.ended]
