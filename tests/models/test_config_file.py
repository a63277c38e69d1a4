"""config.json is only data: any content gives a model, or a UserError that names the wrong field."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from helpers.models.small_models import SMALL_CONFIGS, small_config
from helpers.sweeps import swept
from transformers import BertConfig, DistilBertConfig, PretrainedConfig, RobertaConfig

from labkit.models.config_checks import MOST_LAYERS, MOST_WIDTH
from labkit.models.config_file import read_config
from labkit.models.encoder_policies import ENCODERS
from labkit.models.policies import POLICIES, model_config_of, policy_for
from labkit.system.errors import UserError

FIRST_OF_ROW = {policy_for(small_config(name)).architecture: name for name in reversed(SMALL_CONFIGS)}
ROWS = (*FIRST_OF_ROW.values(), "qwen2-windowed")
ROPES = ("llama-biased", "llama3", "llama-yarn")
HUGE = 10**12
WRONG: tuple[Any, ...] = ("x", [], [1], {"x": 1}, None, 1.5, -1, 0, True, HUGE, float("inf"), [[["global"], HUGE]])
OF_ALL_MODELS = set(PretrainedConfig().to_dict()) - {"architectures", "dtype", "tie_word_embeddings"}
ROPE_FIELDS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "truncate")


def fields_of(name: str) -> dict[str, Any]:
    config = small_config(name)
    return config.to_dict() | {"architectures": [policy_for(config).architecture]}


def written(folder: Path, values: object) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def refused(make: Callable[[], object]) -> str | None:
    """Message of the UserError, or None without one. Any other error fails the test."""
    try:
        make()
    except UserError as error:
        return str(error)
    return None


def altered(fields: dict[str, Any], names: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields with one of `names`, or one field within it, replaced by a wrong value."""
    for name in sorted(names):
        for wrong in WRONG:
            yield name, fields | {name: wrong}
        if isinstance(fields[name], dict):
            for inner in (*fields[name], *ROPE_FIELDS):
                for wrong in WRONG:
                    yield name, fields | {name: fields[name] | {inner: wrong}}


@pytest.mark.parametrize("name", swept([*ROWS, *ROPES], [*ROWS[::3], *ROPES]))
def test_no_field_makes_anything_but_a_model_or_a_user_error(name: str, tmp_path: Path) -> None:
    fields = fields_of(name)
    names = set(fields) - OF_ALL_MODELS if name in ROWS else {"rope_parameters"}
    for field, values in altered(fields, names | ({"id2label", "num_labels"} & set(fields))):
        written(tmp_path, values)
        message = refused(lambda: model_config_of(read_config(tmp_path)))
        expected_words = (field, "config.json", "config of", "unknown architecture")
        assert message is None or any(word in message for word in expected_words)


