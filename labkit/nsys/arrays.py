"""The arrays that a trace and what is made of it consist of."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]  # times in nanoseconds, rows of frames, numbers of threads
Floats = NDArray[np.float64]
