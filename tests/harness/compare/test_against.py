"""Two versions of labkit: how the other one is found, what it must answer, and that both read the same weights."""

import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from helpers.studies.comparisons import comparison
from helpers.sweeps import sweep

from labkit.harness import Comparison, WorkerError, load_records
from labkit.harness.compare import against as module
from labkit.harness.compare import installation as installation_module
from labkit.harness.compare.against import installed, other_version
from labkit.harness.compare.compare import compare
from labkit.harness.compare.installation import PROTOCOL, Installation, pinned
from labkit.harness.compare.interleave import _without_turns
from labkit.harness.compare.measured_side import MeasuredSide
from labkit.harness.compare.plan import Schedule, SideSpec, labels
from labkit.harness.compare.side_process import SideProcess
from labkit.harness.compare.weight_sharing import WeightSharing
from labkit.harness.runs import SharedWeights
from labkit.harness.turns.sharing import WeightBlock
from labkit.system.errors import UserError

ROOT = module.SOURCE.parents[1]
SMALL: dict[str, Any] = {"model": "tiny-gpt2", "prompt": 9, "new": 5, "threads": 1, "rounds": 3}
in_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the installed labkit is no checkout")


def copies() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("labkit-against-*"))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def python_of(folder: Path, script: str) -> Path:
    """A folder with a `bin/python` that is this shell script."""
    program = folder / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return folder


