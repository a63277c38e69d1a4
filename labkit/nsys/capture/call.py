"""Runs one pickled call, `-m labkit.nsys.capture.call FILE`: how a function of a notebook gets a process of its own."""

import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    pickle.loads(Path(sys.argv[1]).read_bytes())()
