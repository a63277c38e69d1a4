"""llama.cpp as a side: found where the user names it, refused with a reason, and its greedy tokens are vanilla's."""

import copy
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models.gguf_files import gguf_model, logits_of, write_gguf
from helpers.models.gguf_mixtures import DERIVED_MIXTURES
from helpers.sweeps import sweep

from labkit.engine import init_inference
from labkit.harness.compare import interleave
from labkit.harness.compare.compare import compare, compare_with_each, comparison_case
from labkit.harness.compare.conversion import converted
from labkit.harness.compare.loader import Room
from labkit.harness.compare.peers.llama_cpp import (
    CONVERTER,
    LLAMA_CPP,
    LLAMA_CPP_GGUF,
    LLAMA_CPP_Q4_0,
    LLAMA_CPP_Q4_1,
    PYTHON,
    SOURCES,
    LlamaCpp,
    quantise,
    stored_in,
)
from labkit.harness.compare.plan import Schedule
from labkit.harness.stored_weights import StoredWeights
from labkit.system.errors import RunError, UserError
from labkit.weights.resolve import resolve

MISSING = LlamaCpp().unavailable()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No peer is installed, and the user names none."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    for name in (PYTHON, SOURCES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """A script that answers like an interpreter that has the package `llama_cpp`."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho /somewhere/llama_cpp/__init__.py\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / CONVERTER).touch()
    return folder


@pytest.mark.usefixtures("not_installed")
def test_it_is_found_through_the_interpreter_and_the_sources_that_the_user_names(
    interpreter: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON, str(interpreter))
    monkeypatch.setenv(SOURCES, str(sources))
    assert LlamaCpp().unavailable() is None
    assert LlamaCpp().packages() == Path("/somewhere")


@pytest.mark.usefixtures("not_installed")
def test_what_is_neither_installed_nor_named_says_how_to_install_it() -> None:
    reason = LlamaCpp().unavailable()
    assert reason is not None
    assert "labkit peers install llama.cpp" in reason


def test_an_interpreter_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON, "/no/such/python")
    reason = LlamaCpp().unavailable()
    assert reason is not None
    assert reason.startswith("/no/such/python does not import llama_cpp")
    assert PYTHON in reason


@pytest.mark.usefixtures("not_installed")
@pytest.mark.parametrize("folder", [None, "/no/such/folder"])
def test_a_missing_converter_is_named(interpreter: Path, folder: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON, str(interpreter))
    if folder:
        monkeypatch.setenv(SOURCES, folder)
    reason = LlamaCpp().unavailable()
    assert reason is not None
    assert CONVERTER in reason
    assert (folder or "is not set") in reason


@sweep
def test_a_converter_that_fails_is_reported_in_one_line(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOURCES, str(sources))
    with (
        pytest.raises(RuntimeError, match=r"^llama.cpp could not convert tiny-gpt2 in float32: .*No module named.*$"),
        converted(LLAMA_CPP, "tiny-gpt2", dtype="float32", seed=0),
    ):
        pass


def test_a_comparison_without_it_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON, "/no/such/python")
    with pytest.raises(ValueError, match="does not import llama_cpp"):
        compare(LLAMA_CPP, "fused", model="tiny-gpt2", output=None)


def test_a_batch_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaCpp, "unavailable", lambda peer: None)
    monkeypatch.setattr(interleave, "wait_until_quiet", lambda *_, **__: pytest.fail("it waited"))
    with pytest.raises(ValueError, match="got a batch of 2, expected 1"):
        compare(LLAMA_CPP, "fused", model="tiny-gpt2", batch=2, wait_quiet_s=5, output=None)


def test_a_model_that_is_no_file_is_no_side_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaCpp, "unavailable", lambda peer: None)
    with pytest.raises(UserError, match=r"got tiny-gpt2 for llama.cpp-gguf, expected a GGUF file; use llama.cpp"):
        compare(LLAMA_CPP_GGUF, "fused", model="tiny-gpt2", output=None)
    LlamaCpp().check_model(LLAMA_CPP_GGUF, SimpleNamespace(gguf=Path("x.gguf"), weights=None))  # type: ignore[arg-type]


def test_the_first_of_several_parts_is_no_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaCpp, "unavailable", lambda peer: None)
    first = write_gguf(tmp_path / "model.gguf", gguf_model("llama"), split=9)
    with pytest.raises(UserError, match=r"got the first of 3 parts for llama.cpp-gguf, .* llama-gguf-split --merge"):
        compare(LLAMA_CPP_GGUF, "fused", model=str(first), output=None)


def test_a_quantiser_that_fails_is_named(tmp_path: Path) -> None:
    api = SimpleNamespace(
        LLAMA_FTYPE_MOSTLY_Q4_0=2,
        llama_model_quantize_default_params=SimpleNamespace,
        llama_model_quantize=lambda plain, target, settings: settings.ftype,
    )
    with pytest.raises(RunError, match=r"llama.cpp cannot write Q4_0: .* status 2"):
        quantise(api, tmp_path / "a", tmp_path / "b", "Q4_0")


def reader(file_type: int | None, **tensors: tuple[str, int, int]) -> Any:
    """Replacement of the package `gguf`, with one file: the type, bytes and numbers of each tensor."""
    namespace = SimpleNamespace
    fields = {} if file_type is None else {"general.file_type": namespace(contents=lambda: file_type)}
    entries = [
        namespace(
            name=name.replace("__", "."),
            tensor_type=namespace(name=kind),
            n_bytes=size,
            n_elements=numbers,
            shape=(1, 1),
        )
        for name, (kind, size, numbers) in tensors.items()
    ]
    return namespace(
        GGUFReader=lambda file: namespace(fields=fields, tensors=entries),
        LlamaFileType=lambda number: namespace(name={2: "MOSTLY_Q4_0", 0: "ALL_F32"}[number]),
    )


