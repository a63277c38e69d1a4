"""What each rank of a tensor-parallel run does in the tests. `labkit.launch` calls it and returns plain data."""

import errno
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from helpers.kernels.interpreter import speed_up_interpreter
from helpers.models.engines import FEW
from helpers.models.offloaded import LEAST, LEAST_OF_EXPERTS, WRITE, able_only_to
from helpers.models.small_models import SMALL_CONFIGS, VOCAB, small_model
from helpers.ranks.lost_ranks import failed_in_steps
from helpers.ranks.models_without_a_row import without_a_row
from torch import Tensor

import labkit
from labkit.engine import InferenceEngine
from labkit.stages import Phase

BATCH, TOKENS, NEW = 3, 9, 8
SAVED_PROMPT = [[5, 77, 300, 12, 9, 41]]
TWO = ("gptj", "llama")  # one and two all-reduces in a layer
CUT = [name for name in SMALL_CONFIGS if name != "olmoe"]  # its norms over all heads can't be cut
FIVE_HEADS: dict[str, Any] = {"num_attention_heads": 5}
ONE_OF_EACH_ROW: dict[str, dict[str, Any]] = {  # the heads can be divided among five ranks
    "gpt2": FIVE_HEADS,
    "gptj": FIVE_HEADS,
    "gpt-neo": FIVE_HEADS,
    "gpt-neox-parallel": FIVE_HEADS | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "bloom-normed-residual": {},
    "opt": FIVE_HEADS,
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "mixtral": {},
    "qwen2-moe": {"shared_expert_intermediate_size": 75},
    "qwen3-moe": {},
    "granite-moe": {},
    "gpt-oss": {},
}


@dataclass(frozen=True)
class Found:
    """Comparison of a model cut into ranks with the whole model."""

    logits: float  # largest difference from the whole model, at visible tokens
    by_stages: float  # largest difference of the staged runner from the one-call runner
    tokens_equal: bool  # of greedy search
    transport: str


