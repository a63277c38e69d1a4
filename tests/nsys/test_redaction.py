"""Secrets in the words of a command are recognised and replaced."""

import re

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

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
    text = " ".join(without_secrets(command))
    assert not any(secret in text for secret in secrets)
    assert text.count(REDACTED) == len(secrets)


def test_secrets_are_replaced_in_all_other_texts() -> None:
    clean = Redaction.of_run([], command=["x.py", "--token=hushhush", "--auth", "tiger", "--pin-key", "9a"])
    assert clean("load with hushhush, tigers and tiger, 9ab") == f"load with {REDACTED}, tigers and {REDACTED}, 9ab"


def test_what_the_user_is_shown_keeps_the_own_folders() -> None:
    folders = [("HOME", "/home/ada"), ("PWD", "/home/ada"), ("OLDPWD", "/home")]
    clean = Redaction.of_secrets([*folders, ("API_TOKEN", "hushhush")], ["x.py", "--key=tiger"])
    assert clean("/home/ada: hushhush, tiger") == f"/home/ada: {REDACTED}, {REDACTED}"
    assert Redaction.of_secrets([], ["x.py"])("nothing to hide") == "nothing to hide"


def test_a_refused_command_is_quoted_without_secrets() -> None:
    with pytest.raises(ValueError, match="expected a script") as error_info:
        split_python(["python", "-Xtoken=hushhush"])
    assert "hushhush" not in str(error_info.value)


WORDS = (
    *("attention", "generate", "scaled_dot_product_attention", "bfloat16", "float8_e4m3fn", "LlamaForCausalLM"),
    *("gpt2-xl", "meta-llama/Llama-3.1-8B", "flash_attention_2", "decode/layer", "cuda:0,cuda:1", "en_US.UTF-8"),
)
PRIVATE = (
    *("/home/ada/work", "a8f5f167f44f4964", "123e4567-e89b-12d3-a456-426614174000", "10.20.30.40", "ada@lovelace.org"),
    *("wJalrXUtnFEMI/K7MDENG", "kJhGfDsAqWe", "hf_abcdefghijklmnop", "https://ada:pw@host/x", "JBSWY3DPEHPK3PXP"),
)


@pytest.mark.parametrize("value", WORDS)
def test_words_are_no_secrets_of_the_environment(value: str) -> None:
    clean = Redaction.of_run([("EXPERIMENT", value), ("TOKENIZER", value), ("AUTHOR", value), ("KEYBOARD", value)])
    text = f"aten::{value}, {value} and void {value}_kernel<float>"
    assert clean(text) == text
    assert not clean.replaced
    assert Redaction.of_secrets([("TOKENIZER", value)], [])(text) == text


@pytest.mark.parametrize("value", PRIVATE)
def test_folders_addresses_numbers_and_tokens_are_private_under_any_name(value: str) -> None:
    clean = Redaction.of_run([("NOTE", value)])
    assert value not in clean(f"load from {value} now")
    assert clean.replaced == {"NOTE": 1}


def test_a_variable_that_is_named_like_a_secret_has_one_even_if_it_is_a_word() -> None:
    clean = Redaction.of_run([("PASSWORD", "attention"), ("API_KEY", "relu")])
    assert clean("login attention relu") == f"login {REDACTED} {REDACTED}"
    assert clean.replaced == {"PASSWORD": 1, "API_KEY": 1}


@pytest.mark.parametrize(
    "name",
    [
        *("aten::attention", "aten::scaled_dot_product_attention, op_id = 5", "c10d::allreduce_", "ProfilerStep#3"),
        *("attention", "decode", "prefill/layer.3/attention", "decode/step", "labkit"),
    ],
)
def test_names_of_labkit_and_of_pytorch_stay_whatever_the_secrets_are(name: str) -> None:
    words = "attention scaled_dot_product_attention allreduce_ decode layer step labkit ProfilerStep prefill aten"
    clean = Redaction.of_run([(f"PASSWORD_{word}", word) for word in words.split()] + [("USER", "attention")])
    assert clean(name) == name
    assert not clean.replaced


def trained() -> set[str]:
    """The names of what PyTorch runs in a step of training, as its profiler records them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))
    optimizers = (torch.optim.SGD(model.parameters(), 0.1), torch.optim.AdamW(model.parameters()))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for (rows,) in DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=4):
            for optimizer in optimizers:
                optimizer.zero_grad()
                model(rows).sum().backward()
                optimizer.step()
    return {event.name for event in profiler.events() or ()}


def test_no_operator_of_pytorch_is_redacted() -> None:
    names = trained()
    assert {"Optimizer.step#SGD.step", "autograd::engine::evaluate_function: AddmmBackward0"} <= names
    names |= {"nccl:all_reduce", "c10d::allreduce_", "_c10d_functional::wait_tensor", "record_param_comms"}
    for name in names:
        words = re.findall(r"\w+", name)
        clean = Redaction.of_run([*(("USER", word) for word in words), *(("HOSTNAME", word) for word in words)])
        secrets = Redaction.of_run([(f"PASSWORD_{word}", word) for word in (*words, name)])
        assert clean(name) == secrets(name) == name
        assert clean(f"{name}, seq = 3, op_id = 5") == f"{name}, seq = 3, op_id = 5"
        assert not clean.replaced
        assert not secrets.replaced
        assert all(clean(f"of {word}") == f"of {REDACTED}" for word in words if len(word) > 1)


def test_a_long_value_is_judged_at_once() -> None:
    """The time is linear in the length of the value."""
    for value in ("a" * 10_000 + "!", "aB" * 5_000 + "!", "ab-" * 4_000 + "!", "1a" * 5_000, "A" * 10_000 + "é"):
        assert Redaction.of_run([("X", value)])(value) == REDACTED