def test_what_a_file_holds_is_counted_apart_for_layers_and_head(tmp_path: Path) -> None:
    layers = {"blk__0__up__weight": ("Q4_0", 18, 32), "blk__0__down__weight": ("F16", 64, 32)}
    tied = reader(2, token_embd__weight=("Q6_K", 210, 256), **layers)
    assert stored_in(tmp_path, tied) == StoredWeights(
        name="Q4_0", bits=8 * 82 / 64, head="Q6_K", head_bits=6.5625, computes="int8"
    )
    own_head = reader(None, token_embd__weight=("Q4_0", 18, 32), output__weight=("Q8_0", 34, 32), **layers)
    assert stored_in(tmp_path, own_head).head == "Q8_0"
    assert stored_in(tmp_path, own_head).name == "Q4_0"
    assert stored_in(tmp_path, reader(0, output__weight=("F32", 4, 1), **layers)).computes == "float32"


@sweep
@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
def test_sides_of_four_bits_say_what_they_hold_whatever_the_dtype() -> None:
    case = comparison_case(model="tiny-gpt2", dtype="bfloat16", batch=1, prompt=20, new=12, threads=1)
    sides = (LLAMA_CPP, LLAMA_CPP_Q4_0, LLAMA_CPP_Q4_1)
    plain, q4_0, q4_1 = (
        record.baseline for record in compare_with_each(sides, "fused", case, Schedule(rounds=2, stages=False))
    )
    assert [side.weights for side in (plain, q4_0, q4_1)] == ["bfloat16", "Q4_0", "Q4_1"]
    # Q6_K, llama.cpp's choice for larger models, needs blocks of more than the 64 columns
    assert "LM head Q8_0" in q4_0.impl
    works = [side.work.decode_bytes for side in (q4_0, q4_1, plain) if side.work]
    assert works == sorted(set(works))
    assert len(works) == 3


@sweep
@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
def test_a_given_file_is_run_as_it_is(tmp_path: Path) -> None:
    source, peer = resolve("tiny-gpt2"), LlamaCpp()
    prompt = torch.arange(40, 60)[None].numpy()
    with converted(LLAMA_CPP_Q4_1, "tiny-gpt2", dtype="float32", seed=0) as folder:
        file = folder / "model.gguf"
        file_source: Any = SimpleNamespace(gguf=file, hf_config=source.hf_config, tokenizer=source.tokenizer, name="it")
        peer.convert(LLAMA_CPP_GGUF, file_source, "float32", tmp_path)
        assert [path.resolve() for path in tmp_path.glob("*.gguf")] == [file.resolve()]
        loaded = [
            peer.load(side, directory, file_source, torch.float32, Room(1, 1, 1, 32))
            for side, directory in ((LLAMA_CPP_Q4_1, folder), (LLAMA_CPP_GGUF, tmp_path))
        ]
        logits = [side.model.logits(prompt).copy() for side in loaded]
        assert (logits[0] == logits[1]).all()
        assert loaded[0].weights == loaded[1].weights
        assert loaded[1].impl.endswith("Q4_1, LM head Q8_0")
        file_source.hf_config = copy.deepcopy(source.hf_config)
        file_source.hf_config.vocab_size = 500
        with pytest.raises(UserError, match=r"got 512 tokens in .*, expected 500, the vocabulary of it"):
            peer.load(LLAMA_CPP_GGUF, tmp_path, file_source, torch.float32, Room(1, 1, 1, 32))


@sweep
@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-bloom", "tiny-llama"])
def test_its_float32_tokens_are_those_of_the_other_sides(model: str) -> None:
    case = comparison_case(model=model, dtype="float32", batch=1, prompt=20, new=12, threads=1)
    comparisons = compare_with_each(("hf-eager", LLAMA_CPP), "fused", case, Schedule(rounds=2, stages=False))
    assert [comparison.baseline.name for comparison in comparisons] == ["hf-eager", LLAMA_CPP]
    assert comparisons[0].candidate == comparisons[1].candidate
    assert all(comparison.tokens_equal for comparison in comparisons)


@sweep
@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
@pytest.mark.parametrize("name", [*DERIVED_MIXTURES])
def test_its_logits_on_a_file_of_a_derived_mixture_are_those_of_labkit(name: str, tmp_path: Path) -> None:
    peer, prompt = LlamaCpp(), torch.arange(40, 60)[None]
    source = resolve(write_gguf(tmp_path / "file.gguf", gguf_model(name)))
    (folder := tmp_path / "side").mkdir()
    peer.convert(LLAMA_CPP_GGUF, source, "float32", folder)
    side = peer.load(LLAMA_CPP_GGUF, folder, source, torch.float32, Room(1, 1, 1, 32))
    logits = torch.from_numpy(side.model.logits(prompt.numpy()))
    expected = logits_of(init_inference(source), prompt)[:, -1]
    assert float((logits - expected).norm() / expected.norm()) < 0.01  # its KV cache is in float16


@sweep
@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
def test_a_model_that_it_does_not_know_is_refused_in_one_line() -> None:
    with (
        pytest.raises(RuntimeError, match=r"^llama.cpp could not convert tiny-gptj in float32: .*GPTJForCausalLM.*$"),
        converted(LLAMA_CPP, "tiny-gptj", dtype="float32", seed=0),
    ):
        pass
