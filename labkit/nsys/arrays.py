"""The types of the arrays in traces and in their analysis."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]  # times in nanoseconds, rows of frames, numbers of threads
Floats = NDArray[np.float64]
