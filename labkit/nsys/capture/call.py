"""Runs one pickled call, `-m labkit.nsys.capture.call FILE`, so that a function of a notebook can be profiled."""

import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    pickle.loads(Path(sys.argv[1]).read_bytes())()
