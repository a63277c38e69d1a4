"""A range of layers takes and returns rows if it has no embedding or no head; layers can share memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.models.engines import error, fused, prompt, vanilla
from helpers.models.layer_ranges import CutModel
from torch import Tensor

from labkit.engine.memory.heads import StoredHeads
from labkit.engine.runners.layer_range import LayerRange
from labkit.engine.runners.step import StepInput
from labkit.kernels import DecodeStep
from labkit.kernels.decode_step import ChunkArgs
from labkit.kernels.gpu import CPU
from labkit.kernels.memory import Arena, Heap
from labkit.kernels.types import Norm
from labkit.models.policies import model_config_of
from labkit.models.shards import Shard, shard
from labkit.system.errors import UserError, UserTypeError
from labkit.weights.build import Unsaved
from labkit.weights.capacity import layer_bytes
from labkit.weights.model_tensors import ModelTensors
from labkit.weights.records import Builder
from labkit.weights.spec import WeightSpec

SAME = 1e-5  # of the range of the logits
CUTS = (0, 1, 2, 3)
NAMES = ("gpt2", "gptj", "bloom", "opt-post-norm", "mistral")  # tied, parallel, embedding norm, post-norm, windows


@pytest.mark.parametrize("impl", ["cpp", "reference"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("poisoned")
def test_ranges_of_layers_one_after_the_other_are_the_model(name: str, impl: str) -> None:
    """Each range has the cache of its own layers; a prompt with padding, then token by token."""
    ids = prompt(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        positions = {} if name == "bloom" else {"position_ids": places}
        expected = vanilla(name)(ids, attention_mask=mask, **positions).logits
    model = CutModel(vanilla(name), CUTS, impl)
    caches, logits = model.new_caches(), []
    for begin, end in ((0, 6), (6, 7), (7, 9)):
        step = StepInput(ids[:, begin:end], caches[0], mask[:, :end], places[:, begin:end], keep=end - begin)
        result = model.step(step, caches).result
        assert result is not None
        logits.append(result)
    assert error(torch.cat(logits, dim=1)[mask.bool()], expected[mask.bool()]) <= SAME
    assert [isinstance(kv.heads, StoredHeads) and len(kv.heads.keys) for kv in caches] == [1, 1, 1]
    assert all(cache.length == 9 for cache in caches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", ["gpt2-untied", "bloom", "llama-biased"])
def test_layers_can_pass_through_one_piece_of_memory(name: str, dtype: torch.dtype) -> None:
    """Layers of one shape have the same layout in a slot. A layer that replaces another one in the slot computes the
    same as in memory of its own.
    """
    model = vanilla(name)
    spec = WeightSpec.of(model.config, dtype)
    part = shard(spec.config, layers=range(3), embedding=False, head=False)
    part = replace(part, sums_whole=dtype == torch.int8)
    spec = replace(spec, part=part)
    canonical = Unsaved(spec, ModelTensors(model))
    slot = torch.empty(layer_bytes(spec), dtype=torch.uint8)
    rows_NH, addresses = torch.randn(5, spec.config.hidden_size), set()
    for index in part.layers:
        outputs = []
        for arena in (Arena(slot), Arena.reserved(len(slot))):
            builder = Builder(spec, arena)
            layer = builder.layer(index, canonical.layer(index, Heap(CPU).empty), Norm())
            single_layer = replace(part, layers=range(index, index + 1))
            outputs.append(through(builder, single_layer, layer, rows_NH))
            if not outputs[1:]:
                addresses.add((layer.qkv.proj.weight.data_ptr(), layer.dense.out.weight.data_ptr()))
                assert slot.data_ptr() <= layer.dense.out.weight.data_ptr() < slot.data_ptr() + len(slot)
        assert torch.equal(*outputs)
        rows_NH = outputs[0]
    assert len(addresses) == 1


def through(builder: Builder, part: Shard, layer: object, rows_NH: Tensor) -> Tensor:
    """Output rows of one layer for the rows of one sequence."""
    builder = replace(builder, spec=replace(builder.spec, part=part))
    weights = builder.model([layer], builder.outside({}), Norm())  # type: ignore[list-item]
    weights = replace(weights, final_norm=Norm())
    layer_range = LayerRange(builder.spec, weights, CPU)
    cache, out = layer_range.new_cache(), torch.empty_like(rows_NH)
    rows = cache.place(1, len(rows_NH))
    tables = layer_range.rotary_of(cache).reaching(len(rows_NH))
    DecodeStep(weights)([ChunkArgs(rows, 0, inputs=rows_NH, outputs=out)], tables, cache.c, threads=1)
    return out


def test_sizes_that_do_not_fit_a_step_are_refused() -> None:
    engine, ids = fused("gpt2"), prompt(1, 4)
    cache = engine.module.new_cache()
    engine(ids, past_key_values=cache)
    rows, step, fitting = cache.place(1, 4), DecodeStep(engine.weights), cache.c
    far = replace(rows, positions=torch.arange(300, 304, dtype=torch.int32))
    misuses: list[tuple[list[ChunkArgs], object, str]] = [
        ([], fitting, "got 0 chunks and 3 caches"),
        ([ChunkArgs(rows, 4, ids)], (fitting._type_ * 2)(), "1 chunks and 2 caches"),
        ([ChunkArgs(rows, 10**6, ids)], fitting, "cache of .* slots can't take 4 tokens after 1000000"),
        ([ChunkArgs(rows, -1, ids)], fitting, "can't take 4 tokens after -1"),
        ([ChunkArgs(rows, 0, ids[:, :2])], fitting, r"tokens: expected contiguous int64 \[1, 4\], got .* \[1, 2\]"),
        ([ChunkArgs(rows, 0, ids, keep=5)], fitting, "got keep = 5, expected 0 to 4"),
        ([ChunkArgs(rows, 0, ids, keep=1)], fitting, "got keep = 1 without logits or argmax to fill"),
        ([ChunkArgs(rows, 0, ids + 10**9)], fitting, "tokens: got 10000.* the tokens of the vocabulary"),
        ([ChunkArgs(far, 0, ids)], fitting, r"rows\.positions: got 300 to 3.*: the rows of the table of positions"),
    ]
    for chunks, caches, expected in misuses:
        with pytest.raises(UserError, match=expected):
            step(chunks, None, caches, threads=1)  # type: ignore[arg-type]


def test_tensors_that_do_not_fit_a_step_are_refused() -> None:
    engine, ids = fused("gpt2"), prompt(2, 4)
    cache = engine.module.new_cache()
    engine(ids, past_key_values=cache)
    step, width, vocab = DecodeStep(engine.weights), engine.weights.hidden, engine.module.config.vocab_size
    rows = engine.module.new_cache(4).place(2, 4)
    fitting = ChunkArgs(
        rows, 0, ids, 1, torch.empty(2, vocab), torch.empty(2, dtype=torch.int64), torch.empty(2, width)
    )
    step([fitting], None, cache.c, threads=1)
    assert fitting.logits is not None
    torch.testing.assert_close(fitting.logits, engine(ids).logits[:, -1], atol=1e-4, rtol=1e-4)
    changes: list[Callable[[torch.Tensor], Any]] = [
        lambda x: x[:1],
        lambda x: x[None],
        lambda x: x.to("meta"),
        lambda x: x.int() if x.dtype == torch.int64 else x.half(),
        lambda x: torch.stack((x, x), dim=-1)[..., 0],
        lambda x: x.tolist(),
    ]
    for name in ("tokens", "logits", "argmax", "hidden"):
        for change in changes:
            with pytest.raises((UserError, UserTypeError), match=f"^{name}: expected contiguous "):
                step([fitting._replace(**{name: change(getattr(fitting, name))})], None, cache.c, threads=1)
    with pytest.raises(UserError, match="got no tokens, expected them"):
        step([fitting._replace(tokens=None)], None, cache.c, threads=1)
    with pytest.raises(UserError, match=r"rows\.positions: expected contiguous int32 \[8\]"):
        step([fitting._replace(rows=replace(rows, positions=rows.positions.long()))], None, cache.c, threads=1)
    with pytest.raises(UserError, match="got threads = 0, expected 1"):
        step([fitting], None, cache.c, threads=0)


@pytest.mark.parametrize("layers", [range(0), range(2, 4), range(0, 3, 2), range(-1, 1)])
def test_layers_that_a_model_does_not_have_are_refused(layers: range) -> None:
    config = model_config_of(vanilla("gpt2").config)
    with pytest.raises(ValueError, match=r"got layers range.* of 3; expected consecutive layers of the model"):
        shard(config, layers=layers)
