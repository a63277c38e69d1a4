"""The tokenizer that a GGUF file describes: its vocabulary, how its words are made, and which tokens end an answer.

It follows what llama.cpp does with the same file.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import repeat

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from labkit.system.errors import UserError, first_line
from labkit.system.nearest import did_you_mean
from labkit.weights.gguf.metadata import TOKENIZER, Metadata
from labkit.weights.gguf.splits import SPLITS, Splits

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # GGUF's kinds of tokens
MOST_WHOLE = 1 << 15  # tokens of the kinds in WHOLE; Gemma 3 has the most of the known models, a fifth of it
WHOLE = (UNKNOWN, CONTROL, USER_DEFINED)  # kinds of tokens that are found in a text before it is split
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # their names in `tokenizer.ggml.model`
DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}  # ids in a SentencePiece vocabulary that does not name them
LONGEST_WORD = 1 << 9  # letters of a SentencePiece word; all ways to cut it in two are tried
MOST_SPELLED = 1 << 8  # tokens that a decoder looks for
SPACE = "▁"  # in a SentencePiece vocabulary
ENDS = (  # tokens that end an answer, also where a file gives them another kind
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_utterance>",
    "<turn|>",
    "<｜end▁of▁sentence｜>",
)
CONTROL_ENDS = ("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[")  # end an answer only as control tokens

log = logging.getLogger("labkit")


def read_tokenizer(metadata: Metadata) -> PreTrainedTokenizerBase:
    """The file's own tokenizer, padding on the left, with its chat template.

    Raises UserError for a file without a vocabulary, for an unknown kind of vocabulary or name of a split, and for a
    vocabulary that contradicts itself.
    """
    kind = metadata.text(f"{TOKENIZER}.model")
    if kind not in (BYTE_LEVEL, SENTENCEPIECE):
        got = "no tokenizer" if kind is None else f"a tokenizer of the kind {kind!r}"
        raise UserError(
            f"{metadata.path} has {got}; expected {BYTE_LEVEL!r} or {SENTENCEPIECE!r}: give "
            "token ids, or convert it again with its vocabulary"
        )
    tokens = _tokens(metadata)
    kinds = _kinds(metadata, tokens)
    ids = special_ids(metadata)
    whole = [(token, token_kind) for token, token_kind in zip(tokens, kinds, strict=False) if token_kind in WHOLE]
    if len(whole) > MOST_WHOLE:
        raise UserError(
            f"{metadata.path} has {len(whole)} tokens that are found before a text is split, expected at most "
            f"{MOST_WHOLE}; the types of its tokens are wrong: convert it again"
        )
    splits = _splits(metadata) if kind == BYTE_LEVEL else Splits((), add_bos=True)
    try:
        if kind == BYTE_LEVEL:
            backend = _byte_level(metadata, tokens, kinds, splits)
        else:
            backend = _sentencepiece(metadata, tokens, kinds, ids.get("unknown"))
        special = [token for token, token_kind in whole if token_kind != USER_DEFINED]
        ordinary = [token for token, token_kind in whole if token_kind == USER_DEFINED]
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        backend.add_tokens([AddedToken(token, normalized=False) for token in ordinary])
    except UserError:
        raise
    except Exception as error:  # the library of tokenizers raises no other class
        raise UserError(f"the tokenizer of {metadata.path} contradicts itself ({first_line(error)})") from error
    add_bos = metadata.flag(f"{TOKENIZER}.add_bos_token")
    add_bos = splits.add_bos if add_bos is None else add_bos
    if add_bos and "bos" not in ids:
        log.warning("labkit: %s names no beginning-of-text token, so texts get none", metadata.path)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {name: tokens[ids[role]] for name, role in names.items() if role in ids}
    named.setdefault("pad_token", named.get("eos_token"))  # type: ignore[arg-type]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.text("tokenizer.chat_template"),
        padding_side="left",
        add_bos_token=add_bos and "bos" in ids,
        add_eos_token=bool(metadata.flag(f"{TOKENIZER}.add_eos_token")) and "eos" in ids,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **named,
    )


def special_ids(metadata: Metadata) -> dict[str, int]:
    """The ids of the tokens by role: bos, eos, padding, unknown. An id beyond the vocabulary is left out."""
    tokens = metadata.count(f"{TOKENIZER}.tokens")
    defaults = DEFAULTS if tokens and metadata.text(f"{TOKENIZER}.model") == SENTENCEPIECE else {}
    ids = {}
    for role in ("bos", "eos", "padding", "unknown"):
        key = f"{TOKENIZER}.{role}_token_id"
        number = metadata.size(key)
        number = defaults.get(role) if number is None else number
        if number is not None and tokens is not None and number >= tokens:
            log.warning("labkit: %s: %s is %d of %d tokens and is left out", metadata.path, key, number, tokens)
        elif number is not None:
            ids[role] = number
    return ids


def ends_of_turn(metadata: Metadata) -> tuple[int, ...]:
    """The ids of every token that ends an answer: end of text, end of turn, and tokens with a usual name of an end."""
    eos = special_ids(metadata).get("eos")
    ids = set() if eos is None else {eos}
    tokens = metadata.texts(f"{TOKENIZER}.tokens") or []
    roles = (metadata.size(f"{TOKENIZER}.{role}_token_id") for role in ("eot", "eom"))
    ids |= {number for number in roles if number is not None and number < len(tokens)}
    kinds = metadata.numbers(f"{TOKENIZER}.token_type") or []
    named = zip(tokens, kinds, strict=False)
    ids |= {index for index, token in enumerate(tokens) if token in ENDS}
    ids |= {index for index, (token, kind) in enumerate(named) if kind == CONTROL and token in CONTROL_ENDS}
    return tuple(sorted(ids))


def _tokens(metadata: Metadata) -> list[str]:
    tokens = metadata.texts(f"{TOKENIZER}.tokens")
    if not tokens:
        raise UserError(f"{metadata.path} has no vocabulary ({TOKENIZER}.tokens); convert it again")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise UserError(f"the vocabulary of {metadata.path} has {twice!r} twice; convert it again")
    return tokens


def _kinds(metadata: Metadata, tokens: Sequence[str]) -> Sequence[float]:
    """The kind of each token. Ends of an answer are control tokens even if the file has another kind for them."""
    kinds = metadata.numbers(f"{TOKENIZER}.token_type") or list(repeat(NORMAL, len(tokens)))
    if len(kinds) < len(tokens):
        raise UserError(f"{metadata.path} has {len(tokens)} tokens and kinds of {len(kinds)}; convert it again")
    return [CONTROL if token in ENDS else kind for token, kind in zip(tokens, kinds, strict=False)]


def _splits(metadata: Metadata) -> Splits:
    name = metadata.text(f"{TOKENIZER}.pre")
    if not name:
        name = "default"
        log.warning("labkit: %s does not say how its text is split; the split is llama.cpp's default", metadata.path)
    if name not in SPLITS:
        raise UserError(
            f"{metadata.path} splits text by the rules of {name!r} ({TOKENIZER}.pre){did_you_mean(name, SPLITS)}; "
            f"expected one of {', '.join(sorted(SPLITS))}: convert it again, or give token ids"
        )
    return SPLITS[name]


def _byte_level(metadata: Metadata, tokens: Sequence[str], kinds: Sequence[float], splits: Splits) -> Tokenizer:
    texts = metadata.texts(f"{TOKENIZER}.merges")
    if texts is None:
        raise UserError(f"{metadata.path} has no {TOKENIZER}.merges; convert it again")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges: dict[tuple[str, str], None] = {}  # the first of several counts
    for text in texts:
        at = text.find(" ", 1)
        left, right = text[:at], text[at + 1 :]
        if at < 0 or not {left, right, left + right} <= vocabulary.keys():
            raise UserError(f"{metadata.path} merges {text!r}, which makes no token; convert it again")
        merges.setdefault((left, right))
    backend = Tokenizer(models.BPE(vocabulary, list(merges), ignore_merges=splits.whole_words))
    words = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in splits.expressions]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.Sequence([*_spelled(tokens, kinds), decoders.ByteLevel()])
    return backend


def _spelled(tokens: Sequence[str], kinds: Sequence[float]) -> Sequence[decoders.Decoder]:
    """Decoders that spell whole tokens such as `<é>` in the letters of a byte-level vocabulary, where é is a byte."""
    letters = bytes_to_unicode()
    alphabet = set(letters.values())
    return [
        decoders.Replace(Regex(rf"\A{re.escape(token)}\z"), "".join(letters[byte] for byte in token.encode()))
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in WHOLE and not token.isascii() and alphabet.issuperset(token)
    ][:MOST_SPELLED]


def _sentencepiece(metadata: Metadata, tokens: Sequence[str], kinds: Sequence[float], unknown: int | None) -> Tokenizer:
    scores = metadata.numbers(f"{TOKENIZER}.scores") or [0.0] * len(tokens)
    if len(scores) < len(tokens):
        raise UserError(f"{metadata.path} has {len(tokens)} tokens and scores of {len(scores)}; convert it again")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, score, kind in zip(tokens, scores, kinds, strict=False):
        if kind != NORMAL:
            continue
        if len(token) > LONGEST_WORD:
            raise UserError(f"{metadata.path} has a word of {len(token)} letters, expected at most {LONGEST_WORD}")
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges += [(-score, pair) for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
    merges.sort(key=lambda merge: merge[0])
    unknown_token = None if unknown is None else tokens[unknown]
    backend = Tokenizer(
        models.BPE(vocabulary, [pair for _, pair in merges], unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.flag(f"{TOKENIZER}.add_space_prefix") is not False
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend
