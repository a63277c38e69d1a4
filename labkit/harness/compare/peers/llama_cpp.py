"""llama.cpp, compiled for this machine, with weights in files (GGUF) that its own converter writes.

LABKIT_LLAMA_CPP_PYTHON may name an interpreter that imports `llama_cpp`, and LABKIT_LLAMA_CPP_SOURCES the folder with
llama.cpp's `convert_hf_to_gguf.py`. They are then used instead of the installed peer.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from labkit.harness.compare.loaded_side import LoadedSide, comparison_device
from labkit.harness.compare.loader import Room
from labkit.harness.compare.peers.folder import installed, packages_in, sources_in
from labkit.harness.compare.peers.greedy import GreedySteps
from labkit.harness.compare.peers.peer import Peer
from labkit.harness.compare.peers.pip import Pip
from labkit.harness.compare.sides import side_row
from labkit.harness.stored_weights import StoredWeights
from labkit.kernels.build import BuildError, compiler
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.models.policies import policy_for
from labkit.system.errors import RunError, UserError
from labkit.system.home import expanded
from labkit.system.processor import cpu_flags
from labkit.weights.checkpoint.hf_folder import write_checkpoint
from labkit.weights.gguf.tensors import GgufTensors
from labkit.weights.source import ModelSource

LLAMA_CPP = "llama.cpp"
LLAMA_CPP_INT8 = "llama.cpp-q8_0"  # int8 weights in groups of 32
LLAMA_CPP_Q4_0 = "llama.cpp-q4_0"  # int4, with a scale for each group of 32
LLAMA_CPP_Q4_1 = "llama.cpp-q4_1"  # int4, with a scale and a minimum for each group of 32
LLAMA_CPP_GGUF = "llama.cpp-gguf"  # the model's own GGUF file
QUANTISED = {LLAMA_CPP_Q4_0: "Q4_0", LLAMA_CPP_Q4_1: "Q4_1"}
PYTHON, SOURCES = "LABKIT_LLAMA_CPP_PYTHON", "LABKIT_LLAMA_CPP_SOURCES"
CONVERTER = "convert_hf_to_gguf.py"
OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # names of types in the converter
INT8 = "q8_0"
# Types in which prompts are computed. Matrices of other types are multiplied with rows rounded to int8.
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
HEADS = ("output.weight", "token_embd.weight")  # the second name is that of a tied head
FILE, PLAIN, STORED = "model.gguf", "plain.gguf", "stored.json"
FIND = "import importlib.util as u; found = u.find_spec('llama_cpp'); print(found.origin if found else '')"
NATIVE = ("-DGGML_NATIVE=ON",)
# This version crashes with int8 weights on AMX, and uses AMX for no other type. These flags are native without AMX.
WITHOUT_AMX = (
    "-DGGML_NATIVE=OFF",
    *(f"-DGGML_{isa}=ON" for isa in ("AVX2", "FMA", "F16C", "BMI2")),
    *(f"-DGGML_AVX512{isa}=ON" for isa in ("", "_VBMI", "_VNNI", "_BF16")),
)
NO_IMAGES = "-DLLAVA_BUILD=OFF"  # vision models are a third of the compilation


class LlamaCpp(Peer):
    """llama.cpp, compiled from the sources in llama-cpp-python and called through its bindings."""

    name = LLAMA_CPP
    package = "llama_cpp"
    requirements = ("llama-cpp-python==0.3.36", "diskcache==5.6.3")
    most_sequences = 1

    def packages(self) -> Path | None:
        if python := os.environ.get(PYTHON):
            return _packages_of(python)
        return super().packages()

    def sources(self) -> Path | None:
        """The folder with the converter, if there is one."""
        if path := os.environ.get(SOURCES):
            return expanded(path)
        folder = installed(self.name)
        return None if folder is None else folder.sources

    def unavailable(self) -> str | None:
        python = os.environ.get(PYTHON)
        if python is None or comparison_device().type != "cpu":
            return super().unavailable() or self._no_converter()
        if self.packages() is None:
            return f"{python} does not import llama_cpp; set {PYTHON} to an interpreter that does"
        return self._no_converter()

    def _no_converter(self) -> str | None:
        sources = self.sources()
        if sources is not None and (sources / CONVERTER).is_file():
            return None
        problem = f"{SOURCES} is not set" if sources is None else f"{sources} holds no {CONVERTER}"
        return f"llama.cpp cannot convert a model: {problem}; set {SOURCES} to the folder with its {CONVERTER}"

    def check_model(self, side: str, source: ModelSource) -> None:
        if side == LLAMA_CPP_GGUF and source.gguf is None:
            raise UserError(
                f"got {source.name} for {side}, expected a GGUF file; use {LLAMA_CPP}, which exports a model"
            )
        if side == LLAMA_CPP_GGUF and isinstance(source.weights, GgufTensors) and len(source.weights.file.files) > 1:
            raise UserError(
                f"got the first of {len(source.weights.file.files)} parts for {side}, expected a whole file; join them "
                "with llama.cpp's llama-gguf-split --merge"
            )

    def install(self, pip: Pip, folder: Path) -> None:
        try:
            compiler()
        except BuildError as error:
            raise UserError(f"llama.cpp cannot be compiled: {str(error).partition(':')[0]}; install g++") from None
        binding, *dependencies = self.requirements
        source = pip.download_source(binding)
        flags = WITHOUT_AMX if "amx_tile" in cpu_flags() else NATIVE
        users_flags = os.environ.get("CMAKE_ARGS", "")
        pip.build(source, packages_in(folder), {"CMAKE_ARGS": " ".join((NO_IMAGES, *flags, users_flags))})
        pip.install(tuple(dependencies), packages_in(folder))
        vendored = source / "vendor" / "llama.cpp"
        sources_in(folder).mkdir()
        for part in (CONVERTER, "conversion", "gguf-py", "LICENSE"):
            (vendored / part).rename(sources_in(folder) / part)

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        """Writes a file with llama.cpp's own tools, or links the given file, and notes its stored types next to it."""
        sources = self.sources()
        assert sources is not None
        file = folder / FILE
        if side in QUANTISED:
            _export(source, dtype, folder / PLAIN, OUTTYPES[dtype], sources)
            quantise(self.import_package(), folder / PLAIN, file, QUANTISED[side])
            (folder / PLAIN).unlink()
        elif side == LLAMA_CPP_GGUF:
            assert source.gguf is not None
            file.symlink_to(source.gguf.resolve())
        else:
            _export(source, dtype, file, INT8 if side_row(side).own_type else OUTTYPES[dtype], sources)
            return
        sys.path.append(str(sources / "gguf-py"))
        (folder / STORED).write_text(stored_in(file, import_module("gguf")).model_dump_json())

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> LoadedSide:
        api = self.import_package()
        model = GgufModel(api, folder / FILE, source, threads=room.threads, positions=room.positions)
        impl = f"llama-cpp-python {api.__version__}, mapped weights, float16 KV cache"
        if side == LLAMA_CPP_INT8:
            return LoadedSide(side, f"{impl}, {INT8}", torch.int8, model, source.tokenizer)
        if side_row(side).own_type:
            weights = StoredWeights.model_validate_json((folder / STORED).read_text())
            return LoadedSide(side, f"{impl}, {weights}", weights, model, source.tokenizer)
        return LoadedSide(side, impl, dtype, model, source.tokenizer)


