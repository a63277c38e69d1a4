"""`labkit chat`: a conversation line by line, from a pipe and at a terminal."""

import io
import re
import sys
from collections.abc import Iterator

import pytest
import torch
from helpers.models.chat_models import chat_checkpoint
from helpers.models.small_models import POSITIONS
from helpers.processes.command_line import Labkit, command_line

import labkit as package
from labkit.cli import chat as chat_cli
from labkit.conversation import Conversation

REMARK = r"[\d.]+ tokens/s, context {} of {} tokens, cut off by --new"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(chat_checkpoint(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def answers(checkpoint: str) -> list[str]:
    """The model's answers to "hello" and then to "why?", of 7 tokens each."""
    source = package.resolve(checkpoint)
    conversation = Conversation(package.init_inference(source, dtype=torch.float32), source.tokenizer, new=7)
    return [conversation.say(message, lambda text: None).text for message in ("hello", "why?")]


@pytest.fixture
def labkit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Runs a command line: (exit code, stdout, stderr)."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return command_line(monkeypatch, capsys)


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> None:
    """Replaces input() by these lines of a terminal, followed by Ctrl-D."""
    remaining: Iterator[str | BaseException] = iter(lines)

    def prompted(prompt: str) -> str:
        line = next(remaining, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", prompted)


def piped(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))


def test_lines_of_a_pipe_are_answered_in_one_conversation(
    labkit: Labkit, checkpoint: str, answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty lines are skipped; /new forgets the turns before it."""
    piped(monkeypatch, "hello", "", "why?", "/new", "hello")
    code, output, errors = labkit("chat", checkpoint, "--new", "7")
    assert code == 0, errors
    assert output == "".join(f"{answer}\n" for answer in (*answers, answers[0]))
    origin, *remarks = errors.splitlines()
    assert origin == f"checkpoint {checkpoint}; float32 weights"
    assert remarks[2] == "a new conversation"
    assert re.fullmatch(REMARK.format(r"\d+", POSITIONS), remarks[0])
    assert remarks[0].split("context")[1] == remarks[3].split("context")[1] != remarks[1].split("context")[1]


def test_bye_ends(labkit: Labkit, checkpoint: str, answers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    piped(monkeypatch, "hello", "/bye", "why?")
    assert labkit("chat", checkpoint, "--new", "7")[:2] == (0, f"{answers[0]}\n")


def test_ctrl_d_ends_at_a_terminal(
    labkit: Labkit, checkpoint: str, answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "hello", "why?")
    code, output, errors = labkit("chat", checkpoint, "--new", "7")
    assert (code, output) == (0, f"{answers[0]}\n{answers[1]}\n\n")
    assert "/new begins a new conversation, /bye or Ctrl-D ends, Ctrl-C stops an answer" in errors


def test_ctrl_c_stops_the_answer_and_at_the_prompt_the_conversation(
    labkit: Labkit, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def write(text: str) -> None:
        heard.append(text)
        if len(heard) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat_cli, "write", write)
    typed(monkeypatch, "hello", "go on", KeyboardInterrupt())
    code, _, errors = labkit("chat", checkpoint, "--new", "40")
    assert code == 130
    stopped, whole = (line for line in errors.splitlines() if "context" in line)
    assert stopped.endswith(", stopped")
    assert whole.endswith(", cut off by --new")
    assert "Traceback" not in errors


def test_the_last_position_is_said_and_a_new_conversation_goes_on(
    labkit: Labkit, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped(monkeypatch, "hello", "why?", "/new", "hello")
    code, output, errors = labkit("chat", checkpoint, "--new", "1000")
    assert code == 0, errors
    assert errors.count(f"context {POSITIONS} of {POSITIONS} tokens: the model has no positions left, /new") == 2
    assert f"the model {POSITIONS} positions; begin a new conversation, or shorten the message (/new)" in errors
    first, second = output[: len(output) // 2], output[len(output) // 2 :]
    assert first == second


def test_a_model_without_a_chat_template_is_refused(labkit: Labkit) -> None:
    code, output, errors = labkit("chat", "tiny-gpt2")
    assert (code, output) == (2, "")
    assert "no chat template" in errors
    assert "labkit generate continues a text" in errors
