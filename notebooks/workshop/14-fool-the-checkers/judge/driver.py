"""Runs checkers on kernels, in the process of the submission. The judge says which, and what the result means."""

import importlib.util
from pathlib import Path

import numpy as np


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


class EachSecond:
    """Right in every second call."""

    calls = 0

    def __call__(self, x, out):
        self.calls += 1
        out[:] = softmax(x) if self.calls % 2 else 1 / x.shape[1]


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


HONEST = (plain, in_double, row_by_row, backwards)
CHEATS = {1: (constant, unequal), 2: (changes_its_input,), 3: (all_but_the_last,), 4: (EachSecond(),)}


def run(judge):
    folder, originals = judge.folders()
    files = {"original": Path(originals, "checkers.py"), "mended": Path(folder, "checkers.py")}
    modules = {name: loaded(name, path) for name, path in files.items()}
    cheats = loaded("cheats", Path(folder, "cheats.py"))
    while (task := judge.next()) is not None:
        which, number, kind, index, seed = task
        checker = getattr(modules[which], f"checker_{number}")
        own = {"honest": HONEST, "cheat": CHEATS[number]}
        kernel = getattr(cheats, f"cheat_{number}") if kind == "yours" else own[kind][index]
        try:
            believed = bool(checker(kernel, np.random.default_rng(seed)))
        except Exception as error:  # noqa: BLE001 - of a learner's checker
            believed = f"{type(error).__name__}: {error}"[:200]
        judge.said(believed)
    return True


def loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
