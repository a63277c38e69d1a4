"""Compiles the C++ kernels for this machine on first use and loads them.

There is one library for each weight type and instruction set, made from `decode_step/cpp_impl.cpp`, which includes
every op. The cache key is the digest of all kernel sources, the flags, the compiler and the CPU, so an edited source is
rebuilt on the next load. A library ends with a digest of itself, because a process that maps a truncated library is
killed (SIGBUS). A library that does not match its digest is built again.

Environment: `CXX` names the compiler, `LABKIT_ISA` forces amx, avx512, avx2 or portable, `LABKIT_CACHE` names
the cache folder, `LABKIT_KERNELS` another folder of kernel sources (such as a copy of this one with changes).
"""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic, time
from typing import Any, TypeVar

from labkit.system.cache_root import CACHE, cache_root
from labkit.system.child import finished
from labkit.system.errors import RunError
from labkit.system.file_lock import one_process
from labkit.system.processor import cpu_field, cpu_flags

SOURCES = Path(os.environ.get("LABKIT_KERNELS") or Path(__file__).parent)
ENTRY = SOURCES / "decode_step" / "cpp_impl.cpp"
ISA_FLAGS = {
    "amx": ("-march=native", "-DLABKIT_AMX"),
    "avx512": ("-march=native",),
    "avx2": ("-march=x86-64-v3",),
    "portable": (),
}
RECHECK_S = 0.5
DEAD_S = 3600  # after this time an unfinished build belongs to no process any more; a build takes seconds
BUILD_S = 120.0  # after this time another process's build is no longer waited for
DIGEST_BYTES = 32
WEIGHT_TYPES = {"float32": "float", "bfloat16": "bf16", "float16": "fp16", "int8": "int8_t"}

Struct = TypeVar("Struct", bound=ctypes.Structure)
INT, LONG, POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
# The argument types of the C functions: with them, calls take plain integers for addresses and sizes. Ops add theirs by
# `declare`. The probes' are here, because a library may be loaded before `probe` is imported.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "labkit_read_ns": (POINTER, LONG, INT, INT, INT),
    "labkit_peak_flop_ms": (INT, LONG),
}
WITH_RESULT = {"labkit_read_ns", "labkit_peak_flop_ms"}  # functions that return an int64
ALLOCATING: set[str] = set()  # functions whose int64 is NO_MEMORY if they got no memory
NO_MEMORY = -1
STRUCTS: dict[str, type[ctypes.Structure]] = {}
CONSTANTS: dict[str, int] = {"kNoMemory": NO_MEMORY}
_in_use: dict[tuple[str, str | None], tuple[ctypes.CDLL, float]] = {}  # by weight type and LABKIT_ISA: until when


def mirrors(name: str) -> Callable[[type[Struct]], type[Struct]]:
    """Declares a class of ctypes as the mirror of a C++ struct. Its size and its fields, by name, are compared when the
    kernels are compiled: a struct that was changed on one side only raises BuildError.
    """

    def keep(mirror: type[Struct]) -> type[Struct]:
        STRUCTS[name] = mirror
        return mirror

    return keep


def fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    """The fields of a mirror, as C++ declares them: a type, and the names of consecutive fields of this type."""
    return [(name, kind) for kind, names in groups for name in names.split()]


def same_in_cpp(constants: Mapping[str, int]) -> None:
    """Declares constants that C++ has too, by their names or expressions in its namespace. They are compared when the
    kernels are compiled, as structs are.
    """
    CONSTANTS.update(constants)


def layouts() -> str:
    """C++ source that compares all structs with their mirrors, and the constants that both languages have."""
    constants = (f'static_assert({name} == {value}, "{name} in Python");' for name, value in CONSTANTS.items())
    lines = ["namespace labkit {", *constants, "}"]
    for name, mirror in STRUCTS.items():
        struct = f"labkit::{name}"
        lines.append(f'static_assert(sizeof({struct}) == {ctypes.sizeof(mirror)}, "size of {mirror.__name__}");')
        for field, kind, *_ in mirror._fields_:
            offset = f"offsetof({struct}, {field}) == {getattr(mirror, field).offset}"
            size = f"sizeof({struct}::{field}) == {ctypes.sizeof(kind)}"
            lines.append(f'static_assert({offset} && {size}, "{mirror.__name__}.{field}");')
    return " ".join(lines)


