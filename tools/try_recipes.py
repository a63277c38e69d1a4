"""Follows the recipes of docs/CONTRIBUTING.md with a toy each, and counts what fails without each of their steps.

    .venv/bin/python -P tools/try_recipes.py [KIND ...]

A toy is a file of tools/toys/: the title of its recipe, words for its placeholders, and the edits of each of its steps.
The edits are made in a copy of the checkout. There the commands run that the recipe names under "To test", up to the
first command with failures. With all steps the tests must pass. Without a step a test must fail, unless the toy says in
`unguarded` why none can.
"""

import argparse
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from labkit.kernels.build import cache_folder

ROOT = Path(__file__).parents[1]
TOYS = ROOT / "tools" / "toys"
RECIPES = ROOT / "docs" / "CONTRIBUTING.md"
FINDER = "__editable___labkit_0_1_0_finder.py"  # the editable installation's file with the path of labkit's checkout
MOST_FAILURES = "20"  # after which a run of pytest stops


@dataclass(frozen=True)
class Edit:
    """A new file, or text that goes after, before or in place of another text, which the file has exactly once."""

    file: str
    text: str
    after: str = ""
    before: str = ""
    instead_of: str = ""

    def make(self, tree: Path) -> None:
        """Makes the edit in a copy of the checkout."""
        path, anchor = tree / self.file, self.after or self.before or self.instead_of
        if not anchor:
            if path.exists():
                sys.exit(f"got {self.file} in the checkout; the toy expects to make it")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.text)
            return
        old = path.read_text()
        if (times := old.count(anchor)) != 1:
            sys.exit(f"got {times} times {anchor!r} in {self.file}, expected it once; correct the toy")
        path.write_text(old.replace(anchor, self.after + self.text + self.before))


@dataclass(frozen=True)
class Step:
    """A numbered step of a recipe."""

    edits: tuple[Edit, ...]
    unguarded: str = ""  # why no test can fail without it


@dataclass(frozen=True)
class Recipe:
    """A recipe, with the edits of its toy."""

    kind: str
    section: str
    words: dict[str, str]
    steps: tuple[Step, ...]
    commands: list[list[str]] = field(default_factory=list)  # arguments of pytest

    @classmethod
    def of(cls, toy: Path) -> "Recipe":
        """The recipe of a toy. Raises SystemExit if its steps are not the steps of the page."""
        data = tomllib.loads(toy.read_text())
        steps = tuple(
            Step(tuple(Edit(**edit) for edit in step.get("edit", [])), step.get("unguarded", ""))
            for step in data["step"]
        )
        text = section(data["section"])
        for placeholder, word in data["words"].items():
            text = re.sub(rf"(?<![A-Z]){placeholder}(?![A-Z])", word, text)
        items = re.findall(r"^\d+\. (.*(?:\n   .*)*)", text, re.MULTILINE)
        if len(items) != len(steps):
            sys.exit(f"{toy.name}: got {len(steps)} steps, expected the {len(items)} of {data['section']!r}")
        for number, (item, step) in enumerate(zip(items, steps, strict=True), 1):
            places = re.findall(r"`([^`\s]+)`", item)
            for edit in step.edits:
                if not any(
                    edit.file == place or (place.endswith("/") and edit.file.startswith(place)) for place in places
                ):
                    sys.exit(f"{toy.name}: step {number} edits {edit.file}, which the recipe does not name there")
        commands = re.findall(r"`\.venv/bin/pytest ([^`]*)`", text)
        return cls(toy.stem, data["section"], data["words"], steps, list(map(shlex.split, commands)))


def section(title: str) -> str:
    """The text of the section of docs/CONTRIBUTING.md with this title."""
    parts = re.split(r"^## (.*)$", RECIPES.read_text(), flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    if title not in texts:
        sys.exit(f"got no section {title!r} in {RECIPES.name}; it has {', '.join(texts)}")
    return texts[title]


@contextmanager
def copy() -> Iterator[Path]:
    """A copy of the checkout with its own environment. It has the packages of this process."""
    with tempfile.TemporaryDirectory(prefix="labkit-recipes-") as name:
        tree = Path(name, "labkit")
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        for file in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / file).exists():
                (tree / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, tree / file)
        make_environment(tree)
        (tree / ".cache").mkdir()
        for library in cache_folder().glob("kernels-*.so"):
            (tree / ".cache" / library.name).symlink_to(library)
        yield tree


