"""A checkpoint of an architecture without a row: sides of transformers run it, and the engine runs it with hooks."""

from pathlib import Path

import pytest
import torch
from helpers.models.any_models import any_model
from helpers.models.chat_models import chat_checkpoint, chat_model_without_a_row
from torch import nn
from transformers import PreTrainedModel

import labkit
from labkit.harness import profiled
from labkit.harness.compare.loader import load_side
from labkit.harness.compare.plan import Schedule, SideSpec, prepare
from labkit.harness.hosted_work import MatrixNumbers, matrix_numbers, work_of_matrices
from labkit.harness.runs import Case
from labkit.models.level_names import DERIVED
from labkit.notebooks.shape import model_shape
from labkit.system.errors import UserError
from labkit.weights.resolve import resolve

PROMPT = torch.arange(40, 49).repeat(2, 1)
ARGS = {"attention_mask": torch.ones_like(PROMPT), "do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}


def case(folder: Path) -> Case:
    return Case(model=str(folder), dtype="float32", batch=1, prompt_tokens=4, new_tokens=3, threads=1)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return chat_model_without_a_row()


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model.save_pretrained(path := tmp_path_factory.mktemp("experts"))
    return path


@pytest.mark.parametrize("name", ["hf-eager", "hf-static", "accelerate", "fused"])
def test_its_tokens_are_those_of_transformers(name: str, model: PreTrainedModel, folder: Path) -> None:
    side = load_side(name, resolve(folder, any_architecture=True), torch.float32, threads=1)
    assert torch.equal(side.generate(PROMPT, **ARGS), model.generate(PROMPT, **ARGS))
    calls: list[int] = []
    assert side.stage_times(lambda: calls.append(1)) == []
    assert calls == [1]


def test_the_engine_s_side_says_that_it_has_hooks(folder: Path) -> None:
    side = load_side("fused-int8", resolve(folder, any_architecture=True), torch.bfloat16, threads=1)
    assert "1 x head: lm_head" in side.replaced
    assert side.impl == "labkit, cpp kernels in hooks, int8 weights"


def test_the_engine_s_side_says_that_its_row_is_derived(tmp_path: Path) -> None:
    model = any_model("granite")
    model.resize_token_embeddings(300)
    folder = chat_checkpoint(tmp_path, model=model)
    side = load_side("fused", resolve(folder), torch.float32, threads=1)
    assert side.impl == "labkit, cpp kernels by a derived row"
    assert side.model.level == DERIVED


@pytest.mark.parametrize("side", ["hf-eager", "fused"])
def test_the_run_of_a_capture_takes_it(side: str, folder: Path) -> None:
    profiled.main(str(folder), side, prompt=4, new=3, threads=1)


@pytest.mark.parametrize(
    ("side", "dtype"), [("hf-eager", torch.float32), ("fused", torch.float32), ("fused-int8", torch.bfloat16)]
)
def test_the_matrices_of_a_hybrid_are_counted_on_all_sides(side: str, dtype: torch.dtype, tmp_path: Path) -> None:
    hybrid = any_model("qwen3_5_text")
    hybrid.resize_token_embeddings(300)
    linears = [module for module in hybrid.modules() if isinstance(module, nn.Linear)]
    expected = sum({id(linear.weight): linear.weight.numel() for linear in linears}.values())
    source = resolve(chat_checkpoint(tmp_path, model=hybrid), any_architecture=True)
    loaded = load_side(side, source, dtype, threads=1)
    numbers = matrix_numbers(loaded.model)
    assert numbers == MatrixNumbers(dense=expected)
    work = work_of_matrices(numbers, loaded.weights, batch=2, prompt=7)
    assert work.decode_flops == 4 * expected
    assert expected <= work.decode_bytes <= 4 * expected * 1.5


@pytest.mark.parametrize(
    ("side", "dtype"), [("hf-eager", torch.float32), ("fused", torch.float32), ("fused-int8", torch.bfloat16)]
)
def test_experts_are_read_as_far_as_they_are_chosen(side: str, dtype: torch.dtype, folder: Path) -> None:
    loaded = load_side(side, resolve(folder, any_architecture=True), dtype, threads=1)
    config = loaded.model.config
    matrices = 3 * config.hidden_size * config.intermediate_size
    numbers = matrix_numbers(loaded.model)
    assert numbers is not None
    assert numbers.experts == config.num_hidden_layers * config.num_local_experts * matrices
    assert numbers.chosen == config.num_experts_per_tok / config.num_local_experts
    one, many = (work_of_matrices(numbers, loaded.weights, batch=batch, prompt=7) for batch in (1, 1000))
    assert numbers.read(1) == pytest.approx(numbers.of_a_token)
    assert numbers.read(2) == pytest.approx(numbers.dense + numbers.experts * (1 - (1 - numbers.chosen) ** 2))
    assert one.decode_bytes < many.decode_bytes == pytest.approx(many.weight_bytes)
    if dtype == torch.float32:
        assert one.decode_bytes == pytest.approx(4 * numbers.of_a_token)


def test_what_experts_of_another_kind_read_is_not_counted() -> None:
    assert matrix_numbers(any_model("jetmoe")) is None


def test_a_notebook_begins_with_its_level_and_the_sizes_of_its_config(folder: Path) -> None:
    cells = [tuple(line.strip("| ").split(" | ")) for line in model_shape(str(folder)).data.splitlines()]
    assert {("level", "hooks"), ("layers", "2"), ("hidden size", "32"), ("heads", "2")} <= set(cells)


def test_it_is_prepared_without_a_shape_for_sides_that_take_any_model(folder: Path) -> None:
    sides = [SideSpec(name, 1) for name in ("hf-eager", "hf-compile", "fused", "fused:int4-64")]
    assert prepare(sides, case(folder), Schedule()).config is None
    assert prepare(sides, case(Path("tiny-gpt2")), Schedule()).config is not None


def test_sides_that_need_a_row_refuse_it(folder: Path) -> None:
    with pytest.raises(UserError, match=r"PhimoeForCausalLM of model type 'phimoe', from .* \(a router that no row"):
        prepare([SideSpec("hf-eager", 1), SideSpec("fused-streamed", 1)], case(folder), Schedule())
    with pytest.raises(UserError, match="fused-tp2 divides the model, which needs a row, and Phimoe has none"):
        prepare([SideSpec("hf-eager", 1), SideSpec("fused", 1, tp=2)], case(folder), Schedule())
    with pytest.raises(UserError, match="transformers runs it"):
        resolve(folder, any_architecture=True).names()


def test_weights_that_are_not_all_there_are_named(model: PreTrainedModel, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "model.norm.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(UserError, match=r"lacks 1 tensors of PhimoeForCausalLM, model.norm.weight for one"):
        resolve(tmp_path, any_architecture=True).hf_model(torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match="transformers cannot load the model"):
        resolve(tmp_path, any_architecture=True).hf_model(torch.float32)


@pytest.mark.sweep
def test_a_comparison_of_it_has_times_and_no_limit(folder: Path) -> None:
    result = labkit.compare("hf-eager", "fused", model=str(folder), prompt=4, new=3, rounds=2, output=None)
    assert "fused" in repr(result)
