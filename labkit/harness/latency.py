"""`measure_latency` follows the articles' protocol (warm up, time ten calls) and returns a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from labkit.engine import InferenceEngine
from labkit.engine.team_size import team_size, torch_threads
from labkit.harness.environment import read_environment
from labkit.harness.records import Measurement
from labkit.harness.roofline import count_work, probe_bandwidth
from labkit.harness.rounds import probed
from labkit.harness.runs import Case, Run
from labkit.harness.stored_weights import name_of, stored_by
from labkit.harness.timing import timed_generate
from labkit.models.config import ModelConfig
from labkit.models.policies import model_config_of
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError


def measure_latency(
    engine: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[str],
    generation_args: Mapping[str, Any],
    *,
    runs: int = 10,
    warmup: int = 2,
) -> Measurement:
    """Times `engine.generate` on a prompt, or on a batch of prompts, in this process.

    engine: an InferenceEngine or a vanilla Hugging Face model.
    generation_args: arguments of `generate`, such as `{"do_sample": False, "min_length": 128, "max_new_tokens": 128}`.

    Both kinds of engine run on as many threads as an InferenceEngine takes (`team_size`). The read bandwidth is probed
    before and after each run. `str()` of the record is the articles' sentence. To compare
    two sides, use `compare`, which lets them take turns.

    ValueError: an empty prompt, prompts of unequal length without a pad token, beams (they have no time per token),
    fewer than two new tokens, or counts below their minimum.
    """
    check_numbers(runs=runs, warmup=warmup)
    if generation_args.get("num_beams", 1) != 1:
        raise UserError(
            f"got num_beams={generation_args['num_beams']}, expected 1: beams are not final until the end, so there "
            "is no time per token; time engine.generate as a whole"
        )
    inputs: dict[str, Any] = {name: ids.to(engine.device) for name, ids in _encode(tokenizer, prompt).items()}
    threads = team_size()
    environment = read_environment(threads)
    timed = []
    run = partial(timed_generate, engine, **inputs, **generation_args)
    probe = partial(probe_bandwidth, threads, engine.device)
    with torch_threads(threads):
        for _ in range(warmup):
            engine.generate(**inputs, **generation_args)
        for index in range(runs):
            turn = probed(run, probe)
            times, sequences = turn.result
            timed.append(Run.of(times, round=index, before=turn.before, after=turn.after))
    config, options = _model_config(engine), getattr(engine, "options", None)
    kv_dtype = options.kv_dtype if options else None
    weights = stored_by(engine) if isinstance(engine, InferenceEngine) else engine.dtype
    prompt_tokens, new_tokens = inputs["input_ids"].shape[1], 1 + len(timed[-1].decode_ms)
    return Measurement(
        name=type(engine).__name__,
        impl=engine.kernels if isinstance(engine, InferenceEngine) else "vanilla",
        case=Case(
            model=engine.config.name_or_path or type(engine).__name__,
            origin="a model in this process",
            dtype=str(engine.dtype).removeprefix("torch."),
            batch=len(sequences),
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            threads=threads,
        ),
        environment=environment,
        work=count_work(config, weights, len(sequences), prompt_tokens, new_tokens, kv_dtype) if config else None,
        weights=name_of(weights),
        runs=tuple(timed),
    )


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[str]) -> dict[str, torch.Tensor]:
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    lengths = [len(tokenizer(text)["input_ids"]) for text in prompts]
    if not lengths or min(lengths) == 0:
        raise UserError(f"got an empty prompt ({prompt!r}), expected text of at least one token")
    unequal = len(set(lengths)) > 1
    if unequal and tokenizer.pad_token is None:
        raise UserError(
            f"got prompts of {min(lengths)} to {max(lengths)} tokens and a tokenizer without a pad token; "
            "set tokenizer.pad_token (often to tokenizer.eos_token), or pass prompts of equal length"
        )
    encoded = tokenizer(prompts, return_tensors="pt", padding=unequal)
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _model_config(engine: Any) -> ModelConfig | None:
    if hasattr(engine, "model_config"):
        return engine.model_config
    try:
        return model_config_of(engine.config)
    except ValueError:
        return None
