"""The compiler and its disk cache, on small kernels of the tests' own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="the CUDA bindings are an extra")

from chord_runtime.cuda import cache, compile
from chord_runtime.errors import KernelError, UsageError
from tests.cuda.sources import SCALE, SLOW, TWO, write_sources


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small source root and a cache of its own."""
    monkeypatch.setenv("CHORD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CHORD_NVRTC_OPTIONS", raising=False)
    source = tmp_path / "csrc"
    write_sources(source)
    return source


def entries(root: Path) -> list[Path]:
    return sorted((root.parent / "cache").glob("*-sm_*"))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_compiles_without_a_gpu(root: Path, arch: str) -> None:
    cubin = compile.compile_kernel("scale", {"TIMES": 3}, arch, root=root)
    assert cubin.code.startswith(b"\x7fELF")
    assert cubin.registers > 0
    assert cubin.problems() == []
    assert not cubin.cached
    assert cubin.title == f"scale(TIMES=3) for {arch}"


def test_second_call_reads_the_disk(root: Path) -> None:
    first = compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
    second = compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
    assert second.cached
    assert (second.code, second.log, second.registers) == (first.code, first.log, first.registers)


def test_the_key_holds_all_that_decides_the_code(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh(times: int = 3, arch: str = "sm_90a") -> bool:
        return not compile.compile_kernel("scale", {"TIMES": times}, arch, root=root).cached

    assert fresh()
    assert not fresh()
    assert fresh(times=4)
    assert fresh(arch="sm_100a")
    (root / "chord" / "two.cuh").write_text(TWO.replace("2.0f", "4.0f"))  # included by an included header
    assert fresh()
    monkeypatch.setenv("CHORD_NVRTC_OPTIONS", "-lineinfo")
    assert fresh()
    monkeypatch.setattr(compile, "nvrtc_version", lambda: "99.0+1")
    assert fresh()


def test_a_header_with_the_kernels_name_beside_it_wins_over_the_root(root: Path) -> None:
    (root / "kernels" / "chord").mkdir()
    (root / "kernels" / "chord" / "factor.cuh").write_text("__device__ inline float factor() { return 7.0f; }\n")
    assert list(compile.read_sources("scale", root)) == ["kernels/scale.cu", "kernels/chord/factor.cuh"]


@pytest.mark.parametrize("damage", [b"", b"junk", b"\x7fELF" * 100])
def test_damaged_entry_is_compiled_again(root: Path, damage: bytes) -> None:
    good = compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
    [entry] = entries(root)
    entry.write_bytes(damage)
    again = compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
    assert not again.cached
    assert again.code == good.code
    assert compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root).cached


def test_one_flipped_byte_is_found(root: Path) -> None:
    compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
    [entry] = entries(root)
    raw = bytearray(entry.read_bytes())
    raw[-100] ^= 1
    entry.write_bytes(raw)
    assert not compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root).cached


def test_entry_of_another_layout_is_compiled_again(root: Path) -> None:
    compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
    [entry] = entries(root)
    cache.KernelCache(entry.parent).write(entry.name, b'{"unknown": 1}\ncode')
    assert not compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root).cached


@pytest.mark.parametrize("folder", ["/proc/chord", "/dev/full/chord"])
def test_unusable_folder_costs_one_warning(root: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv("CHORD_CACHE_DIR", folder)
    compile._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="CHORD_CACHE_DIR") as caught:
        first = compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
        second = compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
    assert len(caught) == 1
    assert not first.cached
    assert not second.cached


def test_full_disk_leaves_nothing_behind(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    compile._warn_once.cache_clear()
    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        cubin = compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
    assert cubin.registers > 0
    assert [path for path in (root.parent / "cache").iterdir() if path.is_file()] == []


def test_compile_error_is_one_clear_error(root: Path) -> None:
    (root / "kernels" / "scale.cu").write_text(SCALE.replace("factor()", "nothing()"))
    with pytest.raises(KernelError) as caught:
        compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
    text = str(caught.value)
    assert text.startswith("kernel scale(TIMES=3) does not compile for sm_90a with NVRTC ")
    assert "kernels/scale.cu(4): error" in text
    assert 'identifier "nothing" is undefined' in text
    assert entries(root) == []


def test_missing_kernel_header_and_architecture(root: Path) -> None:
    with pytest.raises(KernelError, match=r"no kernel 'absent'.*does not exist"):
        compile.compile_kernel("absent", {}, "sm_90a", root=root)
    with pytest.raises(KernelError, match="'sm_80' is not supported; choose one of sm_90a"):
        compile.compile_kernel("scale", {"TIMES": 3}, "sm_80", root=root)
    (root / "chord" / "two.cuh").unlink()
    with pytest.raises(KernelError, match=r"chord/two\.cuh"):
        compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)