def declare(function: str, *arguments: Any, result: bool = False, allocates: bool = False) -> None:
    """Declares the C argument types of an op's function, and whether it returns an int64. An op does so when it is
    imported, before a library is loaded. allocates: the int64 is -1 without memory, which raises MemoryError.
    """
    SIGNATURES[function] = arguments
    if result or allocates:
        WITH_RESULT.add(function)
    if allocates:
        ALLOCATING.add(function)


def _require_memory(result: int, function: Any, arguments: Any) -> int:
    if result == NO_MEMORY:
        raise MemoryError("the kernels got no working memory; use a smaller batch, a shorter prompt or fewer threads")
    return result


class BuildError(RunError):
    """The kernels can't be compiled or loaded here; the message says why and what to do."""


@functools.cache
def _may_use_amx_tiles() -> bool:
    """Asks the system for the tile registers. A process gets them only on request, and then keeps them."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def instruction_set() -> str:
    """ "amx", "avx512", "avx2" or "portable": the value of `LABKIT_ISA`, or else the best of this CPU."""
    flags = cpu_flags()
    avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"} <= flags
    usable = {
        "amx": avx512 and {"avx512_bf16", "amx_tile", "amx_bf16"} <= flags and _may_use_amx_tiles(),
        "avx512": avx512,
        "avx2": {"avx2", "fma", "f16c", "bmi2"} <= flags,
        "portable": True,
    }
    forced = os.environ.get("LABKIT_ISA")
    if forced is None:
        return next(isa for isa, runs in usable.items() if runs)
    if forced not in usable:
        raise BuildError(f"LABKIT_ISA is {forced!r}; expected one of {', '.join(usable)}")
    if not usable[forced]:
        raise BuildError(f"LABKIT_ISA={forced}, but this CPU lacks those instructions; unset it or use 'portable'")
    return forced


def compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: `CXX`, which may have arguments ("ccache g++"), else g++, else clang++."""
    variable = os.environ.get("CXX")
    for name, *arguments in (shlex.split(variable),) if variable else (["g++"], ["clang++"]):
        if path := shutil.which(name):
            return path, *arguments
    missing = f"CXX is {variable!r}, which is not on the PATH" if variable else "no g++ or clang++ on the PATH"
    raise BuildError(
        f"{missing}: the C++ kernels can't be compiled. Install one (Debian, Ubuntu: apt-get install g++), "
        "or use impl='reference' and the vanilla baselines, which need no compiler"
    )


def cache_folder() -> Path:
    """The folder of compiled libraries: labkit's cache folder, else a private temporary folder."""
    base = cache_root()
    if base is None:
        return _private_folder()
    try:
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=base):
            return base
    except OSError as error:
        if named := os.environ.get(CACHE):
            raise BuildError(f"{CACHE}={named} can't be written ({error.strerror}); name a writable folder") from None
    return _private_folder()


@functools.cache
def _private_folder() -> Path:
    """A folder of this process, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="labkit-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    return subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout.split("\n")[0]


def sources_digest() -> str:
    """The digest of all kernel sources, Triton's too. It must be equal on machines that compute one model together."""
    return _digest((), (".h", ".cpp", ".py"))


def _digest(parts: tuple[str, ...], endings: tuple[str, ...] = (".h", ".cpp")) -> str:
    digest = hashlib.sha256()
    for source in sorted(_files(endings)):
        status = os.stat(source)
        content = _content_digest(source, status.st_ino, status.st_size, status.st_mtime_ns)
        digest.update(source.removeprefix(str(SOURCES)).encode() + b"\0" + content)
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:20]


@functools.lru_cache(maxsize=1024)
def _content_digest(source: str, *identity: int) -> bytes:
    """The digest of a source. It is read once for each `identity`, which changes with the file."""
    with open(source, "rb") as file:
        return hashlib.sha256(file.read()).digest()


def _files(endings: tuple[str, ...]) -> Iterator[str]:
    """The paths of the sources. An engine looks twice a second while it runs op by op, and pathlib takes ten times as
    long.
    """
    for folder, _, names in os.walk(SOURCES):
        yield from (os.path.join(folder, name) for name in names if name.endswith(endings))