class GgufModel(GreedySteps):
    """Calls llama.cpp's C interface: `llama_decode` for each part of the prompt, and then for each token."""

    def __init__(self, api: Any, file: Path, source: ModelSource, *, threads: int, positions: int) -> None:
        super().__init__(source.hf_config)
        model = api.llama_model_load_from_file(str(file).encode(), api.llama_model_default_params())
        settings = api.llama_context_default_params()
        settings.n_ctx = positions
        settings.n_threads = settings.n_threads_batch = threads
        self._context = api.llama_init_from_model(model, settings)
        if not self._context:
            raise RunError(f"llama.cpp cannot load {file}")
        weakref.finalize(self, _free, api, model, self._context)
        tokens, expected = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)), self.config.vocab_size
        if tokens != expected:
            raise UserError(f"got {tokens} tokens in {file}, expected {expected}, the vocabulary of {source.name}")
        self._api = api

    def forget(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)

    def logits(self, unread: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        api, (tokens,) = self._api, unread
        at_once = api.llama_n_batch(self._context)  # tokens that a call takes at most
        for begin in range(0, len(tokens), at_once):
            part = tokens[begin : begin + at_once]
            ids = (api.llama_token * len(part))(*part)
            if status := api.llama_decode(self._context, api.llama_batch_get_one(ids, len(part))):
                raise RunError(f"llama_decode failed with status {status}")
        pointer = api.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, (1, self.config.vocab_size))


