"""What the cases of the ops count is what the harness counts for a model of the same shape."""

import pytest
import torch

from labkit.harness.regions.layer_stack import region_bytes, region_flops
from labkit.kernels.mlp_gemm.cases import CASES as MLP_CASES
from labkit.kernels.mlp_gemm.cases import MlpCase
from labkit.kernels.qkv_gemm.cases import CASES as QKV_CASES
from labkit.kernels.qkv_gemm.cases import QkvCase
from labkit.models.policies import model_config_of
from labkit.models.presets import PRESETS
from labkit.stages import Stage

BATCH, CONTEXT = 3, 128
KINDS: dict[Stage, dict[str, QkvCase | MlpCase]] = {
    Stage.QKV: {case.name: case for case in QKV_CASES},
    Stage.MLP: {case.name: case for case in MLP_CASES},
}


@pytest.mark.parametrize("region", KINDS)
@pytest.mark.parametrize("name", ["gpt2", "bloom-7b1", "llama-2-7b"])
def test_bytes_and_flops_are_those_of_the_region(name: str, region: Stage) -> None:
    config = model_config_of(PRESETS[name].hf_config)
    case = KINDS[region][name]
    assert case.flops(BATCH) == region_flops(config, region, BATCH, CONTEXT)
    for dtype in (torch.float32, torch.float16, torch.int8):
        assert case.bytes(dtype) == region_bytes(config, region, dtype, BATCH, CONTEXT)
