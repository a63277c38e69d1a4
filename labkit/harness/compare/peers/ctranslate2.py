"""CTranslate2, with a model that its own converter writes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig
from transformers.generation import BaseStreamer

from labkit.harness.compare.loaded_side import LoadedSide
from labkit.harness.compare.loader import Room
from labkit.harness.compare.peers.peer import Peer
from labkit.harness.compare.sides import side_row
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.weights.source import ModelSource

CTRANSLATE2 = "ctranslate2"
FILES = "model"


class CTranslate2(Peer):
    """CTranslate2 has a generation loop of its own, which reports each token immediately."""

    name = CTRANSLATE2
    package = "ctranslate2"
    requirements = ("ctranslate2==4.8.5", "pyyaml==6.0.3")
    dtypes = ("float32",)  # on CPUs it converts weights of other floating types to this one

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        """Writes the model with CTranslate2's converter, which gets the model in memory. Tokens are compared by ids, so
        the vocabulary consists of ids.
        """
        self.import_package()
        from ctranslate2.converters import TransformersConverter  # type: ignore[import-not-found]

        vocabulary = {str(token): token for token in range(source.hf_config.vocab_size)}
        tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, bos_token="0", eos_token="0", unk_token="0")
        with TemporaryDirectory(dir=folder) as description:
            source.hf_config.save_pretrained(description)
            converter = TransformersConverter(description)
            converter.load_model = lambda *_, **__: source.hf_model(FLOAT_DTYPES[dtype]).float()
            converter.load_tokenizer = lambda *_, **__: tokenizer
            converter.convert(str(folder / FILES), quantization=self._computes(side))

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> LoadedSide:
        api, computes = self.import_package(), self._computes(side)
        generator = api.Generator(
            str(folder / FILES), compute_type=computes, inter_threads=1, intra_threads=room.threads
        )
        weights = torch.int8 if side_row(side).own_type else dtype
        model = CTranslate2Model(generator, source.hf_config)
        return LoadedSide(side, f"ctranslate2 {api.__version__}, {computes}", weights, model, source.tokenizer)

    def _computes(self, side: str) -> str:
        return "int8_float32" if side_row(side).own_type else "float32"


class CTranslate2Model:
    """Greedy generation of several sequences of one length."""

    def __init__(self, generator: Any, config: PretrainedConfig) -> None:
        self._generator, self.config = generator, config

    def generate(
        self, input_ids: torch.Tensor, *, streamer: BaseStreamer, max_new_tokens: int, **greedy: Any
    ) -> torch.Tensor:
        """Generates `max_new_tokens` greedy tokens; the streamer gets the tokens of each step immediately."""
        steps = np.empty((max_new_tokens, len(input_ids)), np.int64)  # filled from a thread of the generator
        received = 0

        def receive(token: Any) -> bool:
            nonlocal received
            steps[token.step, token.batch_id] = token.token_id
            received += 1
            if received % len(input_ids) == 0:
                streamer.put(torch.from_numpy(steps[token.step]))
            return False

        streamer.put(input_ids)
        self._generator.generate_batch(
            [[str(token) for token in sequence] for sequence in input_ids.tolist()],
            max_length=max_new_tokens,
            end_token=[self.config.vocab_size],  # no such token exists, so an end of text does not end the generation
            include_prompt_in_result=False,  # so the prompt is read in one step
            callback=receive,
        )
        streamer.end()
        return torch.cat([input_ids, torch.from_numpy(steps.T)], dim=1)