def prompts(vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] and a mask with padding on the left, on the right and in the middle."""
    ids = torch.randint(1, vocab, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[2, 4] = 0
    return ids, mask


def engine(
    name: str,
    size: int,
    *,
    dtype: torch.dtype = torch.float32,
    impl: str = "cpp",
    kv_dtype: torch.dtype | None = None,
    ep_size: int = 1,
    **model: Any,
) -> Any:
    options: dict[str, Any] = {"tensor_parallel": {"tp_size": size}} if size > 1 else {}
    options |= {"moe": {"ep_size": ep_size}} if ep_size > 1 else {}
    options["kv_dtype"] = kv_dtype
    if dtype == torch.int8:
        options["quant"] = {"weight": {"q_groups": 2}, "lm_head": True}
    return labkit.init_inference(small_model(name, **model), dtype=dtype, impl=impl, **options)


def against_one_process(
    size: int, dtype: torch.dtype, impl: str, models: dict[str, dict[str, Any]]
) -> dict[str, Found]:
    torch.set_num_threads(1)
    return {
        name: compare(*(engine(name, ranks, dtype=dtype, impl=impl, **model) for ranks in (1, size)))
        for name, model in models.items()
    }


def compare(whole: InferenceEngine, cut: InferenceEngine) -> Found:
    ids, mask = prompts(whole.model_config.vocab_size)
    visible = mask.bool()
    expected, logits = whole(ids, attention_mask=mask).logits, cut(ids, attention_mask=mask).logits
    with cut.module.runner.stage_by_stage():
        staged = cut(ids, attention_mask=mask).logits
    return Found(
        logits=float((expected - logits)[visible].abs().max()),
        by_stages=float((staged - logits)[visible].abs().max()),
        tokens_equal=torch.equal(greedy(whole, ids, mask), greedy(cut, ids, mask)),
        transport=cut.module.runner.layer_range.ranks.exchange.transport,
    )


def greedy(model: InferenceEngine, ids: Tensor, mask: Tensor) -> Tensor:
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)


WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": True, "top_k": 5, "temperature": 1.7},
    {"do_sample": True, "top_k": 100, "top_p": 0.8},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "repetition_penalty": 1.3},
    {"do_sample": True, "top_k": 9, "num_return_sequences": 2},
    {"do_sample": True, "num_beams": 2},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": False, "min_new_tokens": 4},
)


def ways_to_generate() -> list[tuple[Tensor, Tensor]]:
    """Tokens of the whole and of the cut model for each of WAYS; the second rank of the cut model has another seed."""
    whole, cut = engine("llama", 1), engine("llama", 2)
    (ids, mask), tokens = prompts(), []
    for options in WAYS:
        arguments = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0} | options
        torch.manual_seed(3)
        expected = whole.generate(ids, **arguments)
        torch.manual_seed(3 + dist.get_rank())
        tokens.append((expected, cut.generate(ids, **arguments)))
    return tokens


def with_int8_cache() -> dict[str, Found]:
    return {name: compare(*(engine(name, size, kv_dtype=torch.int8) for size in (1, 2))) for name in ("gpt2", "llama")}


def with_codes_of(file: str) -> dict[str, Found]:
    """Comparison for a GGUF file, whose codes each rank takes unchanged."""
    whole, cut = (labkit.init_inference(labkit.resolve(file), tensor_parallel={"tp_size": size}) for size in (1, 2))
    return {file: compare(whole, cut)}


def as_they_are(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {name: {} for name in names}


def in_low_precision(ranks: int, names: Iterable[str]) -> dict[str, Any]:
    low, models = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}, as_they_are(names)
    return {name: against_one_process(ranks, dtype, "cpp", models) for name, dtype in low.items()}


def by_gloo() -> tuple[bool, float, str]:
    with mock.patch("labkit.kernels.shared_memory.system", return_value=(str(dist.get_rank()),)):
        comparisons = against_one_process(2, torch.float32, "cpp", {"gptj": {}, "llama": {}})
    llama = comparisons["llama"]
    return all(comparison.tokens_equal for comparison in comparisons.values()), llama.logits, llama.transport


def stages_of_a_layer() -> dict[str, Any]:
    """By model: the stages of a layer for which decoding has times, and the stages of the layer in running order."""
    stages, ids = {}, prompts()[0]
    for name in ("llama", "gptj"):
        cut = engine(name, 2)
        cut.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        decode = [entry for entry in cut.stage_times() if entry.phase == Phase.DECODE and entry.layer == 1]
        stages[name] = ([entry.stage for entry in decode], cut.module.runner.layer_range.stages)
    return stages


def message(function: Callable[[], object]) -> str:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def mistakes() -> dict[str, str]:
    """Message on this rank for each mistake, for instance if the ranks disagree. The ranks work again after each."""
    second_rank = dist.get_rank() == 1

    def whole(seed: int = 5, **options: Any) -> None:
        labkit.init_inference(small_model("gpt2", seed=seed), tensor_parallel={"tp_size": 2}, **options)

    cut = engine("llama", 2)
    ids, _ = prompts()
    return {
        "dtype": message(lambda: whole(dtype=torch.bfloat16 if second_rank else torch.float32)),
        "weights": message(lambda: whole(seed=6 if second_rank else 5)),
        "impl": message(lambda: whole(impl="reference" if second_rank else "cpp")),
        "tokens": message(lambda: cut.generate(ids // (1 + second_rank), max_new_tokens=2)),
        "length": message(lambda: cut(ids[:, : 5 + second_rank])),
        "world": message(lambda: engine("llama", 4)),
        "heads": message(lambda: labkit.init_inference(small_model("gpt2", num_attention_heads=1), mp_size=2)),
        "equal": message(lambda: cut(ids)),
    }


def saved_and_loaded(folder: str) -> dict[str, Any]:
    """Tokens of an engine saved to `folder`; whether the loaded engine gives the same logits and tokens."""
    options: dict[str, Any] = {"dtype": torch.float32, "impl": "cpp", "tensor_parallel": {"tp_size": 2}}
    ids = torch.tensor(SAVED_PROMPT)

    def tokens(model: InferenceEngine) -> Tensor:
        return model.generate(ids, max_new_tokens=12, do_sample=False)

    saved = labkit.init_inference(labkit.resolve("tiny-llama"), save_mp_checkpoint_path=folder, **options)
    loaded = labkit.init_inference(labkit.resolve(folder), **options)
    return {
        "tokens": tokens(saved),
        "logits equal": torch.equal(loaded(ids).logits, saved(ids).logits),
        "tokens equal": torch.equal(tokens(loaded), tokens(saved)),
        "saved twice": message(
            lambda: labkit.init_inference(labkit.resolve(folder), save_mp_checkpoint_path=folder, **options)
        ),
    }


def every_model_on_two_ranks() -> dict[str, Any]:
    return in_low_precision(2, FEW) | {
        "float32": against_one_process(2, torch.float32, "cpp", as_they_are(CUT)),
        "reference": against_one_process(2, torch.float32, "reference", as_they_are(FEW)),
    }


def two_ranks(folder: str) -> dict[str, Any]:
    """All results of two ranks. `folder` contains a GGUF file, `model.gguf`."""
    return in_low_precision(2, TWO) | {
        "float32": against_one_process(2, torch.float32, "cpp", as_they_are(FEW)),
        "reference": against_one_process(2, torch.float32, "reference", as_they_are(TWO)),
        "int8 cache": with_int8_cache(),
        "codes": with_codes_of(f"{folder}/model.gguf"),
        "ways": ways_to_generate(),
        "stages": stages_of_a_layer(),
        "mistakes": mistakes(),
        "gloo": by_gloo(),
        "without a row": without_a_row(folder),
        "saved": saved_and_loaded(f"{folder}/saved"),
        "streamed": streamed_layers(f"{folder}/streamed"),
        "cache on disk": with_cache_on_disk(Path(folder, "kv").resolve()),
        "lost": failed_in_steps(f"{folder}/lost"),
    }


def streamed_layers(folder: str) -> dict[str, Any]:
    """Models whose ranks read experts, or layers, from files of their own. Then one of the files is damaged during
    use.
    """
    comparisons, ids = {}, prompts()[0]
    mixture = small_model("qwen3-moe", moe_intermediate_size=320)
    by_need = engine_with_experts_on_disk(mixture, folder)
    comparisons["qwen3-moe"] = compare(labkit.init_inference(mixture), by_need)
    assert by_need.expert_store.counts.reads
    for name in ("gptj", "llama"):
        cut = streamed_engine(small_model(name), {"path": folder})
        comparisons[name] = compare(engine(name, 1), cut)
    stream = cut.streamed.stream
    dist.barrier()
    if dist.get_rank() == 1:
        with stream.path.open("r+b") as file:
            file.seek(stream.blocks[1].offset)
            file.write(b"damaged!")
    dist.barrier()

    def call_twice() -> None:
        for _ in range(2):  # layers that were prefetched before the damage are intact
            cut(ids)

    in_one_call = message(call_twice)
    with cut.module.runner.stage_by_stage():
        return {"found": comparisons, "damaged": (in_one_call, message(call_twice))}


def with_cache_on_disk(folder: Path) -> dict[str, Any]:
    """Models whose ranks keep the caches of their heads in files of their own; then one rank's disk breaks."""
    comparisons = {}
    for name in ("gptj", "llama"):
        options: dict[str, Any] = {"kv_offload": {"path": folder, "slots": 2}, "tensor_parallel": {"tp_size": 2}}
        cut: Any = labkit.init_inference(small_model(name), **options)
        comparisons[name] = compare(engine(name, 1), cut)
    ids = prompts()[0]
    cache = cut(ids).past_key_values
    with able_only_to(WRITE, folder) if dist.get_rank() == 1 else nullcontext():
        dist.barrier()
        broken = message(lambda: cut(ids[:, :1], past_key_values=cache)), cache.length
        dist.barrier()
    full = OSError(errno.ENOSPC, "No space left on device")
    longer = ids[:, :1].repeat(1, cache.capacity - 8)
    with mock.patch("os.posix_fallocate", side_effect=full) if dist.get_rank() == 1 else nullcontext():
        no_room = message(lambda: cut(longer, past_key_values=cache)), cache.length
    after = message(lambda: cut(longer, past_key_values=cache))
    return {"found": comparisons, "broken": broken, "no room": no_room, "after": after}