def compile_library(weight_type: str) -> Path:
    """Path of the compiled library for weights of `weight_type` ("float32", "bfloat16", "float16", "int8").

    An existing library is used if it is whole. Raises BuildError with the compiler's first error line. If several
    processes need a library at once, such as the ranks of a model, one of them builds it.
    """
    if weight_type not in WEIGHT_TYPES:
        raise BuildError(f"no C++ kernels for {weight_type!r}; expected one of {', '.join(WEIGHT_TYPES)}")
    command, isa = compiler(), instruction_set()
    flags = [
        "-std=c++17",
        "-O3",
        *ISA_FLAGS[isa],
        "-fopenmp",
        "-fPIC",
        "-shared",
        f"-DLABKIT_WEIGHT={WEIGHT_TYPES[weight_type]}",
        f"-DLABKIT_LAYOUTS={layouts()}",
    ]
    if cpu_field("vendor_id") == "AuthenticAMD":
        flags.append("-DLABKIT_AMD")
    if isa == "portable" and platform.machine() in ("aarch64", "arm64"):
        flags.append("-mcpu=native")
    program, *arguments = command
    key = _digest((os.path.realpath(program), *arguments, *flags, _version(command), " ".join(sorted(cpu_flags()))))
    folder = cache_folder()
    library = folder / f"kernels-{weight_type}-{isa}-{key}.so"
    if not _is_whole(library):
        with one_process(library.with_suffix(".lock"), BUILD_S):
            if not _is_whole(library):
                _remove_dead_builds(folder)
                _build(library, [*command, *flags])
    return library


def _build(library: Path, command: list[str]) -> None:
    with tempfile.NamedTemporaryFile(dir=library.parent, suffix=".so", delete=False) as partial:
        pass
    path = Path(partial.name)
    try:
        done = finished([*command, str(ENTRY), "-o", str(path)])
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            first = next((line for line in lines if "error" in line.lower()), lines[0])
            raise BuildError(f"{Path(command[0]).name} could not compile the kernels: {first}")
        with path.open("ab") as file:  # the loader reads no further than the sections of the library
            file.write(hashlib.sha256(path.read_bytes()).digest())
        path.replace(library)
    finally:
        path.unlink(missing_ok=True)


def _is_whole(library: Path) -> bool:
    """Whether a library exists and ends with its digest."""
    try:
        status = library.stat()
    except FileNotFoundError:
        return False
    return _agrees_with_its_digest(library, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _agrees_with_its_digest(library: Path, *identity: int) -> bool:
    """Whether a library matches its digest. It is read once for each `identity`, which changes with the file."""
    data = library.read_bytes()
    return hashlib.sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]


def _remove_dead_builds(folder: Path) -> None:
    """Removes unfinished builds of killed processes. Files of builds that may still run stay."""
    for path in folder.glob("tmp*.so"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # finished meanwhile, or another user's
            if time() - path.stat().st_mtime > DEAD_S:
                path.unlink()


@functools.lru_cache(maxsize=16)
def _open(path: Path) -> ctypes.CDLL:
    import torch  # noqa: F401  loads its OpenMP runtime first, so that kernels and torch share one team of threads

    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"{path} can't be loaded ({error}); delete it, or name another folder in LABKIT_CACHE if this one is noexec"
        ) from None
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, LONG if name in WITH_RESULT else None
        if name in ALLOCATING:
            function.errcheck = _require_memory
    return library


def load(weight_type: str) -> ctypes.CDLL:
    """The loaded library for `weight_type`, compiled if necessary. Raises BuildError."""
    library = _open(compile_library(weight_type))
    _in_use[weight_type, os.environ.get("LABKIT_ISA")] = (library, monotonic() + RECHECK_S)
    return library


def in_use(weight_type: str) -> ctypes.CDLL:
    """As `load`, but looks for edited sources only twice a second: a look takes milliseconds, and a kernel's call
    microseconds.
    """
    library, until = _in_use.get((weight_type, os.environ.get("LABKIT_ISA")), (None, 0.0))
    return library if library is not None and monotonic() < until else load(weight_type)


def in_use_already() -> ctypes.CDLL | None:
    """As `in_use`, for the weight type that this process began to use last; None: it uses none yet. For ops without
    weights, which every library has.
    """
    forced = os.environ.get("LABKIT_ISA")
    used = [weight_type for weight_type, isa in _in_use if isa == forced]
    return in_use(used[-1]) if used else None


def any_library() -> ctypes.CDLL:
    """A library for ops without weights: the one in use, or else the library of float32. Raises BuildError."""
    return in_use_already() or load("float32")


def unavailable() -> str | None:
    """The reason why the C++ kernels can't run in this process, or None if they can."""
    try:
        in_use("float32")
    except BuildError as error:
        return str(error)
    return None
