"""GGUF files with experts in MXFP4, as GPT-OSS is published."""

from pathlib import Path

import gguf
import pytest
import torch
from helpers.models.gguf_files import gguf_model, logits_of, write_gguf

from labkit.engine import init_inference
from labkit.kernels.gemm import unpack_rows
from labkit.kernels.types import Linear
from labkit.system.errors import UserError
from labkit.weights.resolve import resolve

TOKENS = torch.arange(1, 21)[None]
pytestmark = pytest.mark.usefixtures("one_thread")


def floats(matrix: Linear) -> torch.Tensor:
    return unpack_rows(matrix, torch.arange(matrix.outputs))


def test_experts_in_mxfp4_stay_exact(tmp_path: Path) -> None:
    """As codes of 8 bits. The rest of the layer is in floats, as in the published files of GPT-OSS."""
    model = gguf_model("gpt-oss")
    model.config.num_experts_per_tok = 6
    kinds = {f"blk.{layer}.ffn_{part}_exps.weight": "MXFP4" for layer in range(2) for part in ("gate", "up", "down")}
    source = resolve(write_gguf(tmp_path / "model.gguf", model, kinds=kinds))
    exact = init_inference(source, dtype=torch.float32).weights
    engine = init_inference(source)
    for layer, expected_layer in zip(engine.weights.layers, exact.layers, strict=True):
        for role in ("ff1.weight", "ff2.weight"):
            matrix = layer.matrices[role]
            assert (matrix.bits, matrix.group) == (8, 32)
            assert torch.equal(floats(matrix), floats(expected_layer.matrices[role])), role
    logits, expected = logits_of(engine, TOKENS), logits_of(source.hf_model(torch.float32), TOKENS)
    assert float((logits - expected).norm() / expected.norm()) < 0.1  # the other matrices are rounded to bfloat16


@pytest.mark.parametrize("exponent", [100, 150, 255])
def test_scales_of_mxfp4_that_float16_lacks_are_refused(exponent: int, tmp_path: Path) -> None:
    kinds = {"blk.1.ffn_down_exps.weight": "MXFP4"}
    file = write_gguf(tmp_path / "model.gguf", gguf_model("gpt-oss"), kinds=kinds)
    tensor = next(part for part in gguf.GGUFReader(file, "r+").tensors if part.name in kinds)
    tensor.data[..., 17] = exponent  # of the second block
    with pytest.raises(
        UserError, match=r"mlp\.experts\.down_proj\.weight has scales from 2\^.*; use dtype=torch.bfloat16"
    ):
        init_inference(resolve(file))
