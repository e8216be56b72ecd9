"""CUDA C++ under csrc/ → cubins, by NVRTC from the wheels that torch brings; no toolkit, no GPU, cached on disk.

NVRTC is called through cuda-bindings: cuda-core's ``Program`` takes the same options, but importing it costs 0.2 s,
four times the budget of a first launch with a warm cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from chord_runtime.cuda.cache import KernelCache, cache_dir
from chord_runtime.cuda.elf import exported_constants
from chord_runtime.errors import KernelError, OutputError, UsageError
from chord_runtime.resources import csrc_dir

# Dynamic plus static shared memory one block may use, bytes (CUDA programming guide, compute capabilities).
SHARED_LIMIT = {"sm_90a": 227 * 1024, "sm_100a": 227 * 1024, "sm_103a": 227 * 1024, "sm_120a": 99 * 1024}

_OPTIONS = ("--std=c++17", "--ptxas-options=-v")
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"', re.MULTILINE)
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# ptxas's notes on wgmma pipelines and register budgets: C7512, C7513 and C7520 mean that wgmma runs one by one, C7517
# and C7519 that ptxas put a wait or a fence of its own between them. None is right in a shipped kernel.
_NOTE = re.compile(r"^ptxas .*\((C75\d\d)\) (.*)$", re.MULTILINE)
_LOG_LINES = 12


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel and what ptxas says of it."""

    name: str
    arch: str
    defines: dict[str, int]
    code: bytes
    log: str
    registers: int  # a thread
    static_shared: int  # bytes a block
    constants: dict[str, int]  # what the source exports: extern "C" __constant__ unsigned chord_…
    stack: int  # bytes of local memory a thread, spills included
    spill_stores: int  # bytes
    spill_loads: int  # bytes
    compile_s: float
    cached: bool  # read from disk rather than compiled by this call

    @property
    def title(self) -> str:
        """The instantiation in words: name, defines, architecture."""
        defines = ", ".join(f"{key}={value}" for key, value in sorted(self.defines.items()))
        return f"{self.name}({defines}) for {self.arch}"

    @property
    def dynamic_shared(self) -> int:
        """Bytes of dynamic shared memory to launch with: ``chord_shared_bytes``, 0 if the source exports none."""
        return self.constants.get("chord_shared_bytes", 0)

    def problems(self) -> list[str]:
        """What must not be in a shipped kernel: serialised wgmma, local memory, too much shared memory."""
        notes = {code: f"{code}: {text}" for code, text in reversed(_NOTE.findall(self.log))}
        found = [notes[code] for code in sorted(notes)]
        if not self.registers:
            found.append("ptxas reported no resource usage")
        if self.spill_stores or self.spill_loads:
            found.append(f"spills {self.spill_stores} B stored, {self.spill_loads} B loaded")
        elif self.stack:
            found.append(f"uses {self.stack} B of local memory a thread (an array indexed at run time?)")
        shared, limit = self.static_shared + self.dynamic_shared, SHARED_LIMIT[self.arch]
        if shared > limit:
            found.append(f"needs {shared} B of shared memory, over the {limit} B of {self.arch}")
        return found


def arch_of(capability: tuple[int, int]) -> str:
    """The NVRTC target of a device's compute capability.

    Raises:
        KernelError: Chord has no kernels for it.
    """
    arch = f"sm_{capability[0]}{capability[1]}a"
    if arch not in SHARED_LIMIT:
        raise KernelError(
            f"compute capability {capability[0]}.{capability[1]} is not supported; Chord's kernels are for "
            f"{', '.join(SHARED_LIMIT)} (Hopper and Blackwell)"
        )
    return arch


def compile_kernel(
    name: str, defines: Mapping[str, int], arch: str, *, root: Path | None = None, warn: bool = True, keep: bool = False
) -> Cubin:
    """Compile ``kernels/{name}.cu``, or read it from the disk cache.

    A cache that cannot be written only costs time: each process compiles again, after one warning.

    Args:
        name: file under ``kernels/`` of the source root, without ``.cu``.
        defines: macros, each an integer.
        arch: ``sm_90a``, ``sm_100a``, ``sm_103a`` or ``sm_120a``.
        root: the folder that ``#include "chord/…"`` starts from; the package's csrc/ by default.
        warn: warn of what ``Cubin.problems`` finds; a caller that reports it itself says False.
        keep: refuse a cache that cannot be written, rather than warn of it.

    Raises:
        KernelError: no NVRTC, an unknown architecture or kernel, or a compile error (with the log's first lines).
        OutputError: with ``keep``, the cache cannot be written.
        UsageError: ``CHORD_CACHE_DIR`` or ``CHORD_NVRTC_OPTIONS`` cannot be meant.
    """
    if arch not in SHARED_LIMIT:
        raise KernelError(f"architecture {arch!r} is not supported; choose one of {', '.join(SHARED_LIMIT)}")
    root = csrc_dir() if root is None else root
    sources = read_sources(name, root)
    options = [*_OPTIONS, f"--gpu-architecture={arch}", *_extra_options()]
    options += [f"--define-macro={key}={int(value)}" for key, value in sorted(defines.items())]
    described = json.dumps([nvrtc_version(), options, [[path, text.decode()] for path, text in sources.items()]])
    entry = f"{name}-{arch}-{hashlib.sha256(described.encode()).hexdigest()[:40]}"
    disk = KernelCache(cache_dir())
    if (found := _decode(disk.read(entry))) is None:
        with disk.lock(entry):
            if (found := _decode(disk.read(entry))) is None:
                found = _compile(name, dict(defines), arch, sources, [*options, f"--include-path={root}"])
                try:
                    disk.write(entry, _encode(found))
                except OutputError as error:
                    if keep:
                        raise
                    _warn_once(str(error))
    if warn and (bad := found.problems()):
        warnings.warn(f"kernel {found.title} will be slow: {'; '.join(bad)}", RuntimeWarning, stacklevel=2)
    return found


