"""Peak rates of GPUs as their makers publish them: dense rates, without sparsity.

The sources are the data sheets and white papers of NVIDIA and AMD. Rates of consumer GPUs are for sums in 32 bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """Peak TFLOP/s by type, and the memory's TB/s. 0: the matrix units do not multiply this type."""

    half: float  # float16 and bfloat16
    tf32: float
    eight: float  # 8-bit floats
    float32: float  # of the vector units
    float64: float
    tb_s: float

    def tflop_s(self, element_bytes: int, tf32: bool) -> float:
        """TFLOP/s for numbers of `element_bytes`. `tf32`: the matrix units take float32 with a mantissa of 10 bits."""
        if element_bytes == 4 and tf32 and self.tf32:
            return self.tf32
        return {1: self.eight, 2: self.half, 4: self.float32, 8: self.float64}.get(element_bytes, 0.0)


PEAKS = (  # the first pattern found in a device's name counts
    (r"B200", Peak(2250, 1125, 4500, 75, 37, 8.0)),
    (r"GH200", Peak(989.4, 494.7, 1978.9, 66.9, 66.9, 4.0)),
    (r"H200", Peak(989.4, 494.7, 1978.9, 66.9, 66.9, 4.8)),
    (r"H100 PCIe", Peak(756, 378, 1513, 51.2, 51.2, 2.0)),
    (r"H100 NVL", Peak(835, 417, 1671, 60, 60, 3.9)),
    (r"H100", Peak(989.4, 494.7, 1978.9, 66.9, 66.9, 3.35)),
    (r"A100.*80GB", Peak(312, 156, 0, 19.5, 19.5, 2.039)),
    (r"A100", Peak(312, 156, 0, 19.5, 19.5, 1.555)),
    (r"A10\b", Peak(125, 62.5, 0, 31.2, 0.976, 0.6)),
    (r"L40S", Peak(362, 183, 733, 91.6, 1.43, 0.864)),
    (r"L4\b", Peak(121, 60, 242, 30.3, 0.473, 0.3)),
    (r"V100", Peak(125, 0, 0, 15.7, 7.8, 0.9)),
    (r"T4\b", Peak(65, 0, 0, 8.1, 0.253, 0.32)),
    (r"RTX 4090", Peak(165.2, 82.6, 330.3, 82.6, 1.29, 1.008)),
    (r"RTX 3090", Peak(71, 35.6, 0, 35.6, 0.556, 0.936)),
    (r"RTX 3080", Peak(59.5, 29.8, 0, 29.8, 0.465, 0.76)),
    (r"MI325X", Peak(1307.4, 653.7, 2614.9, 163.4, 163.4, 6.0)),
    (r"MI300X", Peak(1307.4, 653.7, 2614.9, 163.4, 163.4, 5.3)),
    (r"MI250X", Peak(191.5, 0, 0, 47.9, 47.9, 1.6)),  # of one of its two dies, each of which is a device
    (r"MI210", Peak(181, 0, 0, 45.3, 45.3, 1.6)),
)


def peak_of(name: str) -> Peak | None:
    """The peak of the device with this name; None for an unknown device."""
    return next((peak for pattern, peak in PEAKS if re.search(pattern, name)), None)
