"""`labkit generate`: an answer of a chat model, a continued text, and a line on the speed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.chat_models import chat_checkpoint, chat_model_without_a_row, chat_tokenizer
from helpers.processes.command_line import Labkit, command_line
from transformers import TextStreamer

import labkit as package
from labkit.cli import chat as chat_cli
from labkit.cli import generate as generate_cli
from labkit.cli import speaking
from labkit.models.tokenizer import END_OF_TEXT
from labkit.system.errors import UserError
from labkit.system.shown import shown_lines

HELLO = ("--prompt", "hello there")
SPEED = r"{} tokens, [\d.]+ tokens/s, [\d.]+ ms per token, first token after \d+ ms, \d+% of the physical limit"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(chat_checkpoint(tmp_path_factory.mktemp("chat")))


@pytest.fixture
def labkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Runs a command line in the test's folder: (exit code, stdout, stderr)."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("labkit.conversation.speed.kept_rate_gb_s", lambda threads: 1.0)
    monkeypatch.chdir(tmp_path)
    return command_line(monkeypatch, capsys)


def answered(checkpoint: str, new: int, messages: list[dict[str, str]], **options: Any) -> str:
    """Answer of `engine.generate` to the rendered conversation, without special tokens."""
    engine = package.init_inference(checkpoint, dtype=options.pop("dtype", torch.float32))
    rendered = chat_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = engine.generate(**rendered, max_new_tokens=new, do_sample=False, eos_token_id=END_OF_TEXT)
    answer: str = chat_tokenizer().decode(out[0, rendered["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer


def test_a_chat_model_answers_and_nothing_else_is_printed(labkit: Labkit, checkpoint: str) -> None:
    code, output, errors = labkit("generate", checkpoint, *HELLO, "--new", "9")
    assert code == 0, errors
    assert output == answered(checkpoint, 9, [{"role": "user", "content": "hello there"}]) + "\n"
    origin, speed = errors.splitlines()
    assert origin == f"checkpoint {checkpoint}; float32 weights"
    assert re.fullmatch(SPEED.format(9), speed)


def test_a_model_without_a_row_answers_and_says_why_it_has_none(labkit: Labkit, tmp_path: Path) -> None:
    folder = str(chat_checkpoint(tmp_path / "experts", model=chat_model_without_a_row()))
    code, output, errors = labkit("generate", folder, *HELLO, "--new", "9")
    assert code == 0, errors
    assert output == answered(folder, 9, [{"role": "user", "content": "hello there"}]) + "\n"
    assert (
        "; no row: a router that no row describes: its experts or their shares are others; hooks in transformers' model"
        in errors
    )


def test_an_answer_waits_for_no_probe_of_the_memory(
    labkit: Labkit, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a kept rate the line has no share of the limit."""
    monkeypatch.setattr("labkit.conversation.speed.kept_rate_gb_s", lambda threads: None)
    monkeypatch.setattr("labkit.conversation.speed.probe_bandwidth", lambda threads, device: pytest.fail("a probe"))
    code, _, errors = labkit("generate", checkpoint, *HELLO, "--new", "9")
    assert code == 0, errors
    assert re.fullmatch(SPEED.format(9).partition(r", \d+%")[0], errors.splitlines()[-1])


def test_dtype_and_system_prompt_reach_the_engine(labkit: Labkit, checkpoint: str) -> None:
    arguments = ("--new", "9", "--dtype", "int8", "--system", "be brief")
    code, output, errors = labkit("generate", checkpoint, *HELLO, *arguments)
    assert code == 0, errors
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
    assert output == answered(checkpoint, 9, messages, dtype=torch.int8) + "\n"


def test_a_model_larger_than_the_memory_for_it_is_read_from_the_disk(labkit: Labkit, tmp_path: Path) -> None:
    """With too little memory the error names the least that works; with that the answer is the same."""
    checkpoint = str(chat_checkpoint(tmp_path / "deep", layers=5))
    arguments = ("--new", "9", "--offload", str(tmp_path / "packed"))
    code, output, errors = labkit("generate", checkpoint, *HELLO, *arguments, "--resident-gb", "0")
    assert (code, output) == (2, "")
    least = re.search(r"the least is resident_gb = ([\d.]+)", errors)
    assert least is not None, errors
    code, output, errors = labkit("generate", checkpoint, *HELLO, *arguments, "--resident-gb", least[1])
    assert code == 0, errors
    assert output == shown_lines(answered(checkpoint, 9, [{"role": "user", "content": "hello there"}])) + "\n"
    assert re.search(r"\d of \d layers, [\d.e-]+ GB, are read from .*packed.* for every token", errors)


