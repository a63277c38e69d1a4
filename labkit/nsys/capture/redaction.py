"""Redaction: finds the private values of a run in its environment and its command, and takes them out of texts.

If the name of a variable does not name a secret, its value is private unless it is words: folders, addresses, numbers
and tokens are private. `EXPERIMENT=attention` and `DTYPE=bfloat16` are words, which also occur in the names of ranges,
operators and kernels.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from labkit.stages import DOMAIN, STAGES, parse

REDACTED = "<redacted>"
LONG_ENOUGH = 8  # shorter values, such as "1" or "python", are part of every file
SECRET_LENGTH = 4  # shorter secrets are replaced only in the command: in a report they would be parts of other words
PUBLIC = ("LABKIT_IMPL",)  # labkit's own variable, whose value its records need
FOLDERS = ("PWD", "OLDPWD")  # not passwords, in spite of PWD

SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|AUTH|CREDENTIAL", re.IGNORECASE)  # in names of variables
NAMES = re.compile(  # names of variables whose whole value is a name
    r"\w*(USER|USERNAME|LOGNAME|HOST|HOSTNAME|NODENAME|NODELIST|_ADDR)|GIT_\w+_NAME", re.IGNORECASE
)
# Words, and abbreviations with a number such as gpt2 and e4m3. A value of such parts is words; a folder is not, since
# it begins with a slash.
PART = re.compile(
    r"(?:[A-Z]?[a-z]{2,20}+(?![a-z])|[A-Z]{2,12}+)++\d{0,4}"
    r"|[A-Za-z]{1,2}(?:\d{1,3}[A-Za-z]?){0,2}|\d{1,4}[A-Za-z]{0,2}"
)
BETWEEN = re.compile(r"[-_ .,+:/]")
OPERATOR = re.compile(  # names that PyTorch gives to what it runs, with the arguments that nsys shows
    r"(?:(?:aten|prims?|torch|c10d?|_c10d_functional|quantized|mkldnn|inductor|profiler)(?:::[\w.]+)+"
    r"|autograd(?:::[\w.]+)+(?:: [\w:]+)?"
    r"|(?:nccl|gloo|mpi|ucc):\w+|record_param_comms|DistributedDataParallel\.forward|detach_?|\w+Backward\d+"
    r"|(?:profiler|ProfilerStep)#\d+|Optimizer\.\w+#\w+\.\w+|enumerate\(DataLoader\)#\w+\.__next__)(?:, .*)?"
)
# Options are matched by whole words: --tokenizer and --max-new-tokens name no secret, --hub-token and --api-key do.
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
    r"""(?<![A-Za-z])([A-Za-z][\w.-]{0,80}+)["']?\s*[=:](?!//)\s*["']?(?:(?:bearer|basic|token)\s+)?([^\s"'&,;)}\]]+)""",
    re.IGNORECASE,
)
USER_OF_URL = re.compile(r"://([^/\s@]+)@")  # user:password, or a token alone
# Tokens with the form of their issuer: Hugging Face, GitHub, GitLab, OpenAI, Slack, Amazon.
ISSUED = re.compile(r"\b(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA)[A-Za-z0-9_-]{10,}")
SIZE = re.compile(r"[-+]?\d{1,4}(?:\.\d+)?")  # --num-key-value-heads 8


class Redaction:
    """Replaces private values in texts.

    `anywhere` and `words` map each value to its source, such as the name of a variable. Values of `anywhere` are
    replaced in any place, values of `words` as whole words. `replaced` counts the changed texts of each source. Names
    of labkit's stages and ranges and of PyTorch's operators are public: they always stay.
    """

    def __init__(self, anywhere: Mapping[str, str], words: Mapping[str, str] | None = None) -> None:
        words = {} if words is None else words
        patterns = [re.escape(value) for value in sorted(set(anywhere) - {""}, key=len, reverse=True)]
        patterns += [
            rf"(?<!\w){re.escape(word)}(?!\w)" for word in sorted(set(words), key=len, reverse=True) if len(word) > 1
        ]
        self._pattern = re.compile("|".join(patterns)) if patterns else None
        self._sources = {**words, **anywhere}
        self.replaced: Counter[str] = Counter()

    @classmethod
    def of_run(
        cls, variables: Collection[tuple[str, str]], *, command: Sequence[str] = (), hosts: Iterable[str] = ()
    ) -> Redaction:
        """All private values of a run: its environment, the secrets of its command, its user and its hosts.

        Values that are not words are replaced anywhere from LONG_ENOUGH characters on, and so are the parts of lists
        such as PATH. Secrets, known by the name of a variable or by their form, are replaced from SECRET_LENGTH
        characters on.
        """
        home = os.path.expanduser("~")
        anywhere, words = ({home: "the home folder"} if len(home) > 1 else {}), dict.fromkeys(hosts, "the host's name")
        for name, value in variables:
            if name in PUBLIC:
                continue
            parts = [part for part in (value, *value.split(os.pathsep)) if not _is_words(part)]
            anywhere |= {part: name for part in parts if len(part) >= LONG_ENOUGH}
            if NAMES.fullmatch(name):
                words[value] = name
        long, short = _secrets_of(variables, command)
        return cls(anywhere | long, words | short)

    @classmethod
    def of_secrets(cls, variables: Collection[tuple[str, str]], command: Sequence[str]) -> Redaction:
        """The secrets alone, for the user of this machine, who may see folders and names."""
        return cls(*_secrets_of(variables, command))

    def __call__(self, text: str) -> str:
        if self._pattern is None or text == DOMAIN or text in STAGES or parse(text) or OPERATOR.fullmatch(text):
            return text
        sources: set[str] = set()

        def redact(match: re.Match[str]) -> str:
            sources.add(self._sources[match[0]])
            return REDACTED

        clean = self._pattern.sub(redact, text)
        self.replaced.update(sources)
        return clean


def command_secrets(command: Sequence[str]) -> set[str]:
    """The secrets in the words of a command: values of options and variables, passwords in addresses, tokens."""
    return {secret for secrets in _secrets_by_word(command) for secret in secrets}


def without_secrets(command: Sequence[str]) -> list[str]:
    """The words of a command, with REDACTED for its secrets."""
    words = []
    for word, secrets in zip(command, _secrets_by_word(command), strict=True):
        for secret in sorted(secrets, key=len, reverse=True):
            word = word.replace(secret, REDACTED)
        words.append(word)
    return words


def _secrets_by_word(command: Sequence[str]) -> Iterator[set[str]]:
    expected = False  # whether the option before takes a secret
    for word in command:
        secrets = set(_secrets_in(word))
        if expected and not word.startswith("-") and not SIZE.fullmatch(word):
            secrets.add(word)
        yield secrets - {""}
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


def _is_words(value: str) -> bool:
    return re.search("[A-Za-z]{2}", value) is not None and all(map(PART.fullmatch, BETWEEN.split(value)))


def _secrets_of(
    variables: Collection[tuple[str, str]], command: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Secrets to replace anywhere, and secrets to replace as words, each with its source.

    A variable that is named like a secret holds one. If its value is words, the name must contain the secret's kind as
    a whole word.
    """
    secrets: dict[str, str] = {}
    for name, value in variables:
        if name in PUBLIC:
            continue
        secrets |= dict.fromkeys(command_secrets(value.split()), name)
        if name in FOLDERS:
            continue
        if _names_secret(name) or (SECRET.search(name) and not _is_words(value)):
            secrets[value] = name
    secrets |= dict.fromkeys(command_secrets(command), "the command")
    anywhere = {text: source for text, source in secrets.items() if len(text) >= LONG_ENOUGH and not _is_words(text)}
    words = {text: source for text, source in secrets.items() if len(text) >= SECRET_LENGTH and text not in anywhere}
    return anywhere, words
