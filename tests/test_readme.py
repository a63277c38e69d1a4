"""Commands and programs in README and docs/ work as the text says, and the names in the text exist."""

import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import nbformat
import pytest
import typer
from helpers.sweeps import sweep

import labkit
from labkit.cli.app import app
from labkit.cli.main import main
from labkit.harness.compare.peers.table import PEERS
from labkit.models.encoder_policies import ENCODERS
from labkit.models.policies import POLICIES
from labkit.notebooks import read_parameters
from labkit.statistics.trust import WIDEST

ROOT = Path(__file__).parents[1]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
BLOCKS = [(page, *block) for page, text in PAGES.items() for block in FENCED.findall(text)]
COMMANDS = sorted({line for _, language, text in BLOCKS if language == "bash" for line in text.splitlines()})
PROGRAMS = {f"{page}-{number}": text for number, (page, language, text) in enumerate(BLOCKS) if language == "python"}
SLOW = re.compile(r"launch\(|measure_latency\(|compare\(")  # programs that match are slow
NOT_RUN = [line for _, language, text in BLOCKS if not language for line in text.splitlines()]
INLINE = [
    code
    for text in PAGES.values()
    for code in re.findall(r"`([^`\n]+)`", FENCED.sub("", text))
    if "NAME" not in code and "NN_" not in code  # placeholders for names that a reader chooses
]
NOTEBOOK = re.compile(r'(?:labkit run|papermill) (\S+\.ipynb)(?: \S+\.ipynb)?((?: -p \S+ (?:"[^"]+"|\S+))*)')
APP: Any = typer.main.get_command(app)
ROOMS = ("docs", "kernels", "labkit", "notebooks", "profiles", "tests")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current folder with the notebooks and the profiles in it, without a hub."""
    for folder in ("notebooks", "profiles"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def check_options(line: str) -> None:
    """Fails unless `labkit` has the command in this line, with its options. A program after -- has its own options."""
    command = APP
    _, *words = line.partition(" -- ")[0].split()
    while subcommand := getattr(command, "commands", {}).get(next(iter(words), "")):
        command, words = subcommand, words[1:]
    assert not getattr(command, "commands", {}) or not words or words[0].startswith("-"), line
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    assert {word for word in words if word.startswith("-")} <= known, line


def test_there_is_something_to_run() -> None:
    assert {"make demo", "make lab"} <= set(COMMANDS)
    assert len(PROGRAMS) > 3


@pytest.mark.parametrize(
    "command", [pytest.param(line, marks=sweep if "all_reduce" in line else ()) for line in COMMANDS]
)
def test_command_runs(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some commands are only looked up. `make` targets take too long to run. Notebooks and their parameters are run by
    tests/notebooks, with `labkit run` and papermill. tests/cli/test_main.py runs `labkit compare`, and the README's
    program measures the same. The sums over ranks are measured in tests/harness/exchange.
    """
    if command.startswith("make "):
        process = subprocess.run(
            ["make", "--dry-run", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr
    elif match := NOTEBOOK.fullmatch(command):
        known = {parameter.name for parameter in read_parameters(nbformat.read(workspace / match[1], as_version=4))}
        assert set(shlex.split(match[2])[1::3]) <= known
    elif command.startswith("labkit compare "):
        check_options(command)
    else:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        assert sys.argv[0] == "labkit", "a command that this test does not run belongs in a block without a language"
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0


@pytest.mark.parametrize(
    "name", [pytest.param(key, marks=sweep if SLOW.search(text) else ()) for key, text in PROGRAMS.items()]
)
def test_program_runs(name: str, workspace: Path) -> None:
    """Runs it as `__main__`, so that its functions can be sent to other processes, as from a script."""
    script = workspace / "program.py"
    script.write_text(PROGRAMS[name])
    runpy.run_path(str(script), run_name="__main__")


def test_commands_that_are_not_run_exist_with_their_options() -> None:
    lines = [line for line in (*NOT_RUN, *INLINE) if re.match(r"labkit [a-z]", line)]
    assert len(lines) > 10
    for line in lines:
        check_options(line)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {line.split()[1] for line in (*NOT_RUN, *INLINE) if re.match(r"make [a-z]", line)}
    assert named
    assert named <= targets


def test_files_that_are_named_exist() -> None:
    named = {code.rstrip("/") for code in INLINE if re.fullmatch(rf"({'|'.join(ROOMS)})/[\w./*-]*", code)}
    assert len(named) > 5
    assert [path for path in sorted(named) if not any(ROOT.glob(path))] == []


def test_functions_that_are_named_exist() -> None:
    named = {code for text in INLINE for code in re.findall(r"^labkit(?:\.\w+)+", text)}
    assert named
    for name in sorted(named):
        pkgutil.resolve_name(name)


def test_parameters_are_the_notebooks() -> None:
    (sentence,) = re.findall(
        r"^The first notebook's parameters are (.*?);", PAGES["docs/notebooks.md"], flags=re.MULTILINE | re.DOTALL
    )
    notebook = nbformat.read(ROOT / "notebooks" / "01_vanilla_vs_fused.ipynb", as_version=4)
    assert re.findall(r"`(\w+)`", sentence) == [parameter.name for parameter in read_parameters(notebook)]


def headings(page: Path) -> set[str]:
    """Headings of a page in the form that links use."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def links(page: Path) -> set[Path]:
    """Files of the checkout to which a page has a link."""
    targets = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", page.read_text())}
    return {(page.parent / link).resolve() for link in targets if link and "://" not in link}


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    todo = {ROOT / "README.md"}
    while todo:
        reached |= todo
        todo = {link for page in todo if page.suffix == ".md" for link in links(page)} - reached
    assert {ROOT / page for page in PAGES} <= reached


def test_every_picture_is_shown_somewhere() -> None:
    pictures = set(ROOT.glob("docs/**/*.png"))
    assert pictures == {link for page in PAGES for link in links(ROOT / page) if link.suffix == ".png"}


def test_every_public_package_has_its_page_of_reference() -> None:
    packages = {f"labkit.{name}" for name in dir(labkit) if isinstance(getattr(labkit, name), types.ModuleType)}
    directives = {re.search(r"^```\{public-names\} (\S+)$", text, re.MULTILINE) for text in PAGES.values()}
    assert packages | {"labkit"} <= {match[1] for match in directives if match}


def test_every_architecture_is_named_among_the_models() -> None:
    text = re.sub(r"\W", "", PAGES["docs/models.md"]).lower()
    names = [re.sub(r"(LMHead|For)?(CausalLM|Model)$", "", name) for name in (*POLICIES, *ENCODERS)]
    assert [name for name in names if name.lower() not in text] == []


def test_every_peer_has_its_row() -> None:
    assert [name for name in PEERS if f"\n| `{name}` |" not in PAGES["docs/measuring.md"]] == []


def test_every_ratio_is_one_that_was_measured() -> None:
    ratios = set(re.findall(r"\d+\.\d\dx \[[^\]]+\]", "".join(PAGES.values())))
    measured = "".join(page.read_text() for page in (ROOT / "profiles").glob("*.md"))
    assert ratios
    assert {ratio for ratio in ratios if ratio not in measured} == set()


def test_every_ratio_with_a_wide_interval_is_called_wide_or_not_trustworthy() -> None:
    cells = [cell for text in PAGES.values() for line in text.splitlines() for cell in line.split(" | ")]
    intervals = {cell: re.search(r"x \[(\d+\.\d+), (\d+\.\d+)\]", cell) for cell in cells}
    wide = {
        cell for cell, interval in intervals.items() if interval and float(interval[2]) > WIDEST * float(interval[1])
    }
    assert wide
    assert {cell for cell in wide if not re.search("not trustworthy|, wide", cell)} == set()
    called_wide = [interval for cell, interval in intervals.items() if interval and ", wide" in cell]
    assert all(float(interval[1]) > 1 for interval in called_wide)  # undecided ones are not trustworthy


def test_the_readme_is_one_page() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 120