def fetched_layers(folder: str) -> dict[str, Any]:
    """Offloaded layers in host memory and on disk: the largest difference of a second prompt's logits from the whole
    model's, and the number of layers copied. The kernels are Triton's, and each rank's KV cache is in host memory. Also
    the messages if one rank lacks host memory.
    """
    speed_up_interpreter()
    model, ids = small_model("llama"), torch.arange(1, 35)[None]
    with torch.no_grad():
        expected = model(ids).logits[:, 17:]
    results: dict[str, Any] = {}
    for offload in ({"device": "cpu"}, {"path": folder}):
        cut = streamed_engine(model, offload, impl="triton", kv_offload={"device": "cpu"})
        logits = cut(ids[:, 17:], past_key_values=cut(ids[:, :17]).past_key_values).logits
        results[cut.options.offload.device] = float((logits - expected).abs().max()), cut.streamed.stream.blocks_read
    memory = psutil.virtual_memory if dist.get_rank() == 0 else lambda: SimpleNamespace(available=10)
    with mock.patch("labkit.engine.offload.host.psutil.virtual_memory", memory):
        results["no room for a cache"] = message(lambda: cut(ids))
        return results | {"short": message(lambda: streamed_engine(model, {"device": "cpu"}, impl="triton"))}


def engine_with_experts_on_disk(model: Any, folder: str, **options: Any) -> Any:
    """Engine with as few experts in memory as possible."""
    offload, options = {"path": folder, "resident_gb": 0.0}, {"tensor_parallel": {"tp_size": 2}} | options
    least = LEAST_OF_EXPERTS.search(message(lambda: labkit.init_inference(model, offload=offload, **options)))
    assert least is not None
    return labkit.init_inference(model, offload=offload | {"resident_gb": float(least[1])}, **options)


def streamed_engine(model: Any, offload: dict[str, Any], **options: Any) -> Any:
    """Engine with as few resident layers as possible."""
    offload, options = offload | {"slots": 2}, {"tensor_parallel": {"tp_size": 2}} | options
    least = LEAST.search(message(lambda: labkit.init_inference(model, offload=offload | {"resident_gb": 0}, **options)))
    assert least is not None
    return labkit.init_inference(model, offload=offload | {"resident_gb": float(least[1])}, **options)


def three_ranks() -> dict[str, Any]:
    """All results of three ranks."""
    return in_low_precision(3, FEW) | {"float32": against_one_process(3, torch.float32, "cpp", ONE_OF_EACH_ROW)}


def four_ranks() -> dict[str, Any]:
    """All results of four ranks."""
    return {"float32": against_one_process(4, torch.float32, "cpp", ONE_OF_EACH_ROW)}