@pytest.mark.parametrize("templated", [True, False])
def test_a_text_is_continued_as_transformers_streams_it(
    templated: bool, labkit: Labkit, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --raw or without a chat template, the prompt and special tokens are printed too."""
    model = checkpoint if templated else str(chat_checkpoint(tmp_path / "plain", template=None))
    code, output, errors = labkit("generate", model, *HELLO, "--new", "9", *(["--raw"] if templated else []))
    assert code == 0, errors
    source = package.resolve(model)
    ids = source.tokenizer("hello there", return_tensors="pt")["input_ids"]
    engine = package.init_inference(source, dtype=torch.float32)
    engine.generate(ids, max_new_tokens=9, do_sample=False, streamer=TextStreamer(source.tokenizer))
    assert output == capsys.readouterr().out
    assert output.startswith("hello there")


def test_where_the_weights_come_from_is_said(labkit: Labkit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is not mentioned if no rate of the memory is kept."""
    monkeypatch.setattr("labkit.conversation.speed.kept_rate_gb_s", lambda threads: None)
    code, output, errors = labkit("generate", "tiny-gpt2", "--prompt", "Once upon", "--new", "5")
    assert code == 0, errors
    assert output.startswith("Once upon")
    assert len(output.strip()) > len("Once upon")
    assert "random weights, seed 0" in errors
    assert "5 tokens, " in errors
    assert "limit" not in errors


@pytest.mark.parametrize("command", [("generate", "--prompt", "a"), ("chat",)], ids=lambda command: command[0])
def test_a_model_need_not_be_named(command: tuple[str, ...], labkit: Labkit, monkeypatch: pytest.MonkeyPatch) -> None:
    def sought(model: str | None, **options: Any) -> None:
        raise UserError(f"sought {model}")

    for module in (generate_cli, chat_cli):
        monkeypatch.setattr(module, "find_model", sought)
    code, _, errors = labkit(*command)
    assert code == 2
    assert "sought None" in errors


def test_sampling_repeats_with_its_seed(labkit: Labkit) -> None:
    sampled = ("generate", "tiny-llama", "--prompt", "Once", "--new", "8", "--temperature", "1", "--seed")
    texts = [labkit(*sampled, seed)[1] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("options", [(), ("--raw",)])
def test_ctrl_c_keeps_what_was_said(
    options: tuple[str, ...], labkit: Labkit, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = labkit("generate", checkpoint, *HELLO, "--new", "60", *options)[1]
    heard: list[str] = []

    def write(text: str) -> None:
        speaking.write(text)
        heard.append(text)
        if len(heard) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(generate_cli, "write", write)
    code, output, errors = labkit("generate", checkpoint, *HELLO, "--new", "60", *options)
    assert code == 130
    assert 0 < len(output.strip()) < len(whole.strip())
    assert whole.startswith(output.rstrip("\n"))
    assert re.search(r"^\d+ tokens, [\d.]+ tokens/s, .*first token after \d+ ms$", errors, re.MULTILINE)
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", ""), "got an empty prompt"),
        (("--prompt", "a", "--new", "0"), "got new = 0"),
        (("--prompt", "a", "--new", "3000"), "use a shorter prompt or fewer new tokens"),
        (("--prompt", "a", "--threads", "0"), "got threads = 0"),
        (("--prompt", "a", "--temperature", "-1"), "got temperature = -1"),
        (("--prompt", "a", "--dtype", "int3"), "expected one of float32, bfloat16, float16, int8"),
        (("--prompt", "a", "--system", "b"), "leave it out, or use a chat model without --raw"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_explained_without_a_traceback(arguments: tuple[str, ...], message: str, labkit: Labkit) -> None:
    code, output, errors = labkit("generate", "tiny-gpt2", *arguments)
    assert (code, output) == (2, "")
    assert message in errors
    assert "Traceback" not in errors


def test_a_system_prompt_for_a_raw_text_is_refused(labkit: Labkit, checkpoint: str) -> None:
    code, output, errors = labkit("generate", checkpoint, *HELLO, "--raw", "--system", "be brief")
    assert (code, output) == (2, "")
    assert "got --system for a text to continue" in errors
