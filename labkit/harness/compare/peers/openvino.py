"""OpenVINO, with a graph of the model that keeps its KV cache itself."""

from __future__ import annotations

from pathlib import Path
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
from labkit.system.errors import UserError
from labkit.weights.source import ModelSource

OPENVINO = "openvino"
FILE = "model.xml"
PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
COMPUTE, CACHE = "INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"
TOKENS, ROWS, LOGITS = "tokens", "rows", "logits"


class OpenVino(Peer):
    """OpenVINO. The graph has weights in float32 or int8, and computes in the requested precision."""

    name = OPENVINO
    package = "openvino"
    requirements = (
        *("openvino==2026.4.1", "openvino-telemetry==2025.2.0"),
        *("nncf==3.4.0", "joblib==1.6.0", "natsort==8.4.0", "ninja==1.13.2", "pydot==4.0.1", "pyparsing==3.3.3"),
        *("scikit-learn==1.9.1", "tabulate==0.10.0", "threadpoolctl==3.8.0"),
    )
    dtypes = ("float32", "bfloat16")

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        """Writes the graph that torch exports, with its KV cache turned into state."""
        api = self.import_package()
        program, past = exported_step(source, dtype, rows=True)
        model = api.convert_model(program)
        _keep_cache(api, model, past)
        if side_row(side).own_type:
            import nncf  # type: ignore[import-not-found]

            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
        api.save_model(model, folder / FILE, compress_to_fp16=False)

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> LoadedSide:
        api, int8 = self.import_package(), side_row(side).own_type
        settings = {"INFERENCE_NUM_THREADS": room.threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
        precision = PRECISIONS.get(dtype, "f32")
        settings |= {COMPUTE: precision} | ({} if int8 else {CACHE: precision})
        compiled = api.Core().compile_model(folder / FILE, "CPU", settings)
        computes, cached = (compiled.get_property(name).to_string() for name in (COMPUTE, CACHE))
        if not int8 and computes != precision:
            raise UserError(
                f"got {precision} for {side}, expected {computes}: this processor computes in no other precision"
            )
        impl = f"openvino {api.__version__.partition('-')[0]}, computes in {computes}, {cached} KV cache"
        model = OpenVinoModel(compiled.create_infer_request(), source.hf_config)
        return LoadedSide(side, impl, torch.int8 if int8 else dtype, model, source.tokenizer)


class OpenVinoModel(GreedySteps):
    """One inference for each step."""

    def __init__(self, request: Any, config: PretrainedConfig) -> None:
        super().__init__(config)
        self._request = request

    def forget(self) -> None:
        self._request.reset_state()

    def logits(self, unread: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self._request.infer({TOKENS: unread, ROWS: np.arange(len(unread), dtype=np.int32)}, share_inputs=True)
        array: np.ndarray[Any, Any] = self._request.get_tensor(LOGITS).data
        return array


def _keep_cache(api: Any, model: Any, past: list[torch.Tensor]) -> None:
    """Turns the cache's inputs and outputs into state, which begins empty, with one sequence for each row."""
    from openvino import opset13 as ops  # type: ignore[import-not-found]
    from openvino._offline_transformations import apply_make_stateful_transformation  # type: ignore[import-not-found]

    before, after = ([f"{prefix}.{index}" for index in range(len(past))] for prefix in ("past", "present"))
    _, heads, _, size = past[0].shape
    shapes = {TOKENS: [-1, -1], ROWS: [-1]} | {name: [-1, heads, -1, size] for name in before}
    for port, name in zip(model.inputs, (TOKENS, *before, ROWS), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(api.PartialShape(shapes[name]))
    for port, name in zip(model.outputs, (LOGITS, *after), strict=True):
        port.get_tensor().set_names({name})
    model.validate_nodes_and_infer_types()
    rows = ops.shape_of(model.input(ROWS), output_type="i64")
    apply_make_stateful_transformation(model, dict(zip(before, after, strict=True)))
    empty = ops.broadcast(
        ops.constant(np.float32(0)), ops.concat([rows, ops.constant(np.array([heads, 0, size]))], axis=0)
    )
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([empty])
    model.validate_nodes_and_infer_types()
