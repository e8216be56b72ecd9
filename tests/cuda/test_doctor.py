"""``chord doctor`` on healthy, bare and broken machines."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from chord_runtime.commands.doctor import doctor as command
from chord_runtime.cuda import compile, doctor
from chord_runtime.cuda.doctor import Finding, Need, Status
from chord_runtime.errors import KernelError


def find(findings: list[Finding], name: str) -> Finding:
    return next(item for item in findings if item.name == name)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two H200s, as far as the checks can see."""
    pytest.importorskip("cuda.bindings.driver", reason="the CUDA bindings are an extra")
    monkeypatch.setenv("CHORD_CACHE_DIR", str(tmp_path / "cache"))
    card = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150e9)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card)
    monkeypatch.setattr("cuda.bindings.driver.cuDriverGetVersion", lambda: (0, 13000))
    monkeypatch.setattr(compile, "nvrtc_version", lambda: "13.0+1")
    (tmp_path / "csrc" / "kernels").mkdir(parents=True)
    (tmp_path / "csrc" / "kernels" / "masked.cu").touch()
    monkeypatch.setattr("chord_runtime.resources.csrc_dir", lambda: tmp_path / "csrc")


@pytest.mark.usefixtures("gpu")
def test_a_healthy_machine_is_ready(tmp_path: Path) -> None:
    findings = doctor.examine()
    assert doctor.lacks(findings, Need.KERNELS) == []
    assert find(findings, "GPU").found == "2 × NVIDIA H200 (sm_90a, 150 GB)"
    assert find(findings, "CUDA driver").found == "for CUDA 13.0"
    assert find(findings, "kernel cache").found == f"{tmp_path / 'cache'} (0 kernels)"
    assert list((tmp_path / "cache").iterdir()) == []
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 0
    assert result.output.splitlines()[-2:] == ["convert: ready", "kernels: ready"]


@pytest.mark.usefixtures("gpu")
def test_a_driver_older_than_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda.bindings.driver.cuDriverGetVersion", lambda: (0, 12080))
    finding = find(doctor.examine(), "CUDA driver")
    assert finding.status is Status.MISSING
    assert finding.found.startswith("for CUDA 12.8, older than NVRTC 13.0")
    assert "update the driver" in finding.advice


@pytest.mark.usefixtures("gpu")
def test_an_unsupported_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, total_memory=80e9)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card)
    finding = find(doctor.examine(), "GPU")
    assert finding.status is Status.MISSING
    assert "8.0 is not supported" in finding.found


@pytest.mark.usefixtures("gpu")
def test_a_cache_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORD_CACHE_DIR", "/proc/chord")
    findings = doctor.examine()
    assert find(findings, "kernel cache").status is Status.OPTIONAL
    assert "CHORD_CACHE_DIR" in find(findings, "kernel cache").advice
    assert doctor.lacks(findings, Need.KERNELS) == []


@pytest.mark.usefixtures("gpu")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise KernelError("NVRTC cannot be loaded; install it")

    monkeypatch.setattr(compile, "nvrtc_version", broken)
    finding = find(doctor.examine(), "NVRTC")
    assert (finding.status, finding.found) == (Status.MISSING, "NVRTC cannot be loaded; install it")


def test_a_machine_without_gpu_or_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for name in [name for name in sys.modules if name == "cuda" or name.startswith("cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cuda", None)
    compile._nvrtc.cache_clear()
    compile.nvrtc_version.cache_clear()
    try:
        findings = doctor.examine()
        names = {item.name for item in doctor.lacks(findings, Need.KERNELS)}
        assert {"torch CUDA build", "CUDA driver", "GPU", "NVRTC"} <= names
        assert all(item.advice or "pip install" in item.found for item in doctor.lacks(findings, Need.KERNELS))
        result = CliRunner().invoke(command, ["--json"])
    finally:
        compile._nvrtc.cache_clear()
        compile.nvrtc_version.cache_clear()
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert (report["need"], report["ready"]) == ("kernels", False)
    assert {item["name"]: item["status"] for item in report["findings"]}["GPU"] == "missing"


def test_need_convert_ignores_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert CliRunner().invoke(command, ["--need", "convert"]).exit_code == 0
    assert CliRunner().invoke(command, []).exit_code == 1


def test_a_packer_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chord_runtime.format.native.library", lambda: None)
    finding = find(doctor.examine(), "native packer")
    assert finding.status is Status.OPTIONAL
    assert "C++17 compiler" in finding.advice


def test_optional_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "vllm":
            return "0.25.1"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    findings = doctor.examine()
    assert find(findings, "vllm") == Finding("vllm", Need.EXTRA, Status.OK, "0.25.1")
    assert find(findings, "humming-kernels").status is Status.OPTIONAL
    assert "pip install humming-kernels" in find(findings, "humming-kernels").advice
