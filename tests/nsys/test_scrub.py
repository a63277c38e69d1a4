"""Scrubbed reports have all that the reader and `nsys stats` need, but no user, host or secret."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from labkit.nsys.capture.redaction import REDACTED, Redaction
from labkit.nsys.capture.scrubbing import scrub
from labkit.nsys.trace import TraceError

TOKEN = "hf_0123456789abcdefXYZ"
PROCESS, THREAD = 5 << 24, 5 << 24 | 7
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, globalTid INTEGER,
                          textId INTEGER, jsonText TEXT, payload BLOB);
CREATE TABLE ThreadNames (nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER);
CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT);
CREATE TABLE EXPORT_META_DATA (name TEXT NOT NULL, value TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT NOT NULL, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, localTime TEXT);
CREATE TABLE ENUM_NSYS_EVENT_TYPE (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE ProcessStreams (globalPid INTEGER NOT NULL, contentId INTEGER NOT NULL);
CREATE TABLE SOMETHING_NEW (note TEXT);
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A report with the token in every place where nsys is known to put it, and in some where only a user would."""
    path = tmp_path / "report.sqlite"
    strings = {
        1: "decode/layer.0/qkv",
        2: f"load with {TOKEN}",
        3: f"HF_TOKEN={TOKEN}\0HOME=/home/ada",
        4: "python",
        5: "sshd",
        6: f"printed {TOKEN}",
    }
    with closing(sqlite3.connect(path)) as rows:
        rows.executescript(SCHEMA)
        rows.executemany("INSERT INTO StringIds VALUES (?, ?)", strings.items())
        ranges: list[tuple[object, ...]] = [
            (0, 9, 59, None, THREAD, 1, f'{{"k": "{TOKEN}"}}', None),
            (1, 8, 59, None, THREAD, 2, None, b"\1"),
            (2, 7, 59, f"say {TOKEN} on ada-box", THREAD, None, None, None),
            (0, None, 75, "labkit", THREAD, None, None, None),
        ]
        rows.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?, ?, ?)", ranges)
        rows.executemany("INSERT INTO ThreadNames VALUES (?, 20, ?)", [(4, THREAD), (5, 9 << 24 | 1)])
        rows.executemany(
            "INSERT INTO PROCESSES VALUES (?, ?, ?)", [(PROCESS, 5, "/home/ada/env/python"), (9 << 24, 9, "sshd")]
        )
        meta = [("EXPORT_SCHEMA_VERSION", "3.0.0"), ("EXPORT_HOST", "ada-box"), ("EXPORT_INPUT_PATH", "/home/ada/x")]
        rows.executemany("INSERT INTO EXPORT_META_DATA VALUES (?, ?)", meta)
        rows.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('DeviceEnvironment', ?)", (f"API={TOKEN}\0A=b",))
        rows.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (17, 'in the evening')")
        rows.execute("INSERT INTO ENUM_NSYS_EVENT_TYPE VALUES (59, 'NvtxPushPopRange')")
        rows.execute("INSERT INTO ProcessStreams VALUES (?, 6)", (PROCESS,))
        rows.execute("INSERT INTO SOMETHING_NEW VALUES (?)", (TOKEN,))
        rows.commit()
    return path