def quantise(api: Any, plain: Path, target: Path, kind: str) -> None:
    """Writes the model of `plain` with weights of the type `kind`, such as "Q4_0", as llama.cpp's `llama-quantize`
    does. It chooses another type for the LM head, and for matrices with rows that are no whole number of blocks.
    """
    settings = api.llama_model_quantize_default_params()
    settings.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if status := api.llama_model_quantize(str(plain).encode(), str(target).encode(), settings):
        raise RunError(f"llama.cpp cannot write {kind}: llama_model_quantize failed with status {status}")


def stored_in(file: Path, gguf: Any) -> StoredWeights:
    """Stored types of the matrices in a file. `gguf` is the package of this name."""
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    head = next(tensors[name] for name in HEADS if name in tensors)
    layers = [tensor for name, tensor in tensors.items() if name.startswith("blk.") and len(tensor.shape) > 1]
    name = _type_of(reader, gguf) or max(layers, key=lambda tensor: int(tensor.n_elements)).tensor_type.name
    return StoredWeights(
        name=name,
        bits=_bits(layers),
        head=head.tensor_type.name,
        head_bits=_bits([head]),
        computes=FLOATS.get(name, "int8"),
    )


def _free(api: Any, model: Any, context: Any) -> None:
    api.llama_free(context)
    api.llama_model_free(model)


def _export(source: ModelSource, dtype: str, file: Path, outtype: str, sources: Path) -> None:
    """Writes a file with llama.cpp's own converter, which is in `sources`, one tensor at a time. Tokens are compared by
    ids, so the file has the size of the vocabulary but no tokenizer. The converter knows only published tokenizers.
    """
    sys.path.insert(0, str(sources))
    with TemporaryDirectory(dir=file.parent) as checkpoint:
        config, architecture = copy.deepcopy(source.hf_config), policy_for(source.hf_config).architecture
        if architecture == "GPT2LMHeadModel":
            config.n_ctx = config.n_positions  # the converter reads the name of published configs
        write_checkpoint(replace(source, hf_config=config), FLOAT_DTYPES[dtype], Path(checkpoint))
        if not (counted := Path(checkpoint, "tokenizer.json")).exists():  # Gemma's converter counts the tokens
            vocabulary = {str(token): token for token in range(config.get_text_config().vocab_size)}
            counted.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
        from conversion import get_model_class  # type: ignore[import-not-found]
        from convert_hf_to_gguf import main  # type: ignore[import-not-found]

        get_model_class(architecture).set_vocab = _set_vocab_size
        sys.argv[1:] = [checkpoint, "--outtype", outtype, "--outfile", str(file)]
        main()


@cache
def _packages_of(python: str) -> Path | None:
    """The folder from which an interpreter imports `llama_cpp`."""
    try:
        process = subprocess.run([python, "-I", "-c", FIND], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    origin = process.stdout.strip()
    return Path(origin).parent.parent if origin else None


def _set_vocab_size(converter: Any) -> None:
    converter._set_vocab_none()
    converter.gguf_writer.add_vocab_size(converter.hparams["vocab_size"])


def _type_of(reader: Any, gguf: Any) -> str | None:
    """Type that the file names itself, such as "Q4_K_M"; None where it names none."""
    field = reader.fields.get("general.file_type")
    return None if field is None else gguf.LlamaFileType(field.contents()).name.partition("_")[2]


def _bits(tensors: list[Any]) -> float:
    return 8 * sum(int(tensor.n_bytes) for tensor in tensors) / sum(int(tensor.n_elements) for tensor in tensors)
