"""ONNX Runtime, with the graph of the model that torch exports."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from labkit.harness.compare.loaded_side import LoadedSide
from labkit.harness.compare.loader import Room
from labkit.harness.compare.peers.exported import exported_step
from labkit.harness.compare.peers.greedy import GreedySteps
from labkit.harness.compare.peers.peer import Peer
from labkit.harness.compare.sides import side_row
from labkit.weights.source import ModelSource

ONNXRUNTIME = "onnxruntime"
FILE = "model.onnx"
OPSET = 23  # the first opset with an operator for attention
GROUP = 32
CPU_ONLY = ("CPUExecutionProvider",)
TOKENS, LOGITS = "tokens", "logits"


class OnnxRuntime(Peer):
    """ONNX Runtime. The graph computes in float32; int8 weights are multiplied with rows rounded to int8 on the fly."""

    name = ONNXRUNTIME
    package = "onnxruntime"
    requirements = (
        *("onnxruntime==1.32.0", "flatbuffers==25.12.19", "protobuf==7.36.2"),
        *("onnx==1.23.2", "onnx-ir==1.1.0", "onnxscript==0.7.2", "ml-dtypes==0.6.0"),
    )
    dtypes = ("float32",)

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        """Exports the graph with torch; ONNX Runtime's own tools quantise the weights to int8."""
        api = self.import_package()
        program, past = exported_step(source, dtype, rows=False)
        inputs, outputs = [TOKENS, *cache_names("past", len(past))], [LOGITS, *cache_names("present", len(past))]
        with TemporaryDirectory(dir=folder) as temporary:
            plain = Path(temporary, FILE) if side_row(side).own_type else folder / FILE
            written = torch.onnx.export(
                program, input_names=inputs, output_names=outputs, opset_version=OPSET, dynamo=True, verbose=False
            )
            assert written is not None
            written.save(plain, external_data=True)
            if side_row(side).own_type:
                del program, written
                _quantise(api, plain, folder / FILE)

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> LoadedSide:
        api = self.import_package()
        options = api.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = room.threads, 1
        session = api.InferenceSession(str(folder / FILE), options, providers=CPU_ONLY)
        model = OnnxModel(api, session, source.hf_config)
        impl = f"onnxruntime {api.__version__}, float32 KV cache"
        if side_row(side).own_type:
            return LoadedSide(side, f"{impl}, int8 in groups of {GROUP}", torch.int8, model, source.tokenizer)
        return LoadedSide(side, impl, dtype, model, source.tokenizer)


class OnnxModel(GreedySteps):
    """One run of the session for each step. The next run takes over the returned KV cache without a copy."""

    def __init__(self, api: Any, session: Any, config: PretrainedConfig) -> None:
        super().__init__(config)
        self._api, self._session, self._run = api, session, session.io_binding()
        self._inputs = [port.name for port in session.get_inputs() if port.name != TOKENS]
        self._shapes = {port.name: port.shape for port in session.get_inputs()}
        self._outputs = [port.name for port in session.get_outputs()]
        self._cache: list[Any] = []

    def forget(self) -> None:
        self._cache = []

    def logits(self, unread: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        run = self._run
        run.bind_cpu_input(TOKENS, np.ascontiguousarray(unread))
        for name, value in zip(self._inputs, self._cache or self._empty(len(unread)), strict=True):
            run.bind_ortvalue_input(name, value)
        for name in self._outputs:
            run.bind_output(name)
        self._session.run_with_iobinding(run)
        logits, *self._cache = run.get_outputs()
        array: np.ndarray[Any, Any] = logits.numpy()
        return array

    def _empty(self, sequences: int) -> list[Any]:
        make = self._api.OrtValue.ortvalue_from_numpy
        sizes = [self._shapes[name] for name in self._inputs]
        return [make(np.zeros((sequences, heads, 0, size), np.float32)) for _, heads, _, size in sizes]


def cache_names(prefix: str, count: int) -> list[str]:
    """Names of the graph's keys and values, which alternate."""
    return [f"{prefix}.{index}" for index in range(count)]


def _quantise(api: Any, plain: Path, target: Path) -> None:
    """Writes a model with int8 weights. Constants are folded first, because only matrices that are stored as they are
    used can be quantised.
    """
    import onnx  # type: ignore[import-not-found]
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer  # type: ignore[import-not-found]

    folded = plain.with_name("folded.onnx")
    options = api.SessionOptions()
    options.graph_optimization_level = api.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folded)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "folded.bin")
    api.InferenceSession(str(plain), options, providers=CPU_ONLY)
    quantiser = MatMulNBitsQuantizer(onnx.load(folded), bits=8, block_size=GROUP, is_symmetric=True, accuracy_level=4)
    quantiser.process()
    quantiser.model.save_model_to_file(str(target), use_external_data_format=True)
