"""Kernels that exchange data between devices, by their names."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.arrays import matching

# Libraries of collectives, and kernels of vLLM, TensorRT-LLM, FlashInfer and PyTorch that replace these libraries.
COMMUNICATES = re.compile(
    r"nccl|rccl|nvshmem|cross_device_reduce|multimem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all",
    re.IGNORECASE,
)


def communicates(operations: pd.DataFrame) -> NDArray[np.bool_]:
    """Whether each operation is a kernel that exchanges data between devices."""
    return matching(operations["name"], COMMUNICATES) & (operations["kind"] == "kernel").to_numpy()
