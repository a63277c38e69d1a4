"""The options of `init_inference`: DeepSpeed's names, defaults, old spellings, and clear errors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.house.source_tree import ROOT
from helpers.models.small_models import small_model

import labkit
from labkit.engine.ignored_options import IGNORED
from labkit.engine.options import Options, read_options
from labkit.system.errors import UserError

DEFAULTS: dict[str, Any] = {
    "replace_with_kernel_inject": False,
    "dtype": torch.float16,
    "tensor_parallel": {"enabled": True, "tp_size": 1, "tp_grain_size": 64, "mpu": None, "tp_group": None},
    "enable_cuda_graph": False,
    "use_triton": False,
    "triton_autotune": False,
    "triangular_masking": True,
    "moe": {"enabled": True, "ep_size": 1, "moe_experts": [1], "type": "standard"},
    "quant": {},
    "checkpoint": None,
    "base_dir": "",
    "set_empty_params": False,
    "save_mp_checkpoint_path": None,
    "return_tuple": True,
    "training_mp_size": 1,
    "injection_policy": None,
    "max_out_tokens": 1024,
    "min_out_tokens": 1,
    "transposed_mode": False,
}
ALIASES = {
    "kernel_inject": "replace_with_kernel_inject",
    "tp": "tensor_parallel",
    "tm": "triangular_masking",
    "max_tokens": "max_out_tokens",
    "injection_dict": "injection_policy",
}
DTYPES = {
    torch.float32: ("float32", "float", "fp32", "torch.float32"),
    torch.float16: ("float16", "half", "fp16", "torch.float16"),
    torch.bfloat16: ("bfloat16", "bf16", "torch.bfloat16"),
}
NOT_YET: list[dict[str, Any]] = [
    {"moe": {"type": "residual"}},
    {"set_empty_params": True},
    {"triton_autotune": True},
    {"triangular_masking": False},
    {"tensor_parallel": {"mpu": "an mpu"}},
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "float64"}, "unsupported dtype 'float64'; expected one of float32, bfloat16, float16, int8, float"),
    ({"dtype": torch.float64}, "unsupported dtype 'float64'; expected one of float32, bfloat16, float16, int8"),
    ({"dtype": 16}, "dtype: got 16"),
    ({"replace_with_kernel_inject": 1}, "replace_with_kernel_inject: got 1, expected true or false"),
    ({"kernel_inject": "yes"}, "replace_with_kernel_inject: got 'yes'"),
    ({"mp_size": "1"}, "tensor_parallel.tp_size: got '1', expected an integer"),
    ({"mp_size": 0}, "tensor_parallel.tp_size: got 0, expected at least 1"),
    ({"tensor_parallel": 1}, "tensor_parallel: got 1, expected a dict"),
    ({"tensor_parallel": {"size": 1}}, "tensor_parallel.size: got 1, is not known here"),
    ({"moe": 3}, "moe: got 3"),
    ({"dtype": "int8", "quant": {"weight": {"num_bits": 3}}}, "quant.weight.num_bits: got 3, expected 4 or 8"),
    ({"quant": {"weight": {"group_size": 48}}}, "quant.weight.group_size: got 48, expected 32, 64 or 128"),
    ({"quant": {"weight": {"group_size": 32, "q_groups": 2}}}, "has group_size=32 and q_groups=2; expected one of"),
    ({"quantization_setting": "8"}, r"quantization_setting: got '8', expected a number of groups or \(mlp_extra"),
    ({"quantization_setting": (8, 1)}, r"quantization_setting: got \(8, 1\), expected a number of groups"),
    ({"quantization_setting": 8, "quant": {"weight": {"q_groups": 2}}}, "groups the weights in its own way"),
    ({"quantization_setting": 8, "dtype": "fp16"}, "quant asks for quantised weights, got dtype=torch.float16 too"),
    ({"dtype": "int8", "quant": {"weight": {"q_groups": 0}}}, "q_groups: got 0, expected at least 1"),
    ({"dtype": "int8", "quant": {"head": True}}, "quant.head: got True, is not known here"),
    ({"dtype": "int8", "quant": {"enabled": False}}, "dtype=int8 asks for quantised weights and quant for none"),
    ({"dtype": "int8", "quant": {"weight": {"enabled": False}}}, "dtype=int8 asks for quantised weights and quant"),
    ({"quant": {"lm_head": True}, "dtype": "bf16"}, "quant asks for quantised weights, got dtype=torch.bfloat16 too"),
    ({"quant": {"weight": {"num_bits": 8}}, "dtype": "bf16"}, "quant asks for quantised weights, got dtype=torch.bf"),
    ({"max_out_tokens": 0}, "max_out_tokens: got 0, expected at least 1"),
    ({"max_out_tokens": 1.5}, "max_out_tokens: got 1.5, expected an integer"),
    ({"impl": "cuda"}, "impl: got 'cuda', expected 'auto', 'cpp', 'reference' or 'triton'"),
    ({"consume_model": "no"}, "consume_model: got 'no'"),
    ({"use_triton": True, "impl": "cpp"}, "^use_triton asks for impl='triton', got impl='cpp' too"),
]


ODD: tuple[Any, ...] = (3, -1, 0, 1.5, True, "x", b"x", [], [1], {}, {"nope": 1}, {1: 2}, object, float("nan"))
NESTED = {
    "offload": ("device", "path", "resident_gb", "slots"),
    "kv_offload": ("device", "path", "slots"),
    "tensor_parallel": ("enabled", "tp_size"),
    "pipeline_parallel": ("pp_size", "schedule", "micro_batches", "layers"),
    "quant": ("enabled", "weight", "activation", "lm_head", "flat"),
}


def test_an_option_of_another_type_gets_one_plain_problem() -> None:
    settings = [{name: value} for name in Options.model_fields for value in ODD]
    settings += [{name: {inner: value}} for name, fields in NESTED.items() for inner in fields for value in ODD]
    problems = []
    for options in settings:
        try:
            read_options(None, options)
        except UserError as error:  # labkit's own; any other error fails the test
            problems.append(str(error))
    jargon = re.compile(r"lax|constrained|function-|union|\.(str|int|bool|literal|dict|list)\b")
    assert not [problem for problem in problems if jargon.search(problem) or len(problem) > 400]
    assert len(problems) > 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offload": {"path": 3}}, "init_inference options: kv_offload.path: got 3, expected a path"),
        ({"offload": {"path": []}}, "init_inference options: offload.path: got [], expected a path"),
        ({"checkpoint": 3}, "init_inference options: checkpoint: got 3, expected a path or a dict"),
        (
            {"pipeline_parallel": {"micro_batches": {"prompt": 0, "decode": 1}}},
            "init_inference options: pipeline_parallel.micro_batches: got {'prompt': 0, 'decode': 1}, prompt: got 0, "
            "expected at least 1",
        ),
        (
            {"quant": {"lm_head": 3}},
            "init_inference options: quant.lm_head: got 3, expected true, false or a dict",
        ),
    ],
)
def test_a_field_of_several_types_has_one_problem(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        read_options(None, options)


@pytest.mark.parametrize("setting", [(64, True), (True, 64)])
def test_both_orders_of_quantization_setting_say_the_same(setting: tuple[Any, Any]) -> None:
    options = read_options(None, {"quantization_setting": setting})
    assert options.dtype == torch.int8
    assert options.quant.flat is not None
    assert (options.quant.flat.groups, options.quant.flat.mlp_extra_grouping) == (64, True)


def test_quant_alone_asks_for_quantised_weights() -> None:
    assert read_options(None, {"quant": {"weight": {"num_bits": 4}}}).dtype == torch.int8
    assert read_options(None, {"quant": {}}).dtype is None
    assert read_options(None, {"quant": {"enabled": False}}).dtype is None


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_deepspeed_option_is_accepted_with_its_default(name: str) -> None:
    read_options(None, {name: DEFAULTS[name]})
    read_options({name: DEFAULTS[name]}, {})


def test_all_defaults_at_once_give_an_engine() -> None:
    engine = labkit.init_inference(small_model("gpt2"), DEFAULTS)
    assert engine.dtype == torch.float16
    assert engine.generate(torch.tensor([[5, 6]]), max_new_tokens=2, pad_token_id=0).shape == (1, 4)


def test_old_spellings_are_accepted() -> None:
    for old, new in ALIASES.items():
        assert read_options(None, {old: DEFAULTS[new]}) == read_options(None, {new: DEFAULTS[new]})
    assert read_options(None, {"mp_size": 1}) == read_options(None, {"tensor_parallel": {"tp_size": 1}})
    assert read_options(None, {"replace_method": "auto"}) == read_options(None, {"moe": {}}) == Options()
    assert read_options(None, {"ep_size": 2}) == read_options(None, {"moe": {"ep_size": 2}})
    assert [read_options(None, {"moe": off}).moe.parts for off in (False, None)] == [1, 1]


@pytest.mark.parametrize("name", IGNORED)
def test_an_option_without_effect_is_named_in_the_log_and_in_the_pages(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "labkit"):
        assert read_options(None, {name: IGNORED[name].default}) == Options()
    (record,) = caplog.records
    assert record.getMessage() == f"labkit: the option {name} has no effect: {IGNORED[name].why}"
    assert f"`{name}`" in (ROOT / "docs" / "deepspeed.md").read_text()


@pytest.mark.parametrize(("dtype", "spelling"), [(dtype, text) for dtype, texts in DTYPES.items() for text in texts])
def test_dtypes_may_be_strings(dtype: torch.dtype, spelling: str) -> None:
    assert read_options(None, {"dtype": spelling}).dtype == dtype


def test_without_a_dtype_the_engine_takes_the_models() -> None:
    for dtype in DTYPES:
        assert labkit.init_inference(small_model("gpt2", dtype=dtype)).dtype == dtype


def test_a_json_file_a_dict_and_keywords_say_the_same(tmp_path: Path) -> None:
    options = {"dtype": "bf16", "tensor_parallel": {"tp_size": 1}, "max_out_tokens": 99, "moe": {"num_experts": [1]}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(options))
    expected = read_options(None, options)
    assert expected != Options()
    assert read_options(options, {}) == read_options(file, {}) == read_options(str(file), {}) == expected


def test_a_config_and_keywords_add_up() -> None:
    options = read_options({"dtype": "fp16", "mp_size": 1}, {"max_tokens": 7, "tensor_parallel": {"tp_size": 1}})
    assert options == read_options(None, {"dtype": "fp16", "tensor_parallel": {"tp_size": 1}})
    assert options.dtype == torch.float16


@pytest.mark.parametrize(
    ("config", "keywords", "words"),
    [
        ({"max_out_tokens": 5}, {"max_out_tokens": 6}, "max_out_tokens was given twice: 5 and 6"),
        ({"max_out_tokens": 5}, {"max_tokens": 6}, "max_out_tokens was given twice: 5 and 6"),
        ({"max_out_tokens": 5, "max_tokens": 6}, {}, "max_out_tokens was given twice: 5 and 6"),
        ({"mp_size": 1}, {"tp": {"tp_size": 2}}, "tensor_parallel was given twice"),
    ],
)
def test_two_values_for_one_option_are_refused(config: dict[str, Any], keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_options(config, keywords)


@pytest.mark.parametrize("source", ["config", "keyword"])
def test_an_unknown_option_is_refused_with_the_known_ones(source: str) -> None:
    unknown = {"replace_with_kernel_injection": True}
    with pytest.raises(ValueError, match=r"unknown option replace_with_kernel_injection; expected one of base_dir, .*"):
        read_options(*((unknown, {}) if source == "config" else (None, unknown)))


@pytest.mark.parametrize(("options", "words"), WRONG, ids=[str(options) for options, _ in WRONG])
def test_a_wrong_value_is_named_with_what_is_expected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){words}"):
        read_options(None, options)


@pytest.mark.parametrize("options", NOT_YET, ids=str)
def test_what_later_work_will_fill_is_refused_by_name(options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(NotImplementedError, match=f"{name}.* is not supported yet; "):
        read_options(None, options)


def test_a_config_that_is_no_options_is_refused(tmp_path: Path) -> None:
    broken, array = tmp_path / "broken.json", tmp_path / "list.json"
    broken.write_text('{"dtype": ')
    array.write_text("[1]")
    for config, words in (
        (tmp_path / "absent.json", "absent.json' does not exist"),
        (broken, "broken.json is not JSON"),
        (array, "list.json': expected an object of options, got list"),
    ):
        with pytest.raises(ValueError, match=words):
            read_options(config, {})
    with pytest.raises(TypeError, match="config: expected a dict or the path of a JSON file, got int"):
        read_options(3, {})  # type: ignore[arg-type]


def test_options_refused_by_read_options_are_refused_before_the_model_is_touched() -> None:
    model = small_model("gpt2")
    with pytest.raises(ValueError, match="unknown option"):
        labkit.init_inference(model, consume_model=True, no_such_option=1)
    assert all(parameter.numel() for parameter in model.parameters())


def test_a_base_dir_without_a_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="base_dir says where the files of checkpoint are; pass checkpoint too"):
        read_options(None, {"base_dir": "/models"})