def make_environment(tree: Path) -> None:
    """Makes `tree/.venv` with the labkit of the tree and all other packages of this process."""
    ours, theirs = Path(sys.prefix), tree / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", theirs], check=True)
    packages = Path(*next(theirs.glob("lib/python*/site-packages")).relative_to(theirs).parts)
    finder = (ours / packages / FINDER).read_text().replace(str(ROOT), str(tree))
    (theirs / packages / FINDER).write_text(finder)
    lines = [str(ours / packages), f"import {Path(FINDER).stem} as finder; finder.install()"]
    (theirs / packages / "labkit.pth").write_text("\n".join(lines) + "\n")
    for command in (ours / "bin").iterdir():
        script = theirs / "bin" / command.name
        if script.exists():
            continue
        start = command.read_bytes()[:2]
        if start == b"#!":
            script.write_text(command.read_text().replace(str(ours), str(theirs), 1))
            script.chmod(0o755)
        else:
            script.symlink_to(command)


@contextmanager
def edited(tree: Path, steps: Iterable[Step]) -> Iterator[None]:
    """The tree with the edits of these steps; afterwards it is as before."""
    files = list(dict.fromkeys(edit.file for step in steps for edit in step.edits))
    before = {file: (tree / file).read_bytes() if (tree / file).exists() else None for file in files}
    try:
        for edit in itertools.chain.from_iterable(step.edits for step in steps):
            edit.make(tree)
        yield
    finally:
        for file, content in before.items():
            if content is None:
                (tree / file).unlink(missing_ok=True)
                if not any((tree / file).parent.glob("*.*")):
                    shutil.rmtree((tree / file).parent, ignore_errors=True)
            else:
                (tree / file).write_bytes(content)


def failures(tree: Path, commands: list[list[str]]) -> list[str]:
    """The names of the tests that fail in this tree, for the first command with failures. If pytest fails without a
    failed test, the last line of its output.
    """
    environment = os.environ | {"LABKIT_CACHE": str(tree / ".cache"), "TMPDIR": str(tree.parent)}
    environment.pop("PYTHONPATH", None)
    for arguments in commands:
        # A test file that a step makes is missing while that step is left out.
        present = [word for word in arguments if not word.endswith(".py") or (tree / word).exists()]
        command = [tree / ".venv/bin/pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-rfE"]
        process = subprocess.run(
            [*command, "--maxfail", MOST_FAILURES, *present],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
        )
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", process.stdout, re.MULTILINE)
        if process.returncode and not failed:
            lines = (process.stdout + process.stderr).strip().splitlines()
            failed = lines[-1:] or [f"exit code {process.returncode} of pytest"]
        if failed:
            return failed
    return []


def tried(recipe: Recipe, tree: Path) -> bool:
    """Whether the steps of the recipe are enough, and each of them is needed."""
    with edited(tree, recipe.steps):
        failed = failures(tree, recipe.commands)
    say(f"{recipe.section}: with all steps {said(failed)}")
    true = not failed
    for number, step in enumerate(recipe.steps, 1):
        files = ", ".join(dict.fromkeys(edit.file for edit in step.edits))
        with edited(tree, [other for other in recipe.steps if other is not step]):
            failed = failures(tree, recipe.commands)
        true &= bool(failed) != bool(step.unguarded)
        reason = f" ({step.unguarded})" if step.unguarded else ""
        say(f"  without {number}, {files}: {said(failed)}{reason}")
    return true


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def said(failed: list[str]) -> str:
    return f"{len(failed)} fail, such as {failed[0]}" if failed else "nothing fails"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = sorted(toy.stem for toy in TOYS.glob("*.toml"))
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"one of {', '.join(kinds)}; all if none is named")
    chosen = parser.parse_args().kinds or kinds
    if unknown := set(chosen) - set(kinds):
        parser.error(f"got {', '.join(sorted(unknown))}, expected some of {', '.join(kinds)}")
    recipes = [Recipe.of(TOYS / f"{kind}.toml") for kind in chosen]
    with copy() as tree:
        results = [tried(recipe, tree) for recipe in recipes]
    if not all(results):
        sys.exit(
            "not true: " + ", ".join(recipe.section for recipe, true in zip(recipes, results, strict=True) if not true)
        )


if __name__ == "__main__":
    main()