def _extra_options() -> list[str]:
    text = os.environ.get("CHORD_NVRTC_OPTIONS", "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"CHORD_NVRTC_OPTIONS={text} cannot be split into options as a shell does: {error}") from error


@cache
def _warn_once(text: str) -> None:
    warnings.warn(f"{text}. Until then every process compiles its kernels", RuntimeWarning, stacklevel=3)


def read_sources(name: str, root: Path) -> dict[str, bytes]:
    """The kernel's text and that of every header it includes, by path under ``root``; the kernel comes first.

    Conditional includes count whether or not they are taken: a cache key may be too fine, never too coarse.
    """
    kernel = root / "kernels" / f"{name}.cu"
    if not kernel.is_file():
        raise KernelError(f"there is no kernel {name!r}: {kernel} does not exist; the installation is incomplete")
    sources: dict[str, bytes] = {}
    pending = [kernel]
    while pending:
        path = pending.pop()
        relative = os.path.relpath(path, root)
        if relative in sources:
            continue
        sources[relative] = text = path.read_bytes()
        for match in _INCLUDE.findall(text):
            included = match.decode()
            pending += [found for base in (path.parent, root) if (found := base / included).is_file()][:1]
    return sources


@cache
def nvrtc_version() -> str:
    """``major.minor`` of the NVRTC that is loaded, and its file's size, which tells patch releases apart."""
    version = _check(_nvrtc().nvrtcVersion())
    path = nvrtc_path()
    return f"{version[0]}.{version[1]}+{path.stat().st_size if path else 0}"


def nvrtc_path() -> Path | None:
    """The library file of NVRTC, where the loader tells it."""
    try:
        from cuda import pathfinder
    except ImportError:  # cuda-bindings before 13 finds its libraries itself
        return None
    found = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    return Path(found) if found else None


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:
        raise KernelError(
            f"NVRTC, the CUDA run-time compiler, cannot be loaded ({type(error).__name__}: {error}); install it with "
            "`pip install 'chord-moe[cuda]'`"
        ) from error
    return nvrtc


def _compile(name: str, defines: dict[str, int], arch: str, sources: Mapping[str, bytes], options: list[str]) -> Cubin:
    nvrtc = _nvrtc()
    path, text = next(iter(sources.items()))
    started = time.perf_counter()
    program = _check(nvrtc.nvrtcCreateProgram(text, path.encode(), 0, [], []))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
        log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        text_log = log.rstrip(b"\0").decode(errors="replace").strip()
        if int(status):
            raise KernelError(_explain(name, defines, arch, status.name, text_log))
        code = _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    frames = [tuple(map(int, found)) for found in _FRAME.findall(text_log)] or [(0, 0, 0)]
    return Cubin(
        name=name,
        arch=arch,
        defines=defines,
        code=code,
        log=text_log,
        registers=_largest(_USED, text_log),
        static_shared=_largest(_SHARED, text_log),
        constants=exported_constants(code),
        stack=max(frame[0] for frame in frames),
        spill_stores=max(frame[1] for frame in frames),
        spill_loads=max(frame[2] for frame in frames),
        compile_s=time.perf_counter() - started,
        cached=False,
    )


def _explain(name: str, defines: Mapping[str, int], arch: str, status: str, log: str) -> str:
    lines = log.splitlines()
    first = next((index for index, line in enumerate(lines) if "error" in line), 0)
    shown = "\n  ".join(lines[first : first + _LOG_LINES]) or "(the log is empty)"
    macros = ", ".join(f"{key}={value}" for key, value in sorted(defines.items()))
    return f"kernel {name}({macros}) does not compile for {arch} with NVRTC {nvrtc_version()} ({status}):\n  {shown}"


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status):
        raise KernelError(f"NVRTC failed with {status.name}; `chord doctor` shows which NVRTC is used")
    return values[0] if len(values) == 1 else values


def _fetch(size: Any, get: Any, program: Any) -> bytes:
    buffer = bytearray(_check(size(program)))
    _check(get(program, buffer))
    return bytes(buffer)


def _largest(pattern: re.Pattern[str], log: str) -> int:
    return max(map(int, pattern.findall(log)), default=0)


def _encode(cubin: Cubin) -> bytes:
    facts = asdict(cubin)
    code: bytes = facts.pop("code")
    return json.dumps(facts).encode() + b"\n" + code


def _decode(payload: bytes | None) -> Cubin | None:
    if payload is None:
        return None
    facts, _, code = payload.partition(b"\n")
    try:
        return replace(Cubin(code=code, **json.loads(facts)), cached=True)
    except (TypeError, ValueError):  # written by another version of this class
        return None
