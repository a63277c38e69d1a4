"""Runs checkers on kernels, in the process of the submission. The judge says which, and what the result means."""

import importlib.util
import signal
import traceback
from pathlib import Path

import numpy as np

MOST_S = 1.0  # of one check
ENDLESS = f"it did not end within {MOST_S:.0f} s"


def softmax(x):
    exponentials = np.exp(x - x.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def plain(x, out):
    out[:] = softmax(x)


def in_double(x, out):
    out[:] = softmax(x.astype(np.float64))


def row_by_row(x, out):
    for row, result in zip(x, out, strict=True):
        most, total = -np.inf, 0.0
        for number in row.astype(np.float64):
            larger = max(most, number)
            total = total * np.exp(most - larger) + np.exp(number - larger)
            most = larger
        result[:] = np.exp(row.astype(np.float64) - most) / total


def backwards(x, out):
    out[::-1, ::-1] = softmax(x[::-1, ::-1])


def right_in(calls):
    """A kernel that is right in some of its calls, which are counted from 1."""
    made = 0

    def kernel(x, out):
        nonlocal made
        made += 1
        out[:] = softmax(x) if made in calls else 1 / x.shape[1]

    return kernel


def constant(x, out):
    out[:] = 1e-3


def unequal(x, out):
    out[:] = softmax(x) * (1 + 0.002 * np.sign(x))


def all_but_the_last(x, out):
    out[:-1] = softmax(x)[:-1]
    if len(x) == 1:
        out[:] = 0


def changes_its_input(x, out):
    x[1:] = x[:1]
    out[:] = softmax(x)


def destroys_its_input(x, out):
    out[:] = softmax(x)
    x[:] = 0


HONEST = (plain, in_double, row_by_row, backwards)
CHEATS = {
    1: (constant, unequal),
    2: (changes_its_input, destroys_its_input),
    3: (all_but_the_last,),
    4: (range(1, 10, 2), range(1, 6), (1, 10)),  # the calls in which a kernel is right
}


def run(judge):
    """Makes the checks that the judge names. Returns the error of a file that cannot be loaded."""
    folder, originals = judge.folders()
    files = {"original": Path(originals, "checkers.py"), "mended": Path(folder, "checkers.py")}
    try:
        modules = {name: loaded(name, path) for name, path in files.items()}
        cheats = loaded("cheats", Path(folder, "cheats.py"))
    except Exception as error:  # noqa: BLE001 - of a learner's file
        return described(error, folder)
    endless = set()
    signal.signal(signal.SIGALRM, out_of_time)
    while (task := judge.next()) is not None:
        which, number, kind, index, seed = task
        if (which, number, kind) in endless:
            judge.said(ENDLESS)
            continue
        try:
            checker = of_file(modules[which], "checkers.py", f"checker_{number}")
            if kind == "yours":
                kernel = of_file(cheats, "cheats.py", f"cheat_{number}")
            else:
                kernel = HONEST[index] if kind == "honest" else CHEATS[number][index]
                kernel = kernel if callable(kernel) else right_in(kernel)
            signal.setitimer(signal.ITIMER_REAL, MOST_S)
            said = bool(checker(kernel, np.random.default_rng(seed)))
        except OutOfTime:
            endless.add((which, number, kind))
            said = ENDLESS
        except Exception as error:  # noqa: BLE001 - of a learner's function
            said = described(error, folder)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        judge.said(said)
    return ""


class OutOfTime(BaseException):
    """A check takes too long. No `except Exception` of a learner catches it."""


def out_of_time(*signal_and_frame):
    raise OutOfTime


def of_file(module, file, name):
    if not callable(function := getattr(module, name, None)):
        raise TypeError(f"{file} lacks the function {name}")
    return function


def described(error, folder):
    """An error, with the line of a learner's file that raised it."""
    places = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((Path(error.filename), error.lineno))
    own = [f"{path.name}, line {line}: " for path, line in places if path.parent == Path(folder)]
    words = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{own[-1]}{type(error).__name__}: {words}"[:200] if own else words[:200]


def loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
