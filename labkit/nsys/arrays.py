"""The types of the arrays in traces and in their analysis, and a search in columns of texts."""

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Ints = NDArray[np.int64]  # times in nanoseconds, rows of frames, numbers of threads
Floats = NDArray[np.float64]


def matching(texts: pd.Series, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Whether the text of each row matches anywhere. A column of categories is searched once for each text."""
    return np.array([bool(pattern.search(str(text))) for text in texts.cat.categories], bool)[texts.cat.codes]