def test_every_row_is_among_them() -> None:
    assert {policy_for(small_config(name)).architecture for name in ROWS} == set(POLICIES)


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        *((small_config(name), policy_for(small_config(name))) for name in ROWS),
        *zip((BertConfig(), RobertaConfig(), DistilBertConfig()), ENCODERS.values(), strict=True),
    ],
    ids=lambda value: getattr(value, "architecture", ""),
)
def test_no_field_of_a_config_in_memory_makes_another_error(config: PretrainedConfig, policy: Any) -> None:
    assert refused(lambda: policy.model_config(config)) is None
    for name in sorted(set(vars(config)) - OF_ALL_MODELS):
        original = vars(config)[name]
        for wrong in WRONG:
            vars(config)[name] = wrong
            refused(lambda: policy.model_config(config))
        vars(config)[name] = original


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("gpt2", {"n_head": 0}, r"n_head = 0; expected an integer from 1 to 4096"),
        ("gpt2", {"n_layer": "12"}, rf'n_layer = "12"; expected an integer from 1 to {MOST_LAYERS}'),
        ("gpt2", {"n_embd": 60.0}, rf"n_embd = 60.0; expected an integer from 1 to {MOST_WIDTH}"),
        ("llama", {"num_attention_heads": None}, "num_attention_heads = null; expected an integer"),
        ("llama", {"hidden_size": [72]}, r"hidden_size = \[72\]; expected an integer"),
        ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06; expected a number of at least 0"),
        ("opt", {"enable_bias": 1}, "enable_bias = 1; expected true or false"),
        ("gpt2", {"activation_function": ["gelu"]}, "activation_function = .*; expected a string"),
        ("gpt2", {"architectures": "GPT2LMHeadModel"}, "architectures = .*; expected a list of strings"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_parameters = .*; expected rope_theta to be a number"),
        ("gpt2", {"id2label": 5}, "id2label = 5; expected an object or null"),
        ("llama", {"pad_token_id": "x"}, r'pad_token_id = "x"; expected an integer or null; correct it'),
        ("llama", {"eos_token_id": [1, "a"]}, r'eos_token_id = \[1, "a"\]; expected an integer or a list of integers'),
        ("gpt2", {"attn_pdrop": "x"}, r'attn_pdrop = "x"; expected a number of at least 0 and at most 1 or null'),
        ("opt", {"dropout": 1.5}, "dropout = 1.5; expected a number of at least 0 and at most 1 or null"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(name: str, changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"config.json: {message}"):
        read_config(written(tmp_path, fields_of(name) | changed))


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("llama", {"hidden_size": 73}, r"the hidden size \(73\) is not a multiple of the number of attention heads"),
        ("llama", {"num_attention_heads": 7}, r"not a multiple of the number of attention heads \(7\)"),
        ("qwen2", {"layer_types": ["full_attention"]}, "must be equal to the number of layer_types"),
    ],
)
def test_fields_that_do_not_fit_together_are_named_in_one_line_without_names_of_python(
    name: str, changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refusal:
        read_config(written(tmp_path, fields_of(name) | changed))
    message = str(refusal.value)
    assert re.search(rf"config.json: these fields make no {name}: .*{reason}.*; correct it", message)
    assert not re.search(r"\w+Error|<class|LMHeadModel|\n", message)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("gpt2", {"n_layer": HUGE}),
        ("gpt2", {"n_embd": HUGE}),
        ("gpt2", {"num_labels": HUGE}),
        ("qwen2", {"num_hidden_layers": HUGE}),
        ("qwen3", {"vocab_size": HUGE}),
        ("gpt-neo", {"num_layers": HUGE, "attention_types": [[["global"], HUGE]]}),
        ("gptj", {"n_positions": HUGE}),
    ],
)
def test_sizes_beyond_every_model_are_refused_before_anything_is_made_of_them(
    name: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    """Otherwise transformers would create a list of that length."""
    fields = {field: value for field, value in fields_of(name).items() if field not in ("layer_types", "id2label")}
    with pytest.raises(UserError, match=rf"config.json: {next(iter(changed))} = .*; expected an integer from"):
        read_config(written(tmp_path, fields | changed))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds a list; expected an object"),
        ("7", "holds a int; expected an object"),
        ("{", "is not JSON"),
        ('{"a":' * 100_000, "nests deeper than"),
        ('{"vocab_size": ' + "[" * 30 + "]" * 30 + "}", "vocab_size = .*; expected an integer"),
    ],
    ids=lambda text: text[:12],
)
def test_a_config_that_is_no_object_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=f"config.json(:)? {message}"):
        read_config(tmp_path)


CODE = """
from pathlib import Path
from transformers import PretrainedConfig
Path(__file__).parent.joinpath("ran").touch()
Path({marker!r}).touch()
class Foreign(PretrainedConfig):
    model_type = "foreign"
"""


@pytest.mark.parametrize("model_type", ["foreign", "gpt2", None])
def test_code_that_comes_with_a_config_is_not_run_whatever_the_terminal_answers(
    model_type: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, folder = tmp_path / "ran", tmp_path / "model"
    folder.mkdir()
    (folder / "foreign.py").write_text(CODE.format(marker=str(marker)))
    values = {"auto_map": {"AutoConfig": "foreign.Foreign"}} | ({"model_type": model_type} if model_type else {})
    monkeypatch.setattr(sys, "stdin", StringIO("y\n" * 20))
    message = refused(lambda: read_config(written(folder, values)))
    assert (message is None) == (model_type == "gpt2")
    assert message is None or "code that comes with a checkpoint is never run" in message
    assert not marker.exists()
    assert sys.stdin.read() == "y\n" * 20