@pytest.mark.parametrize(("name", "text"), SLOW.items())
def test_what_makes_a_kernel_slow_is_reported(root: Path, name: str, text: str) -> None:
    (root / "kernels" / f"{name}.cu").write_text(text)
    with pytest.warns(RuntimeWarning, match=f"kernel {name}.*will be slow"):
        cubin = compile.compile_kernel(name, {}, "sm_90a", root=root)
    problems = cubin.problems()
    expected = {"local": "400 B of local memory", "spilling": "spills", "serialised": "serialized due to"}
    assert any(expected[name] in problem for problem in problems)
    assert all(problem.startswith("C75") for problem in problems) or name != "serialised"


@pytest.mark.parametrize(("arch", "limit"), [("sm_90a", 232448), ("sm_120a", 101376)])
def test_shared_memory_over_the_limit(root: Path, arch: str, limit: int) -> None:
    (root / "kernels" / "scale.cu").write_text(SCALE + 'extern "C" __constant__ unsigned chord_shared_bytes = TIMES;\n')
    assert compile.compile_kernel("scale", {"TIMES": limit}, arch, root=root).problems() == []
    cubin = compile.compile_kernel("scale", {"TIMES": limit + 16}, arch, root=root, warn=False)
    assert cubin.dynamic_shared == limit + 16
    assert cubin.problems() == [f"needs {limit + 16} B of shared memory, over the {limit} B of {arch}"]


def test_constants_that_the_source_exports(root: Path) -> None:
    exported = """\
extern "C" __constant__ unsigned chord_shared_bytes = 12345;
extern "C" __device__ const unsigned chord_threads = TIMES * 128;
extern "C" __constant__ unsigned other = 7;
extern "C" __constant__ unsigned chord_pair[2] = {1, 2};
"""
    (root / "kernels" / "scale.cu").write_text(SCALE + exported)
    cubin = compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
    assert cubin.constants == {"chord_shared_bytes": 12345, "chord_threads": 384}
    again = compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
    assert (again.cached, again.constants, again.dynamic_shared) == (True, cubin.constants, 12345)


def test_arch_of_a_device() -> None:
    assert compile.arch_of((9, 0)) == "sm_90a"
    assert compile.arch_of((10, 3)) == "sm_103a"
    with pytest.raises(KernelError, match=r"8\.0 is not supported"):
        compile.arch_of((8, 0))


CHILD = """\
import sys, pathlib
from chord_runtime.cuda import compile
real = compile._compile
def traced(*args):
    with open(sys.argv[2], "a") as file:
        file.write("compiled\\n")
    return real(*args)
compile._compile = traced
assert compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=pathlib.Path(sys.argv[1])).registers > 0
"""


def test_many_processes_compile_once(root: Path) -> None:
    trace = root.parent / "trace"
    command = [sys.executable, "-c", CHILD, str(root), str(trace)]
    children = [subprocess.Popen(command) for _ in range(6)]
    assert [child.wait(timeout=120) for child in children] == [0] * 6
    assert trace.read_text().splitlines() == ["compiled"]


def test_lock_of_a_dead_holder_is_free(tmp_path: Path) -> None:
    holder = (
        "import sys, time, pathlib\n"
        "from chord_runtime.cuda.cache import KernelCache\n"
        "with KernelCache(pathlib.Path(sys.argv[1])).lock('k'):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    threading.Timer(0.2, child.kill).start()
    started = time.monotonic()
    with cache.KernelCache(tmp_path).lock("k"):
        waited = time.monotonic() - started
    child.wait()
    child.stdout.close()
    assert 0.1 < waited < 20


def test_lock_held_for_ever_is_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 0.05)
    disk = cache.KernelCache(tmp_path)
    with disk.lock("k"), disk.lock("k"):
        pass


def test_cache_folder_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORD_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache.cache_dir() == Path("/a")
    monkeypatch.delenv("CHORD_CACHE_DIR")
    assert cache.cache_dir() == Path("/b/chord")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache.cache_dir() == Path("/c/.cache/chord")


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("CHORD_CACHE_DIR", "~nosuchuser/x", "CHORD_CACHE_DIR=~nosuchuser/x names a user without a home folder"),
        ("CHORD_NVRTC_OPTIONS", '"x', r'CHORD_NVRTC_OPTIONS="x cannot be split .*: No closing quotation'),
    ],
)
def test_variables_that_cannot_be_meant(
    root: Path, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, message: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError, match=message):
        compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)


def test_warm_read_is_fast(root: Path) -> None:
    compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best = min(_timed(root) for _ in range(5))
    assert best < 0.025


def _timed(root: Path) -> float:
    started = time.perf_counter()
    assert compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root).cached
    return time.perf_counter() - started


def test_entries_are_readable_by_others(root: Path) -> None:
    compile.compile_kernel("scale", {"TIMES": 3}, "sm_90a", root=root)
    assert entries(root)[0].stat().st_mode & 0o777 == 0o644
