"""A tokenizer for models that come without one: every byte is a token."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from labkit.system.errors import UserError

BYTES = 256
END_OF_TEXT = BYTES  # the id that follows the bytes
CONSONANTS = "bdfghjklmnprstvwyz"
VOWELS = "aeiou"
PICTURES = {chr(code): chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {"\x7f": "\u2421"}


def byte_tokenizer(vocab_size: int, max_positions: int | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer for `vocab_size` ids, padding on the left.

    Ids 0 to 255 are the bytes, and 256 ends and pads a text. The other ids are made-up words: text is never encoded
    to them, but a model with random weights predicts them. Control characters decode to their pictures (␛), so that
    the output of any model can be printed. Raises UserError for fewer than 257 ids.
    """
    if vocab_size <= END_OF_TEXT:
        raise UserError(
            f"a byte-level tokenizer needs at least {END_OF_TEXT + 1} ids, got a vocabulary of {vocab_size}"
        )
    end = "<|endoftext|>"
    vocabulary = {letter: byte for byte, letter in enumerate(_byte_letters())}
    vocabulary[end] = END_OF_TEXT
    vocabulary |= {f"{_SPACE}{_word(index - END_OF_TEXT)}": index for index in range(END_OF_TEXT + 1, vocab_size)}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pictures = [decoders.Replace(control, picture) for control, picture in PICTURES.items()]
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), *pictures])
    tokenizer.add_special_tokens([AddedToken(end, special=True)])
    options = {} if max_positions is None else {"model_max_length": max_positions}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **options,
    )


def _byte_letters() -> list[str]:
    """The letter of each byte in byte-level vocabularies: the byte's own where printable, else a letter past U+00FF."""
    letters = set(ByteLevel.alphabet())
    shifted = iter(sorted(letter for letter in letters if ord(letter) >= BYTES))
    return [chr(byte) if chr(byte) in letters else next(shifted) for byte in range(BYTES)]


_SPACE = _byte_letters()[ord(" ")]


def _word(number: int) -> str:
    """A different pronounceable word of at least two syllables for every positive number."""
    syllables = []
    number += len(CONSONANTS) * len(VOWELS)
    while number:
        number, rest = divmod(number, len(CONSONANTS) * len(VOWELS))
        consonant, vowel = divmod(rest, len(VOWELS))
        syllables.append(CONSONANTS[consonant] + VOWELS[vowel])
    return "".join(syllables)