def refused(named: Path | str, message: str) -> None:
    with pytest.raises(UserError, match=message), other_version(named):
        pass


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two commits of a package. The installed labkit seems to come from it."""
    root = tmp_path.resolve() / "checkout"
    for number in (1, 2):
        for package in ("labkit", "kernels"):
            (root / package).mkdir(parents=True, exist_ok=True)
            (root / package / "__init__.py").write_text(f"NUMBER = {number}\n")
        git(root, "init", "-q")
        git(root, "add", ".")
        git(root, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "-m", str(number))
    monkeypatch.setattr(module, "SOURCE", root / "labkit" / "__init__.py")
    return root


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout


def test_a_commit_is_copied_and_leaves_nothing_behind(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_KERNELS", "elsewhere")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook
    before = copies()
    with other_version("HEAD~1") as other:
        imported = Path(other.imported)
        assert imported.read_text() == "NUMBER = 1\n"
        assert (imported.parent / "kernels" / "__init__.py").read_text() == "NUMBER = 1\n"
        monkeypatch.delenv("GIT_DIR")
        assert other.version == git(checkout, "rev-parse", "--short", "HEAD~1").strip()
        assert other.described == {"commit": other.version}
        assert "LABKIT_KERNELS" not in other.variables()
        assert labels([SideSpec("fused", 2, installation=other)]) == [f"fused at {other.version}"]
    assert copies() == before
    assert len(git(checkout, "worktree", "list").splitlines()) == 1
    assert git(checkout, "status", "--porcelain") == ""


def test_a_checkout_is_copied_so_that_it_can_be_edited_meanwhile(checkout: Path) -> None:
    with other_version(checkout) as other:
        (checkout / "labkit" / "__init__.py").write_text("NUMBER = 3\n")
        assert Path(other.imported).read_text() == "NUMBER = 2\n"
        assert other.version.startswith("checkout (")


def test_a_copy_is_removed_after_an_interrupt(checkout: Path) -> None:
    def interrupted() -> None:
        with other_version("HEAD"):
            assert copies() > before
            raise KeyboardInterrupt

    before = copies()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert copies() == before


@pytest.mark.parametrize("name", ["no-such-commit", "--all", "HEAD:labkit"])
def test_an_unknown_commit_is_refused(name: str, checkout: Path) -> None:
    refused(name, rf"got against={name!r}; expected a commit, .* has no such commit")
    refused("", "got against=''; expected a commit")


def test_a_folder_without_a_labkit_is_no_commit_either(checkout: Path, tmp_path: Path) -> None:
    refused(tmp_path, r"a folder with labkit/ in it, or a Python environment with a labkit")


def test_a_commit_without_the_sources_is_refused(checkout: Path) -> None:
    git(checkout, "rm", "-rq", "kernels")
    git(checkout, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "-m", "3")
    refused("HEAD", r"a commit without the folders labkit/ and kernels/")


def test_a_commit_needs_a_labkit_from_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOURCE", tmp_path / "site-packages" / "labkit" / "__init__.py")
    refused("HEAD", r"A commit needs a labkit that is installed from a checkout")


@pytest.mark.parametrize("name", ["old", "project/.venv"])
def test_a_python_environment_is_named_by_its_folder(
    name: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "labkit"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    script = f'test -z "$PYTHONPATH" || exit 1; PYTHONPATH={package.parent} exec {sys.executable} "$@"'
    folder = python_of(tmp_path / name, script)
    with other_version(folder) as other:
        assert other.python == str(folder / "bin" / "python")
        assert other.imported == str(package / "__init__.py")
        assert other.version == name.partition("/")[0]
        assert other.described["commit"] is None
        assert "torch" in other.described["packages"]


def test_the_sources_of_an_installed_checkout_are_copied_too(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = copies()
    with installed() as present:
        (checkout / "labkit" / "__init__.py").write_text("NUMBER = 3\n")
        assert Path(present.imported).read_text() == "NUMBER = 2\n"
        assert present.version == ""
        bound = present.with_variables({"OMP_PLACES": "{0}"}).variables()
        assert bound["PYTHONPATH"].split(":")[0] == str(Path(present.imported).parents[1])
        assert bound["OMP_PLACES"] == "{0}"
    assert copies() == before
    (checkout / "kernels" / "__init__.py").unlink()  # now it is laid out like an installed package
    with installed() as present:
        assert present.imported == str(module.SOURCE)
        assert copies() == before


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f'exec {sys.executable} -S "$@"', r"whose Python has no labkit; install one there"),
        ("echo broken >&2; exit 1", "whose labkit cannot be imported: broken"),
        (f'exec {sys.executable} "$@"', "which has the same labkit as this process"),
    ],
)
def test_a_python_environment_without_another_labkit_is_refused(script: str, message: str, tmp_path: Path) -> None:
    refused(python_of(tmp_path / "venv", script), message)


def test_a_python_that_does_not_run_is_refused(tmp_path: Path) -> None:
    folder = python_of(tmp_path / "venv", "")
    (folder / "bin" / "python").chmod(0o644)
    refused(folder, "does not run: Permission denied")


def test_the_installed_labkit_is_never_taken_for_the_other_one(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look: dict[str, Any] = {"labkit": str(checkout / "labkit" / "__init__.py"), "kernels": None, "packages": {}}
    monkeypatch.setattr(module, "_look", lambda named, installation: look)
    refused("HEAD", r"but Python imports .*/checkout/labkit/__init__.py instead of the copy")


def test_the_baseline_is_the_candidate_of_the_other_version() -> None:
    with pytest.raises(UserError, match=r"the baseline is fused in that version: leave it out"):
        compare("hf-eager", **SMALL, against="HEAD", output=None)


def side_with(answer: Any, installation: Installation) -> MeasuredSide:
    def ask(op: str, **request: Any) -> list[dict[str, Any]]:
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    prepared = SimpleNamespace(weights="tiny-gpt2", case=SimpleNamespace(dtype="float32", sample=""))
    spec, process = SideSpec("fused", 1, installation=installation), SimpleNamespace(ask=ask, pids=())
    return MeasuredSide(spec.label, spec, process, prepared, Schedule())  # type: ignore[arg-type]


OTHER = Installation(version="abc", imported=str(Path(module.__file__)))


def test_a_side_says_what_it_is_before_it_loads() -> None:
    for answer, shares in (({"protocol": PROTOCOL, "imported": OTHER.imported}, True), ({}, False)):
        side = side_with(answer, OTHER)
        side._prepare()
        assert side.shares == shares
    with pytest.raises(UserError, match=rf"fused at abc speaks protocol 99 of comparisons, expected {PROTOCOL}; name"):
        side_with({"protocol": 99}, OTHER)._prepare()
    with pytest.raises(WorkerError, match=r"fused at abc runs the labkit of .*test_against.py, expected .*against.py"):
        side_with({"protocol": PROTOCOL, "imported": __file__}, OTHER)._prepare()
    with pytest.raises(
        WorkerError, match=r"^fused at abc does not understand this labkit: it ended \(no module\); name"
    ):
        side_with(WorkerError("it ended\nTraceback\nno module"), OTHER)._prepare()
    with pytest.raises(WorkerError, match=r"^it ended$"):
        side_with(WorkerError("it ended"), Installation())._prepare()


def test_an_answer_in_no_known_language_is_shown(tmp_path: Path) -> None:
    folder = python_of(tmp_path / "venv", "echo hello; read request")
    process = SideProcess("fused at abc", 1, installation=Installation(python=str(folder / "bin" / "python")))
    with process as side, pytest.raises(WorkerError, match="fused at abc answered 'hello', expected an object in JSON"):
        side.ask("prepare")


def test_a_version_from_before_turns_is_compared_in_rounds() -> None:
    sides: Any = [SimpleNamespace(name="fused at abc", knows_turns=False), SimpleNamespace(name="b", knows_turns=True)]
    assert _without_turns(sides) == "fused at abc is a version from before turns of a few tokens"
    assert _without_turns(sides[1:]) == ""


class Sharer:
    """A side whose weights are two blocks, of 1 and 2 MB."""

    def __init__(self, name: str, contents: str, *, ranks: int = 1, shares: bool = True, why_not: str = "") -> None:
        self.name, self.shares, self.spec = name, shares, SimpleNamespace(ranks=ranks)
        self._contents, self._why_not, self.calls = contents, why_not, []  # type: ignore[var-annotated]
        self.different: list[int] = []

    def place(self) -> None:
        self.calls.append("place")

    def weight_blocks(self) -> dict[str, Any]:
        blocks = [WeightBlock(content, (index + 1) * 10**6, 0, True) for index, content in enumerate(self._contents)]
        return {"blocks": [list(block) for block in blocks]}

    def publish(self, blocks: Any) -> dict[str, Any]:
        self.calls.append([block.number for block in blocks])
        return {"why_not": self._why_not} if self._why_not else {"pid": 1, "file": 2, "positions": [7] * len(blocks)}

    def adopt(self, pid: int, file: int, blocks: Any) -> dict[str, Any]:
        self.calls.append([tuple(block) for block in blocks])
        return {"same": [block.number not in self.different for block in blocks]}


def placed(first: Sharer, second: Sharer, times: int = 1) -> str:
    sharing = WeightSharing([first, second])  # type: ignore[list-item]
    for _ in range(times):
        sharing.place()
    return str(sharing.record)


def test_equal_blocks_are_shared_and_a_block_that_becomes_different_is_left_out() -> None:
    assert placed(Sharer("a", "xyz"), Sharer("b", "xwz")) == "both sides read the same 4 of 6 MB of weights"
    first, second = Sharer("a", "xy"), Sharer("b", "xy")
    second.different = [0]
    assert placed(first, second, 2) == "both sides read the same 2 of 3 MB of weights"
    assert first.calls == [[0, 1], [1]]
    assert second.calls == [[(0, True, 7), (1, True, 7)], [(1, True, 7)]]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"contents": "zw"}, "the versions have no weights in the same layout"),
        ({"ranks": 2, "shares": False}, "a has several ranks"),
        ({"shares": False}, "a is a version from before shared weights"),
        ({"why_not": "too little memory"}, "too little memory"),
    ],
)
def test_where_nothing_can_be_shared_each_side_places_its_own_weights(changes: dict[str, Any], why: str) -> None:
    first, second = Sharer("a", **{"contents": "xy"} | changes), Sharer("b", "xy")
    assert placed(first, second, 3) == f"each side reads its own copy of the weights: {why}"
    assert [call for call in first.calls if call == "place"] == ["place"] * 3 == second.calls


def test_the_table_says_what_both_sides_read() -> None:
    shared = SharedWeights(shared_mb=248, total_mb=248)
    record = comparison().model_copy(update={"shared_weights": shared})
    assert "both sides read the same 248 of 248 MB of weights" in record.table().notes
    assert record.as_dict()["shared_weights"]["shared_mb"] == 248


def test_threads_are_bound_where_there_are_enough_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in installation_module.BINDINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(installation_module.os, "sched_getaffinity", lambda process: {5, 3, 4})
    assert pinned(2) == {"OMP_PLACES": "{3},{4}", "OMP_PROC_BIND": "close"}
    assert pinned(4) == {}
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert pinned(2) == {}


@sweep
@in_checkout
def test_the_last_commit_is_compared_with_the_present_sources(tmp_path: Path) -> None:
    before = copies(), children()
    record = compare(**SMALL, against="HEAD", output=tmp_path)
    assert record.baseline.name == f"fused at {git(ROOT, 'rev-parse', '--short', 'HEAD').strip()}"
    assert record.candidate.name == "fused"
    assert record.baseline.environment.commit == record.baseline.name.removeprefix("fused at ")
    assert record.in_epochs
    assert record.rounds == 3
    assert record.baseline.placed_anew
    assert record.candidate.placed_anew
    assert record.shared_weights is not None
    assert record.shared_weights.why_not == ""
    assert 0 < record.shared_weights.shared_mb <= record.shared_weights.total_mb
    assert record.tokens_equal
    (read,) = load_records(tmp_path)
    assert isinstance(read, Comparison)
    assert read == record
    assert (copies(), children()) == before


@in_checkout
def test_an_interrupt_leaves_no_folder_and_no_process() -> None:
    def interrupt(done: float, total: float, label: str) -> None:
        assert copies() > before[0]
        assert children() > before[1]
        raise KeyboardInterrupt

    before = copies(), children()
    with pytest.raises(KeyboardInterrupt):
        compare(**SMALL, against="HEAD", output=None, progress=interrupt)
    assert (copies(), children()) == before
