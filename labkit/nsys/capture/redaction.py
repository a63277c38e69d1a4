"""What must not be shared of a run: found in its environment and in its command, and taken out of texts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence

from labkit.stages import DOMAIN, parse

REDACTED = "<redacted>"
LONG_ENOUGH = 8  # shorter values, such as "1" or "python", are part of every file
SECRET_LENGTH = 4  # shorter secrets are taken out of the command alone: in a report they would be parts of other words
PUBLIC = ("LABKIT_IMPL",)  # a name of labkit's own, which its records need

SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|AUTH|CREDENTIAL", re.IGNORECASE)  # in names of variables
# Options are told by whole words: --tokenizer and --max-new-tokens name no secret, --hub-token and --api-key do.
SECRET_WORDS = frozenset(
    {
        *("token", "key", "apikey", "secret", "password", "passwd", "passphrase", "pass", "pwd"),
        *("auth", "authorization", "credential", "credentials", "bearer", "cookie"),
    }
)
SECRET_ENDS = ("token", "apikey", "secret", "password", "passwd")  # hftoken
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
# --token=X, TOKEN=X, ?token=X, "token": "X", Authorization: Bearer X
NAMED = re.compile(
    r"""([A-Za-z][\w.-]*)["']?\s*[=:](?!//)\s*["']?(?:(?:bearer|basic|token)\s+)?([^\s"'&,;)}\]]+)""", re.IGNORECASE
)
USER_OF_URL = re.compile(r"://([^/\s@]+)@")  # user:password, or a token alone
# Tokens whose issuers give them a form of their own: Hugging Face, GitHub, GitLab, OpenAI, Slack, Amazon.
ISSUED = re.compile(r"\b(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA)[A-Za-z0-9_-]{10,}")
SIZE = re.compile(r"[-+]?\d{1,4}(?:\.\d+)?")  # --num-key-value-heads 8


class Redaction:
    """Replaces `anywhere` wherever it stands in a text, and `words` where they are words of their own.

    The names of labkit's own ranges are public, so they stay whatever is in the environment.
    """

    def __init__(self, anywhere: Iterable[str], words: Iterable[str] = ()) -> None:
        patterns = [re.escape(value) for value in sorted(set(anywhere) - {""}, key=len, reverse=True)]
        patterns += [
            rf"(?<!\w){re.escape(word)}(?!\w)" for word in sorted(set(words), key=len, reverse=True) if len(word) > 1
        ]
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    @classmethod
    def of_run(
        cls, variables: Iterable[tuple[str, str]], *, command: Sequence[str] = (), hosts: Iterable[str] = ()
    ) -> Redaction:
        """All that must not be shared of a run: its environment, the secrets of its command, its user and its hosts.

        Values of at least LONG_ENOUGH characters go wherever they stand, the parts of lists such as PATH too; shorter
        ones where the variable's name says that it is a secret.
        """
        home = os.path.expanduser("~")
        anywhere, words = ({home} if len(home) > 1 else set()), set(hosts)
        for name, value in variables:
            if name in PUBLIC:
                continue
            least = SECRET_LENGTH if SECRET.search(name) else LONG_ENOUGH
            anywhere.update(part for part in (value, *value.split(os.pathsep)) if len(part) >= least)
            if name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME", "HOST"):
                words.add(value)
        long, short = _by_length(command_secrets(command))
        return cls(anywhere | long, words | short)

    @classmethod
    def of_secrets(cls, variables: Iterable[tuple[str, str]], command: Sequence[str]) -> Redaction:
        """The secrets alone, for what the user of this machine is shown: the own folders are none."""
        named = {value for name, value in variables if SECRET.search(name) and len(value) >= SECRET_LENGTH}
        long, short = _by_length(command_secrets(command))
        return cls(named | long, short)

    def __call__(self, text: str) -> str:
        if self._pattern is None or parse(text) or text == DOMAIN:
            return text
        return self._pattern.sub(REDACTED, text)


def command_secrets(command: Sequence[str]) -> set[str]:
    """The secrets that the words of a command say: values of options and variables, passwords in addresses, tokens."""
    return {secret for found in _secrets_by_word(command) for secret in found}


def without_secrets(command: Sequence[str]) -> list[str]:
    """The words of a command, with REDACTED for its secrets."""
    words = []
    for word, secrets in zip(command, _secrets_by_word(command), strict=True):
        for secret in sorted(secrets, key=len, reverse=True):
            word = word.replace(secret, REDACTED)
        words.append(word)
    return words


def _secrets_by_word(command: Sequence[str]) -> Iterator[set[str]]:
    expected = False  # by the option before
    for word in command:
        found = set(_secrets_in(word))
        if expected and not word.startswith("-") and not SIZE.fullmatch(word):
            found.add(word)
        yield found - {""}
        expected = OPTION.fullmatch(word) is not None and _names_secret(word)


def _secrets_in(word: str) -> Iterator[str]:
    for name, value in NAMED.findall(word):
        if _names_secret(name) and not SIZE.fullmatch(value):
            yield value
    for user in USER_OF_URL.findall(word):
        yield user.partition(":")[2] or user
    yield from ISSUED.findall(word)


def _names_secret(name: str) -> bool:
    words = [word.lower() for word in WORD.findall(name)]
    return not SECRET_WORDS.isdisjoint(words) or any(word.endswith(SECRET_ENDS) for word in words)


def _by_length(secrets: set[str]) -> tuple[set[str], set[str]]:
    """Those that are replaced anywhere, and those that are replaced as words."""
    long = {secret for secret in secrets if len(secret) >= LONG_ENOUGH}
    return long, {secret for secret in secrets - long if len(secret) >= SECRET_LENGTH}
