"""Writes an engine's weights: a file for each rank, and the manifest once all files are complete."""

from __future__ import annotations

import copy
import shutil
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig

from labkit.kernels.types import Linear, float_dtype
from labkit.system.collective import Gather, results_of_ranks
from labkit.system.errors import RunError, UserError
from labkit.system.whole_file import remove_unfinished, whole_file, write_whole
from labkit.weights.canonical import Canonical, Weight
from labkit.weights.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    FileRecord,
    LayerExtent,
    Manifest,
    MatrixRecord,
    described_model,
)
from labkit.weights.checkpoint.shard_file import key_of, scales_of
from labkit.weights.checkpoint.stored_experts import expert_digests
from labkit.weights.checkpoint.tensor_writer import Extent, TensorWriter
from labkit.weights.source import GENERATION, TOKENIZER_FILES, TOKENIZER_SETTINGS, weight_files
from labkit.weights.spec import WeightSpec

TEXT_FILES = (GENERATION, *TOKENIZER_FILES, *TOKENIZER_SETTINGS, "merges.txt", "chat_template.jinja")
SUFFIX = ".safetensors"
NOT_SAVED = "the checkpoint was not saved"


class Saving:
    """A save in progress: `keep` writes weights while they are built, `finish` completes the files. All ranks do so
    together, within the context of their saves.

    Rank 0 writes the manifest last; a folder without it is no checkpoint. The next save replaces the files of an
    interrupted save. Weights may be freed after `keep`.
    """

    def __init__(self, folder: Path, spec: WeightSpec, hf_config: PretrainedConfig, gather: Gather, name: str) -> None:
        self.folder, self.spec, self.hf_config, self.gather, self.name = folder, spec, hf_config, gather, name
        part = spec.part
        self._file = f"rank-{part.rank:02d}-of-{part.size:02d}{SUFFIX}"
        tensors = len(part.top_shapes) + len(part.layers) * len(part.layer_shapes)
        self._writer = TensorWriter(folder / self._file, 2 * tensors)  # a matrix may have scales
        self._matrices: dict[str, MatrixRecord] = {}
        self._layers: dict[int, Extent] = {}
        self._experts: dict[int, list[str]] = {}  # digests, by layer
        self._failure: OSError | None = None

    @classmethod
    def begin(cls, folder: Path, spec: WeightSpec, hf_config: PretrainedConfig, gather: Gather) -> Saving:
        """Raises UserError on all ranks if the folder already holds a checkpoint, because two checkpoints' files would
        mix.
        """

        def free() -> str:
            folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(folder, SUFFIX)
            if (folder / MANIFEST).exists() or weight_files(folder):
                raise UserError(
                    f"save_mp_checkpoint_path={str(folder)!r} holds a checkpoint already; "
                    "remove it, or name another folder"
                )
            return uuid.uuid4().hex

        return cls(folder, spec, hf_config, gather, results_of_ranks(free, gather, NOT_SAVED)[0])

    def __enter__(self) -> Self:
        results_of_ranks(self._open, self.gather, NOT_SAVED)
        return self

    def _open(self) -> None:
        self._writer.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)

    def keep(self, index: int | None, weights: Canonical) -> None:
        """Writes the weights of layer `index`, or with None the weights outside the layers: matrices packed, others as
        float32.

        Raises RunError if writing fails. With several ranks `finish` raises it, so that the other ranks do not wait.
        """
        if self._failure is not None:
            return
        try:
            if index is not None:
                self._writer.begin_block()
            for name, weight in sorted(weights.items(), key=lambda item: not isinstance(item[1], Linear)):
                self._write(name, key_of(name, index), weight)
            if index is not None:
                self._layers[index] = self._writer.end_block()
                has_experts = self.spec.config.has_experts(index)
                self._experts[index] = expert_digests(weights, len(self.spec.part.experts)) if has_experts else []
        except OSError as error:
            self._failure = error
            if self.spec.part.size == 1:
                raise RunError(f"{NOT_SAVED}: {error}") from error

    def _write(self, name: str, key: str, weight: Weight) -> None:
        if isinstance(weight, Linear):
            self._writer.add(key, weight.weight)
            self._matrices[key] = self._record(name, weight)
            if weight.scales is not None:
                self._writer.add(scales_of(key), weight.scales)
        elif isinstance(weight, Tensor):
            self._writer.add(key, weight.to("cpu", torch.float32).contiguous())

    def _record(self, name: str, linear: Linear) -> MatrixRecord:
        row_group = linear.group
        quant, config = self.spec.stored_quant, self.spec.config
        scheme = quant.of(name) if quant and linear.scales is not None else None
        if scheme is not None:
            row_group = scheme.group(*(config.layer_shapes() | config.top_shapes())[name])
        return MatrixRecord(
            outputs=linear.outputs,
            inputs=linear.inputs,
            layout=linear.layout,
            group=linear.group,
            row_group=row_group,
            bits=linear.bits,
        )

    def finish(self, generation: GenerationConfig | None, source: Path | None) -> None:
        """Completes this rank's file. Once all ranks have done so, writes the config, the tokenizer and the manifest.

        `source`: the folder of the tokenizer's files. Raises RunError on all ranks if one of them could not write.
        """
        files = results_of_ranks(self._end, self.gather, NOT_SAVED)

        def describe() -> None:
            if self.spec.part.rank == 0:
                self._describe(files, generation, source)

        results_of_ranks(describe, self.gather, NOT_SAVED)

    def _end(self) -> FileRecord:
        """Completes this rank's file under its final name, and returns its record."""
        if self._failure is not None:
            raise self._failure
        size = self._writer.finish({"save": self.name, "format": "labkit"})
        self._writer.__exit__(None, None, None)
        layers = [
            LayerExtent(layer=index, **extent._asdict(), experts=self._experts[index])
            for index, extent in self._layers.items()
        ]
        return FileRecord(
            name=self._file, bytes=size, digests=self._writer.digests, matrices=self._matrices, layers=layers
        )

    def _describe(self, files: list[FileRecord], generation: GenerationConfig | None, source: Path | None) -> None:
        spec, hf_config = self.spec, copy.deepcopy(self.hf_config)
        hf_config.architectures, hf_config.dtype = [spec.config.architecture], float_dtype(spec.dtype)
        write_whole(self.folder / "config.json", hf_config.to_json_string())
        for name in TEXT_FILES:
            if source and (source / name).is_file():
                with whole_file(self.folder / name) as path:
                    shutil.copyfile(source / name, path)
        if generation is not None:
            write_whole(self.folder / GENERATION, generation.to_json_string())
        manifest = Manifest(
            format=FORMAT,
            save=self.name,
            architecture=spec.config.architecture,
            model=described_model(spec.config),
            dtype=str(spec.dtype).removeprefix("torch."),
            tp_size=spec.part.size,
            ep_size=spec.part.ep_size,
            layout=spec.layout,
            quant=spec.stored_quant,
            files=files,
        )
        write_whole(self.folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
