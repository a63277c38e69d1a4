"""Compilation on first use: what is built when, and the errors if nothing can be built."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import sleep, time

import pytest
import torch
from helpers.kernels.ops import ISAS, Draw, missing_instructions
from helpers.sweeps import sweep

from labkit.kernels import build, gemm
from labkit.kernels.abi import CNorm


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folder for compiled libraries; no library is loaded."""
    monkeypatch.setattr(build, "_in_use", {})
    folder = tmp_path / "cache"
    monkeypatch.setenv("LABKIT_CACHE", str(folder))
    return folder


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake compiler that writes a dummy file at once; the file `runs` next to it counts its runs."""
    path = tmp_path / "stub-g++"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *--version) echo stub 1.0; exit;; esac\necho run >> {tmp_path}/runs\n'
        'while [ "$1" != -o ]; do shift; done\necho built > "$2"\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def compiler_that(tmp_path: Path, script: str) -> str:
    path = tmp_path / "broken-g++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.usefixtures("stub")
def test_one_library_per_weight_type_and_instruction_set(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = set()
    for isa in ISAS:
        if missing_instructions(isa) is None:
            monkeypatch.setenv("LABKIT_ISA", isa)
            paths |= {build.compile_library(weight_type) for weight_type in build.WEIGHT_TYPES}
    assert len(paths) == len(libraries(cache)) == 4 * sum(missing_instructions(isa) is None for isa in ISAS)
    assert all(path.parent == cache and path.suffix == ".so" for path in paths)


@pytest.mark.usefixtures("cache")
def test_a_library_is_built_once(stub: Path) -> None:
    first = build.compile_library("float32")
    assert build.compile_library("float32") == first
    assert (stub.parent / "runs").read_text() == "run\n"


@pytest.mark.usefixtures("cache")
def test_other_arguments_of_the_compiler_make_another_library(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build.compile_library("float32")
    monkeypatch.setenv("CXX", f"{stub} -O1")
    assert build.compile_library("float32") != plain


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-1], lambda data: b"?" + data[1:]])
@pytest.mark.usefixtures("cache")
def test_a_damaged_library_is_built_again(stub: Path, damage: Callable[[bytes], bytes]) -> None:
    """A process that maps a truncated library is killed as soon as it touches the missing part."""
    library = build.compile_library("float32")
    whole = library.read_bytes()
    library.write_bytes(damage(whole))
    assert build.compile_library("float32") == library
    assert library.read_bytes() == whole
    assert (stub.parent / "runs").read_text() == "run\n" * 2


@pytest.mark.usefixtures("cache", "stub")
def test_a_library_is_held_against_its_digest_once_in_a_process() -> None:
    build.compile_library("float32")
    build._agrees_with_its_digest.cache_clear()
    for _ in range(3):
        build.compile_library("float32")
    assert build._agrees_with_its_digest.cache_info().misses == 1


@pytest.mark.usefixtures("stub")
def test_what_killed_builds_left_is_removed_and_what_may_be_a_build_is_not(cache: Path) -> None:
    cache.mkdir()
    for name, age in (("tmpdead.so", build.DEAD_S + 60), ("tmpalive.so", 60), ("tmpother.txt", 10 * build.DEAD_S)):
        (cache / name).touch()
        os.utime(cache / name, (time() - age,) * 2)
    library = build.compile_library("float32")
    assert libraries(cache) == sorted([library, cache / "tmpalive.so", cache / "tmpother.txt"])


@pytest.mark.usefixtures("cache", "stub")
def test_an_edited_source_makes_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "kernels"
    shutil.copytree(build.SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(build, "SOURCES", copy)
    monkeypatch.setattr(build, "ENTRY", copy / "decode_step" / "cpp_impl.cpp")
    first = build.compile_library("float32")
    for edited in ("simd.h", "gemm/cpp_impl.cpp"):
        source = copy / edited
        original = source.read_text()
        source.write_text(original + "\n")
        assert build.compile_library("float32") != first
        source.write_text(original)
    (copy / "notes.txt").write_text("no source")
    assert build.compile_library("float32") == first


@sweep
def test_an_edited_kernel_is_the_one_that_runs_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_ISA", "portable")  # compiles fastest
    copy = tmp_path / "kernels"
    shutil.copytree(build.SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(build, "SOURCES", copy)
    monkeypatch.setattr(build, "ENTRY", copy / "decode_step" / "cpp_impl.cpp")
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    draw = Draw()
    _, packed = draw.linear(3, 5)
    x = draw.normal(2, 5)
    right = gemm(x, packed, impl="cpp")
    abi = copy / "abi.h"
    abi.write_text(abi.read_text().replace("#pragma once", "#pragma once\n#define labkit_gemm labkit_gemm_before", 1))
    entry = copy / "decode_step" / "cpp_impl.cpp"
    entry.write_text(
        entry.read_text()
        + "\n#undef labkit_gemm\n"
        + 'extern "C" int64_t labkit_gemm(const Linear* l, const float*, int64_t rows, float* out, int32_t) {\n'
        + "  for (int64_t i = 0; i < rows * l->outputs; ++i) out[i] = 42;\n  return 0;\n}\n"
    )
    sleep(build.RECHECK_S)
    assert gemm(x, packed, impl="cpp").eq(42).all()
    assert not right.eq(42).any()


@pytest.mark.usefixtures("stub")
def test_without_a_writable_home_the_libraries_go_to_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("LABKIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    exit_calls: list[Callable[[], object]] = []
    monkeypatch.setattr(
        build.atexit, "register", lambda call, *args, **kwargs: exit_calls.append(partial(call, *args, **kwargs))
    )
    build._private_folder.cache_clear()
    library = build.compile_library("float32")
    assert library.is_file()
    for call in exit_calls:
        call()
    build._private_folder.cache_clear()
    assert not library.parent.exists()


@pytest.mark.parametrize("kind", ["read-only", "a file"])
def test_a_cache_folder_that_cannot_be_written_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    if kind == "a file":
        folder.touch()
    else:
        folder.mkdir(mode=0o555)
        if os.access(folder, os.W_OK):
            pytest.skip("this user may write to read-only folders")
    monkeypatch.setenv("LABKIT_CACHE", str(folder))
    with pytest.raises(build.BuildError, match=rf"LABKIT_CACHE={folder} can't be written .*; name a writable folder"):
        build.load("float32")


@pytest.mark.usefixtures("cache")
def test_an_unknown_instruction_set_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_ISA", "sse9")
    with pytest.raises(build.BuildError, match="LABKIT_ISA is 'sse9'; expected one of amx, avx512, avx2, portable"):
        build.load("float32")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("isa", ["amx", "avx512", "avx2"])
def test_instructions_that_the_cpu_lacks_are_refused(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"sse4_2"}))
    monkeypatch.setenv("LABKIT_ISA", isa)
    with pytest.raises(build.BuildError, match=f"LABKIT_ISA={isa}, but this CPU lacks those instructions; unset it"):
        build.load("float32")
    monkeypatch.delenv("LABKIT_ISA")
    assert build.instruction_set() == "portable"


@pytest.mark.usefixtures("cache")
def test_without_a_compiler_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"no g\+\+ or clang\+\+ on the PATH.*apt-get install g\+\+.*reference"):
        build.load("float32")
    assert build.unavailable() is not None


@pytest.mark.usefixtures("cache")
def test_a_named_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="CXX is 'no-such-compiler', which is not on the PATH"):
        build.load("float32")


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "echo 'note: in file x' >&2; echo 'x.cpp:3: fatal error: omp.h: No such file' >&2; exit 1"
    monkeypatch.setenv("CXX", compiler_that(tmp_path, script))
    with pytest.raises(build.BuildError, match=r"could not compile the kernels: x.cpp:3: fatal error: omp\.h"):
        build.load("float32")
    assert libraries(cache) == []


def test_a_compiler_that_fails_in_silence_is_reported_too(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler_that(tmp_path, "exit 3"))
    with pytest.raises(build.BuildError, match="broken-g\\+\\+ could not compile the kernels: exit code 3"):
        build.load("float32")
    assert libraries(cache) == []


@pytest.mark.usefixtures("cache", "stub")
def test_a_library_that_cannot_be_loaded_is_a_build_error() -> None:
    """As on a file system mounted noexec, or on a full disk."""
    with pytest.raises(build.BuildError, match="can't be loaded"):
        build.load("float32")


@pytest.mark.parametrize("runs", [1, 2])
def test_two_builds_at_once_end_with_one_whole_library(
    cache: Path, stub: Path, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waits for the other, but not for ever."""
    if runs == 2:
        monkeypatch.setattr(build, "BUILD_S", 0.0)
    all_run = f"while [ $(wc -l < {stub.parent}/runs) -lt {runs} ]; do sleep 0.01; done"
    stub.write_text(stub.read_text().replace("while [", f"{all_run}\nwhile [", 1))
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(build.compile_library, ("float32", "float32")))
    assert paths == set(libraries(cache))
    assert len(paths) == 1
    assert build.compile_library("float32") in paths
    assert (stub.parent / "runs").read_text() == "run\n" * runs


