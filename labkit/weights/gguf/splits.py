"""How text is split into words before a byte-level vocabulary merges letters, by the name in `tokenizer.ggml.pre`.

Each expression splits the pieces of the expression before it. Sources: `llama-vocab.cpp` of llama.cpp, which knows
these names, and the `tokenizer.json` of the models that they are named after.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
DIGIT, DIGITS, THREE_DIGITS = r"\p{N}", r"\p{N}+", "[0-9][0-9][0-9]"
HAN_AND_HANGUL = "[一-龥ࠀ-一가-퟿]+"
DEEPSEEK_MARKS = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"
CASED = (  # without the alphabets that DeepSeek's expression leaves out: Armenian, Georgian, ...
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{1DF1E}]]+"
)


@dataclass(frozen=True)
class Splits:
    """The rules of one name."""

    expressions: tuple[str, ...]  # in the order in which they split
    whole_words: bool = False  # a word that is itself a token becomes that token, without merges
    add_bos: bool = False  # whether a text begins with the beginning-of-text token where the file does not say


def _words(digits: str, *, others: str = OTHERS, contractions: str = f"{CONTRACTIONS}|") -> Splits:
    return Splits((rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{others}|{SPACES}",))


def _cased(upper: str, lower: str, after: str, digits: str, others: str) -> str:
    """The whole expression where a word ends before a capital letter, too: fooBar is foo and Bar."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]*[{lower}]+{after}|[^\r\n\p{{L}}\p{{N}}]?[{upper}]+[{lower}]*{after}"
    return rf"{word}|{digits}|{others}|{SPACES}"


LLAMA3, QWEN2 = _words(r"\p{N}{1,3}"), _words(DIGIT)
OTHERS_AND_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
TEKKEN = Splits((_cased(UPPER, LOWER, "", DIGIT, OTHERS_AND_PATHS),), whole_words=True, add_bos=True)
GPT4O = Splits((_cased(UPPER, LOWER, f"{CONTRACTIONS}?", r"\p{N}{1,3}", OTHERS_AND_PATHS),))
NO_HAN = r"&&[^\p{Han}]"
KIMI_WORDS = _cased(UPPER + NO_HAN, LOWER + NO_HAN, f"{CONTRACTIONS}?", r"\p{N}{1,3}", OTHERS)
KIMI = Splits((rf"\p{{Han}}+|{KIMI_WORDS}",))
MARKED_WORDS = (  # a mark belongs to the letters that follow
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
)
WORDS_OF_LETTERS = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"  # a blank may join letters
DEEPSEEK3 = Splits((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", MARKED_WORDS))
EACH_DIGIT = Splits((DIGIT, GPT2))

_GROUPS: tuple[tuple[str, Splits], ...] = (
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        replace(LLAMA3, whole_words=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", LLAMA3),
    ("glm4 glm5", replace(LLAMA3, whole_words=True)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", QWEN2),
    (
        "qwen35",
        Splits((QWEN2.expressions[0].replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}"),)),
    ),
    ("seed-coder", _words(DIGIT, others=r" ?[^\s\p{L}\p{N}\r\n]+")),
    ("minicpm5", Splits((r"\p{N}{1,3}", *_words(DIGITS).expressions), whole_words=True)),
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4", Splits((GPT2,))),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", EACH_DIGIT),
    (
        "exaone-moe",
        Splits((rf"{CONTRACTIONS}|{WORDS_OF_LETTERS}|{DIGIT}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",)),
    ),
    ("default", Splits((r"[\p{P}\$\+<=>\^~\|]+", GPT2, DIGITS, THREE_DIGITS))),
    ("falcon", Splits((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, THREE_DIGITS))),
    ("bloom poro-chat gpt3-finnish", Splits((BLOOM,))),
    ("viking", Splits((BLOOM, DIGIT))),
    ("deepseek-llm", Splits((r"[\r\n]", CASED, DEEPSEEK_MARKS, r"\s+$", HAN_AND_HANGUL, DIGITS))),
    ("deepseek-coder", Splits((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_HANGUL, DIGIT))),
    ("deepseek-v3 hunyuan-dense joyai-llm", DEEPSEEK3),
    ("tekken", TEKKEN),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", GPT4O),
    ("kimi-k2", KIMI),
    ("superbpe", Splits((DIGITS, r"(?=(\d{3})+(?!\d))"))),
)
SPLITS = {name: splits for names, splits in _GROUPS for name in names.split()}