def rows_of(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as rows:
        return rows.execute(query).fetchall()


@pytest.fixture
def clean(report: Path, tmp_path: Path) -> Path:
    target = tmp_path / "out" / "clean.sqlite"
    replaced = scrub(report, target, {"USER": "ada"})
    assert {name: count for name, count in replaced.items() if name in ("API", "HF_TOKEN", "the host's name")} == {
        "HF_TOKEN": 2, "the host's name": 1
    }  # fmt: skip
    return target


def test_no_byte_of_the_file_holds_the_token_the_user_or_the_host(clean: Path) -> None:
    content = clean.read_bytes()
    for secret in (TOKEN, "ada", "sshd", "in the evening"):
        assert secret.encode() not in content
        assert secret.encode("utf-16-le") not in content


def test_ranges_threads_and_versions_are_kept(clean: Path) -> None:
    names = rows_of(clean, "SELECT coalesce(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON textId = id")
    assert [name for (name,) in names] == [
        "decode/layer.0/qkv",
        f"load with {REDACTED}",
        f"say {REDACTED} on {REDACTED}",
        "labkit",
    ]
    assert rows_of(clean, "SELECT start, end, eventType, globalTid FROM NVTX_EVENTS LIMIT 1") == [(0, 9, 59, THREAD)]
    assert rows_of(clean, "SELECT value, globalTid FROM ThreadNames JOIN StringIds ON nameId = id") == [
        ("python", THREAD)
    ]
    assert rows_of(clean, "SELECT * FROM PROCESSES") == [(PROCESS, 5, "python")]
    assert rows_of(clean, "SELECT * FROM EXPORT_META_DATA") == [("EXPORT_SCHEMA_VERSION", "3.0.0")]
    assert rows_of(clean, "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME") == [(17,)]
    assert rows_of(clean, "SELECT name FROM ENUM_NSYS_EVENT_TYPE") == [("NvtxPushPopRange",)]


def test_unknown_tables_are_left_out(clean: Path) -> None:
    tables = {name for (name,) in rows_of(clean, "SELECT name FROM sqlite_master")}
    assert not tables & {"SOMETHING_NEW", "TARGET_INFO_SYSTEM_ENV", "ProcessStreams"}


def test_the_report_itself_is_not_touched(report: Path, tmp_path: Path) -> None:
    before = report.read_bytes()
    scrub(report, tmp_path / "clean.sqlite")
    assert report.read_bytes() == before


@pytest.mark.parametrize("content", [b"no database, but long enough to look at" * 40, b"SQLite format 3\0" + b"x" * 99])
def test_what_is_no_report_is_refused_and_leaves_nothing(content: bytes, tmp_path: Path) -> None:
    report = tmp_path / "report.sqlite"
    report.write_bytes(content)
    with pytest.raises(TraceError, match=r"could not be read.*expected a report that nsys exported"):
        scrub(report, tmp_path / "clean.sqlite")
    assert [file.name for file in tmp_path.iterdir()] == ["report.sqlite"]


def test_a_target_that_cannot_be_written_is_an_os_error(report: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        scrub(report, tmp_path / "file" / "clean.sqlite")


def test_values_are_replaced_longest_first_and_names_as_words() -> None:
    clean = Redaction.of_run(
        [("A", "/long/value"), ("B", "/long/value/and/more"), ("USER", "eve"), ("X", "short")], hosts=["box"]
    )
    assert clean("/long/value/and/more") == REDACTED
    assert clean("a /long/value here") == f"a {REDACTED} here"
    assert clean("eve at box, every boxer, short") == f"{REDACTED} at {REDACTED}, every boxer, short"


def test_parts_of_lists_and_short_secrets_go_too() -> None:
    clean = Redaction.of_run([("PATH", os.pathsep.join(["/opt/tools/bin", "/bin"])), ("DB_PASSWORD", "tiger")])
    assert clean("/opt/tools/bin/x by tiger") == f"{REDACTED}/x by {REDACTED}"


def test_what_labkit_itself_sets_is_no_secret() -> None:
    assert (
        Redaction.of_run([("LABKIT_IMPL", "/hf/eager"), ("IMPL", "/hf/static")])("/hf/eager /hf/static")
        == f"/hf/eager {REDACTED}"
    )


def test_the_names_of_stages_stay_whatever_the_environment_says() -> None:
    clean = Redaction.of_run([("STAGE", "decode/step"), ("D", "labkit"), ("USER", "decode")])
    assert clean("decode/step") == "decode/step"
    assert clean("decode/layer.1/qkv") == "decode/layer.1/qkv"
    assert clean("labkit") == "labkit"
