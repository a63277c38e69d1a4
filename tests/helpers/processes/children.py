"""Child processes of a process, found by a word of their command line."""

import psutil


def children_that_run(word: str, *, below: int | None = None) -> list[psutil.Process]:
    """Children of process `below`, by default of this one, whose command line contains `word`."""
    children = psutil.Process(below).children(recursive=True)
    return [child for child in children if any(word in argument for argument in _command_line(child))]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return []
