"""A GGUF file's tokenizer gives the tokens of llama.cpp for the same text.

Expected ids come from llama.cpp (llama-cpp-python 0.3.36, `vocab_only`), for files that these helpers write.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from helpers.models.gguf_files import byte_level, gguf_letters, sentencepiece
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from labkit.system.errors import UserError
from labkit.weights.gguf.header import read_header
from labkit.weights.gguf.metadata import Metadata
from labkit.weights.gguf.splits import SPLITS
from labkit.weights.gguf.tokenizer import MOST_WHOLE, ends_of_turn, read_tokenizer

DATA = json.loads((Path(__file__).parent / "splits.json").read_text())
BY_NAME = {name: case["ids"] for case in DATA["tokens"] for name in case["names"]}
NAMED = [
    "smollm",
    "bloom",
    "deepseek-llm",
    "deepseek-coder",
    "command-r",
    "starcoder",
    "refact",
    "codeshell",
    "exaone",
    "viking",
    "stablelm2",
    "superbpe",
    "chatglm-bpe",
    "kimi-k2",
    "falcon",
    "default",
    "llama-bpe",
    "llama3",
    "tekken",
    "qwen2",
    "gpt-2",
]
NORMAL, UNKNOWN, CONTROL, USER = (
    gguf.TokenType.NORMAL,
    gguf.TokenType.UNKNOWN,
    gguf.TokenType.CONTROL,
    gguf.TokenType.USER_DEFINED,
)

FIRST = 257  # the id after the letters and "Hi"


def metadata(path: Path, vocabulary: Any, **values: Any) -> Metadata:
    """Metadata of a file that has only a vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    vocabulary(writer)
    for name, value in values.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32 if isinstance(value, int) else None
        (add or writer.add_string)(f"tokenizer.{name}" if name == "chat_template" else f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Metadata(path, read_header(path).metadata)


def letters_and(*tokens: tuple[str, int], pre: str = "qwen2") -> Any:
    """A vocabulary with the letters of bytes, "Hi", and these (token, kind) pairs."""
    kinds = [*[NORMAL] * FIRST, *(kind for _, kind in tokens)]
    return byte_level([*sorted(gguf_letters()), "Hi", *(token for token, _ in tokens)], kinds, ["H i"], pre)


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text)["input_ids"]
    return tokens


def test_every_name_has_expected_tokens() -> None:
    assert set(NAMED) <= SPLITS.keys() == BY_NAME.keys()


@pytest.mark.parametrize("name", SPLITS)
def test_text_is_split_by_the_rules_of_the_name(name: str, tmp_path: Path) -> None:
    """The merges join all characters that a split keeps together: digits, blanks and marks."""
    tokens = [*sorted(gguf_letters()), *(merge.replace(" ", "") for merge in DATA["merges"])]
    vocabulary = byte_level(tokens, [NORMAL] * len(tokens), DATA["merges"], name)
    tokenizer = read_tokenizer(metadata(tmp_path / "v.gguf", vocabulary))
    for text, expected in zip(DATA["texts"], BY_NAME[name], strict=True):
        assert ids(tokenizer, text) == expected, text
        assert tokenizer.decode(expected) == text


