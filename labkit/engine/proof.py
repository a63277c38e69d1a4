"""Rows that are derived from a class, and the proof that the kernels compute the same as the class.

The proof runs small random models of the same class and switches: short, long and padded prompts, steps with a cache,
and a text that outgrows the short texts of a long rope. Weights make epsilons, caps and clamps show. One of the models
has as many layers as the large model. The result is kept in labkit's cache.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from labkit.engine.alterations import refuse_alterations
from labkit.models.derived.recognise import ModelRoles
from labkit.models.derived.row import DerivedRow, derived_policy
from labkit.models.derived.small_config import SHORT_POSITIONS, small_config
from labkit.models.derived.small_models import causal_class, errors_of_the_class, randomised
from labkit.models.observed.calls import distance
from labkit.models.policy import Policy
from labkit.statistics.kept_records import KeptRecord, kept_file, read_kept, write_kept
from labkit.system.errors import UserError

KEPT, NAME = "proofs.json", "proofs"
EDITION = 5  # of what is read and proved; a kept proof of another edition does not count
FAR = 2e-3  # largest distance between logits; another epsilon, scale, window or clamp moves them much further
SHORT, LONG, CACHED = 5, 200, 40  # tokens
NEW = SHORT_POSITIONS + 2 - CACHED  # tokens of a generation, the last of which reads a text longer than SHORT_POSITIONS
EMBEDDINGS = (1.0, 0.01, 30.0)  # scales of the embedding's rows: epsilons show in small rows, caps and clamps in large

Build = Callable[[PreTrainedModel, Policy], Any]  # a model and its row -> its engine


class KeptProof(KeptRecord):
    """Whether the kernels compute what a class with some switches does."""

    key: str
    refusal: str  # empty: they do
    roles: ModelRoles | None = None  # of a class that has a row


@dataclass(frozen=True)
class Derivation:
    """A derived row, or the reason why a class has none."""

    policy: Policy | None
    refusal: str = ""


def derive(model: PreTrainedModel | PretrainedConfig, build: Build, folder: Path | None = None) -> Derivation:
    """The proved row of a model in memory, or of the model of a config. build: makes an engine of a model with a row.
    folder: of kept proofs; by default labkit's cache.
    """
    try:
        config = model.config if isinstance(model, PreTrainedModel) else model
        key = _key(model)
        kept = next((proof for proof in _kept(folder) if proof.key == key), None)
        if kept is not None and kept.refusal:
            return Derivation(None, kept.refusal)
        row: DerivedRow | None = None
        if isinstance(model, PreTrainedModel):
            row = DerivedRow(config, type(model), None if kept is None else kept.roles)
            policy = _row_of(model, row)
        else:
            policy = derived_policy(config)
        if kept is not None:
            return Derivation(policy)
        row = row or DerivedRow(config)
        with errors_of_the_class():
            refusal = refusal_of(row, build)
    except UserError as error:  # another computation than a row can say, or a model that was changed
        return Derivation(None, str(error))
    _keep(KeptProof(key=key, refusal=refusal, roles=None if refusal else row.roles), folder)
    return Derivation(None if refusal else policy, refusal)


def _row_of(model: PreTrainedModel, row: DerivedRow) -> Policy:
    """The row of a model in memory. Raises UserError for a model that was changed."""
    with errors_of_the_class():
        policy = row.policy_for(model)
        refuse_alterations(model, policy, policy.model_config(model.config))
    return policy


def _key(model: PreTrainedModel | PretrainedConfig) -> str:
    """Digest of the edition, the version of transformers, the class, and its small config with all layers."""
    config = model.config if isinstance(model, PreTrainedModel) else model
    with errors_of_the_class():
        kind = type(model) if isinstance(model, PreTrainedModel) else causal_class(config)
        switches = json.dumps(small_config(config, every_layer=True).to_dict(), sort_keys=True, default=str)
    text = f"{EDITION} {transformers.__version__} {kind.__name__} {type(config).__name__} {switches}"
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _kept(folder: Path | None) -> list[KeptProof]:
    return read_kept(kept_file(KEPT, folder), NAME, KeptProof)


def _keep(proof: KeptProof, folder: Path | None) -> None:
    if (file := kept_file(KEPT, folder)) is not None:
        with suppress(OSError, UserError):
            write_kept(file, NAME, proof, replaces=lambda other: other.key == proof.key)


def refusal_of(row: DerivedRow, build: Build) -> str:
    """Why the kernels do not compute what small models of the class do; empty: they do."""
    models = ((row.small, EMBEDDINGS), (row.with_every_layer(), EMBEDDINGS[:1]), (row.with_other_choices(), (1.0,)))
    for model, scales in models:
        if model is None:
            continue
        policy = row.policy_for(model)
        for scale in scales:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                randomised(model, scale)
            engine = build(model, policy)
            for what, ours, expected in _logits(engine, model):
                if (far := distance(ours, expected)) > FAR:
                    return f"logits of {what} differ by {far:.1%} from transformers' own"
    return ""


@torch.no_grad()
def _logits(engine: Any, model: PreTrainedModel) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Logits of the engine and of the model for the same tokens, and what they are of."""
    most, vocab = engine.model_config.max_positions or LONG, model.config.get_text_config().vocab_size
    ids = torch.randint(3, vocab, (2, min(LONG, most)), generator=torch.Generator().manual_seed(2))
    for what, tokens in (("a short prompt", ids[:1, :SHORT]), ("a long prompt", ids)):
        yield what, engine(tokens).logits, model(tokens).logits
    mask = torch.ones(2, CACHED, dtype=torch.long)
    mask[0, :7] = 0
    padded = ids[:, :CACHED]
    ours, theirs = engine(padded, attention_mask=mask).logits, model(padded, attention_mask=mask).logits
    yield "a padded prompt", ours[mask.bool()], theirs[mask.bool()]
    yield "a padded generation", *_generated(engine, model, padded, mask)
    has_cache = "past_key_values" in inspect.signature(type(model).forward).parameters
    ours, theirs = engine.new_cache(), DynamicCache(config=model.config)
    for begin, end in ((0, CACHED), *((at, at + 1) for at in range(CACHED, SHORT_POSITIONS))):
        step = ids[:, begin:end]
        expected = model(step, past_key_values=theirs) if has_cache else model(ids[:, :end])
        yield "a step with a cache", engine(step, past_key_values=ours).logits, expected.logits[:, begin - end :]


def _generated(engine: Any, model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the first greedy steps of the engine and of the model, as long as both chose the same tokens."""
    settings = {"do_sample": False, "num_beams": 1, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    both = [
        side.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **settings)
        for side in (engine, model)
    ]
    ours, theirs = (generated.sequences[:, ids.shape[1] :] for generated in both)
    steps = 1 + int((ours == theirs).all(0).cumprod(0)[:-1].sum())
    logits = [torch.stack(generated.logits[:steps]) for generated in both]
    return logits[0], logits[1]
