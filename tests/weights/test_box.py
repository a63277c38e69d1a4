"""The trained model in the box: converted once, checked every time, and converted again if it is damaged."""

import json
import logging
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from helpers.models.gguf_files import gguf_model, write_gguf

from labkit.engine import init_inference
from labkit.harness.stored_weights import stored_by, weights_text
from labkit.weights import box
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replacement for the package's file."""
    monkeypatch.setattr(box, "cache_root", lambda: tmp_path / "cache")  # compiled kernels keep their cache
    gguf_file = write_gguf(tmp_path / "model.gguf", gguf_model("llama"), "Q4_1")
    monkeypatch.setattr("labkit.weights.resolve.boxed_file", lambda: gguf_file)
    return gguf_file


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders into which a model was converted."""
    folders, convert = [], box.convert

    def convert_and_count(file: Path, folder: Path) -> None:
        folders.append(folder)
        convert(file, folder)

    monkeypatch.setattr(box, "convert", convert_and_count)
    return folders


def tokens(source: ModelSource) -> torch.Tensor:
    engine = init_inference(source, replace_with_kernel_inject=True)
    assert weights_text(stored_by(engine)) == "int4-32"
    return engine.generate(torch.arange(1, 9)[None], max_new_tokens=8, do_sample=False)


@pytest.mark.usefixtures("file")
def test_it_is_converted_once_and_says_where_it_is_from(conversions: list[Path], file: Path) -> None:
    first, second = (resolve("smollm2-135m") for _ in range(2))
    assert len(conversions) == 1
    assert [path.name for path in conversions[0].parent.iterdir()] == [conversions[0].name]
    for source in (first, second):
        assert source.origin == box.ORIGIN
        assert source.gguf == file
        assert "Apache-2.0" in source.origin
        assert box.PACKAGE in source.origin
    assert torch.equal(tokens(first), tokens(second))
    assert torch.equal(tokens(first), tokens(resolve(file)))


@pytest.mark.parametrize("fault", ["a byte", "a file", "half a file", "the tokenizer"])
def test_a_damaged_cache_is_made_anew(
    fault: str, file: Path, conversions: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    resolve("smollm2-135m")
    (packed,) = conversions[0].glob("*.safetensors")
    data = bytearray(packed.read_bytes())
    data[len(data) // 2] ^= 1
    with caplog.at_level(logging.WARNING, logger="labkit"):
        if fault == "a byte":
            packed.write_bytes(data)
        elif fault == "half a file":
            packed.write_bytes(data[: len(data) // 2])
        elif fault == "a file":
            packed.unlink()
        else:
            (conversions[0] / "tokenizer.json").unlink()
        source = resolve("smollm2-135m")
    assert len(conversions) == 2
    assert "is made anew" in caplog.text
    assert torch.equal(tokens(source), tokens(resolve(file)))
    assert [path.name for path in conversions[0].parent.iterdir()] == [conversions[0].name]


NO_DIGESTS: tuple[object, ...] = (
    *([], None, 3, 1.5, "config.json", True, {}, ["config.json"], [["config.json", "0"]]),
    *({"config.json": digest} for digest in (None, 3, ["0"], {"a": "0"}, "", "é")),
    *({name: "0"} for name in ("", "..", "../model.gguf", "/dev/null", "none.json", "a\0b", "x" * 5000)),
)


@pytest.mark.usefixtures("file")
def test_digests_of_any_other_form_are_made_anew(conversions: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    resolve("smollm2-135m")
    digests = conversions[0] / box.DIGESTS
    text = digests.read_text()
    contents = [json.dumps(content) for content in NO_DIGESTS]
    for content in (*contents, "", "{", "[" * 99, "\xff", text[: len(text) // 2]):
        digests.write_text(content, encoding="latin-1")
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="labkit"):
            resolve("smollm2-135m")
        assert "is made anew" in caplog.text, content
        assert json.loads(digests.read_text()).keys() == json.loads(text).keys()


@pytest.mark.usefixtures("file")
def test_a_conversion_by_another_reading_of_the_file_is_made_anew(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve("smollm2-135m")
    monkeypatch.setattr(box, "READING", box.READING + 1)
    resolve("smollm2-135m")
    assert len({folder.name for folder in conversions}) == 2


def test_an_interrupted_conversion_leaves_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, conversions: list[Path]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(box, "build_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resolve("smollm2-135m")
    assert not list((tmp_path / "cache" / "models").iterdir())
    assert torch.equal(tokens(resolve("smollm2-135m")), tokens(resolve(file)))
    assert len(conversions) == 2


def test_without_a_cache_the_file_itself_serves(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "cache_root", lambda: None)
    assert torch.equal(tokens(resolve("smollm2-135m")), tokens(resolve(file)))


def test_without_the_package_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(box, "distribution", missing)
    with caplog.at_level(logging.WARNING, logger="labkit"):
        assert box.default_model() == "gpt2"
    assert caplog.messages == [f"labkit: gpt2 has random weights; for a trained model: {box.HOW_TO_GET}"]
    assert resolve("smollm2-135m").origin.endswith(f"for the trained ones: {box.HOW_TO_GET}")


@pytest.mark.skipif(box.boxed_file() is None, reason=f"the trained model is not installed: {box.HOW_TO_GET}")
def test_the_trained_model_knows_the_capital_of_france() -> None:
    source = resolve("smollm2-135m")
    engine = init_inference(source, replace_with_kernel_inject=True)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = source.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    new = engine.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in source.tokenizer.decode(new)


@pytest.mark.skipif(box.boxed_file() is None, reason=f"the trained model is not installed: {box.HOW_TO_GET}")
def test_the_trained_model_reads_the_tokens_of_llama_cpp() -> None:
    """Its file names the split `smollm`: each digit is a word of its own."""
    expected = {
        "n  34": [94, 256, 35, 36],
        "tab\t\t7": [15999, 1656, 39],
        "Steps:\n\n1. a": [21831, 42, 1116, 33, 30, 253],
    }
    tokenizer = resolve("smollm2-135m").tokenizer
    assert {text: tokenizer(text)["input_ids"] for text in expected} == expected