@pytest.mark.parametrize("name", ["", "smolm", "made-up"])
def test_an_unknown_name_is_refused(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read = metadata(tmp_path / "v.gguf", letters_and(pre=name))
    if not name:
        assert ids(read_tokenizer(read), "1")
        assert "the split is llama.cpp's default" in caplog.text
        return
    with pytest.raises(UserError, match=rf"rules of '{name}'.*expected one of .*smollm"):
        read_tokenizer(read)


SPECIAL = ("<｜User｜>", "<｜end▁of▁sentence｜>", "a b", "x\ny", "héllo", "<unk>", "<|im_end|>")


def test_whole_tokens_are_one_id_each(tmp_path: Path) -> None:
    """With blanks, line feeds and letters outside ASCII; their ids are within the vocabulary and not after it."""
    kinds = (CONTROL, CONTROL, USER, USER, USER, UNKNOWN, NORMAL)
    read = metadata(tmp_path / "w.gguf", letters_and(*zip(SPECIAL, kinds, strict=True)))
    tokenizer = read_tokenizer(read)
    assert len(tokenizer) == FIRST + len(SPECIAL)
    for index, token in enumerate(SPECIAL):
        assert ids(tokenizer, f"z{token}z")[1:-1] == [FIRST + index]
        assert tokenizer.decode([FIRST + index]) == token
    visible_text = tokenizer.decode(ids(tokenizer, "".join(SPECIAL)), skip_special_tokens=True)
    assert visible_text == "a bx\nyhéllo"


def test_more_whole_tokens_than_any_model_has_are_refused(tmp_path: Path) -> None:
    """To add and to find each of them takes time."""
    tokens = [(f"<{index}>", CONTROL) for index in range(MOST_WHOLE + 1)]
    read = metadata(tmp_path / "many.gguf", letters_and(*tokens))
    with pytest.raises(
        UserError, match=r"many\.gguf has 32769 tokens that are found before .*, expected at most 32768"
    ):
        read_tokenizer(read)


@pytest.mark.parametrize(
    ("name", "flag", "expected"),
    [
        ("llama-bpe", None, True),
        ("llama3", None, True),
        ("tekken", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("smollm", None, False),
        ("qwen2", True, True),
    ],
)
def test_beginning_of_text_where_llama_cpp_adds_it(
    name: str, flag: bool | None, expected: bool, tmp_path: Path
) -> None:
    values: dict[str, object] = {"bos_token_id": FIRST}
    values |= {} if flag is None else {"add_bos_token": flag}
    read = metadata(tmp_path / "v.gguf", letters_and(("<|begin|>", CONTROL), pre=name), **values)
    tokenizer = read_tokenizer(read)
    assert (ids(tokenizer, "z")[0] == FIRST) == expected
    assert tokenizer("z", add_special_tokens=False)["input_ids"] == ids(tokenizer, "z")[expected:]


SENTENCEPIECE = ("hi there", "  hi", "hi<u> there", "<s>hi</s>hi", "é", " ", "x\n hi<|im_end|>")
PREFIXED = [[269, 272, 263, 270], [266, 269], [269, 278, 266, 276], [1, 269, 2, 269], [259, 198, 172], [266]]
PREFIXED += [[259, 265, 13, 269, 279]]
AS_IT_IS = [[268, 272, 263, 270], [266, 268], [268, 278, 272, 263, 270], [1, 268, 2, 268], [198, 172], [259]]
AS_IT_IS += [[265, 13, 269, 279]]


@pytest.mark.parametrize(
    ("values", "expected", "begin", "end"),
    [
        ({}, PREFIXED, [1], []),
        ({"add_space_prefix": False}, AS_IT_IS, [1], []),
        ({"add_bos_token": False, "add_eos_token": True}, PREFIXED, [], [2]),
    ],
)
def test_blanks_of_a_text_become_those_of_sentencepiece(
    values: dict[str, object], expected: list[list[int]], begin: list[int], end: list[int], tmp_path: Path
) -> None:
    tokenizer = read_tokenizer(metadata(tmp_path / "v.gguf", sentencepiece, **values))
    for text, tokens in zip(SENTENCEPIECE, expected, strict=True):
        assert ids(tokenizer, text) == [*begin, *tokens, *end], text
    assert tokenizer.decode(ids(tokenizer, "  hi é there"), skip_special_tokens=True) == "  hi é there"


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    """The conversion of the boxed model relies on this."""
    folder = tmp_path / "kept"
    vocabulary = letters_and(("<｜User｜>", CONTROL), ("a b", USER), pre="llama3")
    tokenizer = read_tokenizer(metadata(tmp_path / "v.gguf", vocabulary, bos_token_id=FIRST, chat_template="{{ 1 }}"))
    tokenizer.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    for text in (*DATA["texts"], "za b<｜User｜>"):
        assert ids(loaded, text) == ids(tokenizer, text)
    assert loaded.chat_template == "{{ 1 }}"


@pytest.mark.parametrize("end_token", ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<｜end▁of▁sentence｜>"])
@pytest.mark.parametrize("kind", [CONTROL, NORMAL])
def test_usual_names_end_an_answer(end_token: str, kind: int, tmp_path: Path) -> None:
    read = metadata(
        tmp_path / "v.gguf", letters_and(("<s>", CONTROL), (end_token, kind), ("[end]", CONTROL)), eos_token_id=FIRST
    )
    assert ends_of_turn(read) == (FIRST, FIRST + 1)


def test_named_roles_end_an_answer(tmp_path: Path) -> None:
    read = metadata(
        tmp_path / "v.gguf", letters_and(("</s>", NORMAL), ("[end]", CONTROL)), eot_token_id=FIRST + 1, eos_token_id=3
    )
    assert ends_of_turn(read) == (3, FIRST + 1)


@pytest.mark.parametrize(
    ("vocabulary", "values", "message"),
    [
        (lambda writer: None, {}, "has no tokenizer; expected"),
        (lambda writer: writer.add_tokenizer_model("rwkv"), {}, "a tokenizer of the kind 'rwkv'"),
        (lambda writer: writer.add_tokenizer_model("gpt2"), {}, "has no vocabulary"),
        (byte_level(["a", "a"], [1, 1], [], "gpt-2"), {}, "has 'a' twice"),
        (byte_level(["a", "b"], [1], [], "gpt-2"), {}, "has 2 tokens and kinds of 1"),
        (byte_level(["a", "b"], [1, 1], ["a b"], "gpt-2"), {}, "merges 'a b', which makes no token"),
        (sentencepiece, {"add_bos_token": 3}, "add_bos_token is 3, expected true"),
        (sentencepiece, {"eos_token_id": "b"}, 'eos_token_id is "b", expected a whole'),
    ],
)
def test_what_is_wrong_with_a_vocabulary_is_said(
    vocabulary: Any, values: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        read_tokenizer(metadata(tmp_path / "v.gguf", vocabulary, **values))


def test_a_special_token_beyond_the_vocabulary_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read = metadata(tmp_path / "v.gguf", letters_and(("<s>", CONTROL)), eos_token_id=999)
    assert read_tokenizer(read).eos_token is None
    assert ends_of_turn(read) == ()
    assert "eos_token_id is 999 of 258 tokens and is left out" in caplog.text
