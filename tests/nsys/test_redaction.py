"""The words of a command: which of them are secrets, and what is left without them."""

import pytest

from labkit.nsys.capture.command import split_python
from labkit.nsys.capture.redaction import REDACTED, Redaction, command_secrets, without_secrets


@pytest.mark.parametrize(
    ("command", "secrets"),
    [
        (["x.py", "--token=abc123"], {"abc123"}),
        (["x.py", "--api-key", "k-1", "--hub_token", "t2", "--dbPassword", "pw3"], {"k-1", "t2", "pw3"}),
        (["env", "HF_TOKEN=hushhush", "python", "x.py"], {"hushhush"}),
        (["git", "clone", "https://ada:lovelace@host/x", "https://deploy-token@host/y"], {"lovelace", "deploy-token"}),
        (["curl", "https://host/?page=2&api_key=s3cret&x=1"], {"s3cret"}),
        (["curl", "-H", "Authorization: Bearer ey.JhbGci"], {"ey.JhbGci"}),
        (["python", "-c", 'login({"token": "hushhush"})'], {"hushhush"}),
        (["python", "x.py", "hf_abcdefghijklmnop"], {"hf_abcdefghijklmnop"}),
        (["x.py", "--password", "--verbose"], set()),
        (
            ["x.py", "--tokenizer=gpt2", "--max-new-tokens", "64", "--num-key-value-heads=8", "--eos-token-id", "0"],
            set(),
        ),
        (
            ["x.py", "--kv-heads-per-key=8", "--author", "somebody", "--url", "https://host:8080/a", "--monkey=banana"],
            set(),
        ),
    ],
)
def test_the_secrets_of_a_command(command: list[str], secrets: set[str]) -> None:
    assert command_secrets(command) == secrets
    left = " ".join(without_secrets(command))
    assert not any(secret in left for secret in secrets)
    assert left.count(REDACTED) == len(secrets)


def test_they_are_replaced_in_all_other_texts() -> None:
    clean = Redaction.of_run([], command=["x.py", "--token=hushhush", "--auth", "tiger", "--pin-key", "9a"])
    assert clean("load with hushhush, tigers and tiger, 9ab") == f"load with {REDACTED}, tigers and {REDACTED}, 9ab"


def test_what_the_user_is_shown_keeps_the_own_folders() -> None:
    clean = Redaction.of_secrets([("HOME", "/home/ada"), ("API_TOKEN", "hushhush")], ["x.py", "--key=tiger"])
    assert clean("/home/ada: hushhush, tiger") == f"/home/ada: {REDACTED}, {REDACTED}"
    assert Redaction.of_secrets([], ["x.py"])("nothing to hide") == "nothing to hide"


def test_a_refused_command_is_quoted_without_them() -> None:
    with pytest.raises(ValueError, match="expected a script") as refused:
        split_python(["python", "-Xtoken=hushhush"])
    assert "hushhush" not in str(refused.value)
