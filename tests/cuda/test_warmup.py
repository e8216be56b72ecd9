"""Compiling ahead, and the check that CI runs on every instantiation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("cuda.bindings.nvrtc", reason="the CUDA bindings are an extra")

from chord_runtime.commands import warmup as command_module
from chord_runtime.cuda import compile, select, warmup
from chord_runtime.errors import ChordError, KernelError, OutputError
from chord_runtime.format.layout import Mode
from tests.cuda.sources import SLOW, write_sources

GOOD = [("scale", {"TIMES": times}, arch) for times in (2, 3) for arch in ("sm_90a", "sm_100a")]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHORD_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "csrc"
    write_sources(source)
    for name, text in SLOW.items():
        (source / "kernels" / f"{name}.cu").write_text(text)
    monkeypatch.setattr(compile, "csrc_dir", lambda: source)
    return source


def run(monkeypatch: pytest.MonkeyPatch, work: list[warmup.Instantiation], *options: str) -> tuple[int, str]:
    monkeypatch.setattr(command_module, "instantiations", lambda archs: [item for item in work if item[2] in archs])
    result = CliRunner().invoke(command_module.warmup, ["--jobs", "2", *options])
    assert result.exception is None or isinstance(result.exception, ChordError), result.exception
    return (0 if result.exception is None else 1), result.output + str(result.exception or "")


def test_outcomes_keep_the_order_and_fill_the_cache(root: Path) -> None:
    first = list(warmup.warm_up(GOOD, jobs=2))
    assert [(item.name, item.defines, item.arch) for item in first] == GOOD
    assert all(item.cubin and not item.cubin.cached and item.problems == () for item in first)
    assert all(item.cubin and item.cubin.cached for item in warmup.warm_up(GOOD))


def test_command_prints_a_table_for_the_named_architecture(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(monkeypatch, GOOD, "--arch", "sm_100a", "--check")
    assert code == 0
    lines = text.splitlines()
    assert lines[0].split() == ["arch", "registers", "shared", "B", "spill", "B", "seconds", "from", "kernel"]
    assert [line.split()[0] for line in lines[1:3]] == ["sm_100a"] * 2
    assert lines[1].endswith("scale times=2")
    assert lines[3].startswith("2 kernels in ")


@pytest.mark.parametrize("name", SLOW)
def test_check_fails_on_what_makes_a_kernel_slow(root: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    work = [*GOOD, (name, {}, "sm_90a")]
    code, text = run(monkeypatch, work, "--arch", "sm_90a")
    assert code == 0, "without --check a slow kernel is reported, not refused"
    code, text = run(monkeypatch, work, "--arch", "sm_90a", "--check")
    assert code == 1
    assert "1 of 3 kernels failed; the first: " in text


def test_a_kernel_that_does_not_compile_fails_without_check(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "kernels" / "broken.cu").write_text("int x = ;\n")
    code, text = run(monkeypatch, [("broken", {}, "sm_90a"), *GOOD], "--arch", "sm_90a")
    assert code == 1
    assert "kernel broken() does not compile for sm_90a" in text
    assert "scale times=3" in text, "the others are compiled all the same"


@pytest.mark.parametrize("folder", ["/proc/nope", "/etc/hostname", "/tmp/" + "x" * 300])
def test_kernels_that_cannot_be_kept_fail_the_command(root: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv("CHORD_CACHE_DIR", folder)
    code, text = run(monkeypatch, GOOD, "--arch", "sm_90a")
    assert code == 1
    assert text.count("cannot be written") == 1
    assert f"the kernel cache {folder} cannot be written" in text and "set CHORD_CACHE_DIR" in text
    compile._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        assert run(monkeypatch, GOOD, "--arch", "sm_90a", "--check")[0] == 0, "the check does not need the cache"


def test_a_filled_cache_that_cannot_be_written_is_enough(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise OutputError("read-only")

    assert run(monkeypatch, GOOD, "--arch", "sm_90a")[0] == 0
    monkeypatch.setattr(compile.KernelCache, "write", refuse)
    assert run(monkeypatch, GOOD, "--arch", "sm_90a")[0] == 0
    assert run(monkeypatch, GOOD, "--arch", "sm_100a")[0] == 1


def test_json_is_one_object_a_kernel(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(monkeypatch, GOOD, "--arch", "sm_90a", "--json")
    assert code == 0
    rows = [json.loads(line) for line in text.splitlines()]
    assert [(row["kernel"], row["defines"]) for row in rows] == [("scale", {"TIMES": 2}), ("scale", {"TIMES": 3})]
    assert all(row["registers"] > 0 and row["problems"] == [] for row in rows)


def test_architecture_must_be_named_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(KernelError, match=r"no CUDA device is visible.*--arch, one of sm_90a"):
        warmup.detected_archs()


def test_architectures_of_mixed_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: [(9, 0), (10, 0), (9, 0)][index])
    assert warmup.detected_archs() == ["sm_90a", "sm_100a"]


def test_a_layer_is_compiled_behind_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: dict[str, set[tuple[tuple[str, int], ...]]] = {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(
        warmup, "_one", lambda item, root, keep: compiled.setdefault(item[0], set()).add(tuple(sorted(item[1].items())))
    )
    warmup.start_layer.cache_clear()
    warmup.start_layer(7168, 2048, 48, Mode.INDEXED, 0)
    for thread in threading.enumerate():
        if thread.name == "chord-compile":
            assert thread.daemon
            thread.join()
    for n, k, rows, output in ((4096, 7168, 0.2, select.SWIGLU), (4096, 7168, 300, select.SWIGLU), (7168, 2048, 8, 0)):
        tile = select.choose("indexed", n, k, 48, rows, "sm_90a")
        assert tuple(sorted(tile.defines(output).items())) in compiled["indexed"]
    assert sorted(map(repr, compiled)) == ["'align'", "'combine'", "'gather'", "'indexed'"], "plain strings"


def test_a_process_may_end_while_a_layer_is_compiled(tmp_path: Path) -> None:
    """NVRTC takes a thread that is left inside it at the end for a reason to abort."""
    program = """
import time
from types import SimpleNamespace
import torch
from chord_runtime.cuda import warmup
from chord_runtime.format.layout import Mode
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
warmup.start_layer(7168, 2048, 48, Mode.INDEXED, 0)
time.sleep(1.5)
raise SystemExit(7)
"""
    environment = {**os.environ, "CHORD_CACHE_DIR": str(tmp_path)}
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (7, "")
        shutil.rmtree(tmp_path)


def test_what_cannot_be_compiled_ahead_is_left_to_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    warmup.start_layer.cache_clear()
    warmup.start_layer(7168, 2048, 48, Mode.INDEXED, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setenv("CHORD_TILE", "warmgroups=4")
    warmup.start_layer(7168, 2048, 24, Mode.INDEXED, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "chord-compile"]