@sweep
def test_the_kernels_run_right_after_a_build(cache: Path) -> None:
    draw = Draw()
    plain, packed = draw.linear(3, 5)
    x = draw.normal(2, 5)
    assert torch.allclose(gemm(x, packed, impl="cpp"), gemm(x, plain, impl="reference"), atol=1e-6)
    assert len(libraries(cache)) == 1


TILE = re.compile(r"<_ZN6labkit(?:4tile|9vnni_tile)I(?!.*(?:@plt|constprop)).*>:")  # no clones: they read cached data


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the machine code of x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump, of binutils")
@pytest.mark.parametrize("weight_type", ["bfloat16", "int8"])
def test_every_tile_that_reads_weights_prefetches(weight_type: str) -> None:
    """A prefetch has no effect that a compiler can see. GCC 12 removed the prefetches of the quantised GEMM, which then
    took a third longer.
    """
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(build.compile_library(weight_type))]
    disassembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    tiles = [code for code in disassembly.split("\n\n") if TILE.search(code.partition("\n")[0])]
    assert len(tiles) > 3
    assert not [code.partition("\n")[0] for code in tiles if "prefetch" not in code]


def test_every_op_declares_the_arguments_of_its_function() -> None:
    """A call without a signature would truncate 64-bit sizes to 32 bits."""
    exported = {}
    for source in build.SOURCES.glob("*/cpp_impl.cpp"):
        for name, arguments in re.findall(r'extern "C" \w+ (\w+)\(([^)]*)\)', source.read_text(encoding="utf-8")):
            exported[name] = len(arguments.split(","))
    assert {"labkit_gemm", "labkit_attention"} <= set(exported)
    assert {name: len(build.SIGNATURES.get(name, ())) for name in exported} == exported


def test_a_struct_that_differs_from_its_mirror_in_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = [CNorm._fields_[1], CNorm._fields_[0], *CNorm._fields_[2:]]
    monkeypatch.setitem(build.STRUCTS, "Norm", type("CNorm", (ctypes.Structure,), {"_fields_": swapped}))
    with pytest.raises(build.BuildError, match=r"static assertion failed.*CNorm.eps"):
        build.compile_library("float32")


def test_a_constant_that_differs_in_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(build.CONSTANTS, "kBlock", 16)
    with pytest.raises(build.BuildError, match=r"static assertion failed.*kBlock in Python"):
        build.compile_library("float32")


def test_every_struct_of_ctypes_is_compared_with_its_c_struct() -> None:
    mirrors = {mirror.__name__ for mirror in build.STRUCTS.values()}
    sources = [source.read_text(encoding="utf-8") for source in build.SOURCES.rglob("*.py")]
    assert mirrors == {name for text in sources for name in re.findall(r"class (\w+)\(ctypes.Structure\)", text)}
