"""What this machine has and lacks for converting and for running the kernels, with what to do about each lack."""

from __future__ import annotations

import os
import sys
import uuid
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from importlib import metadata

from chord_runtime.errors import ChordError


class Status(str, Enum):
    OK = "ok"
    OPTIONAL = "optional"
    """Not there, and only some uses need it."""
    MISSING = "missing"


class Need(str, Enum):
    """What a check is for."""

    CONVERT = "convert"
    KERNELS = "kernels"
    EXTRA = "extra"


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked for, what was found, what to do."""

    name: str
    need: Need
    status: Status
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Run every check; none needs a GPU, and none fails because another did."""
    checks: list[tuple[str, Need, Callable[[], Finding]]] = [
        ("python", Need.CONVERT, _python),
        ("torch", Need.CONVERT, _torch),
        ("native packer", Need.CONVERT, _packer),
        ("torch CUDA build", Need.KERNELS, _torch_cuda),
        ("CUDA driver", Need.KERNELS, _driver),
        ("GPU", Need.KERNELS, _gpus),
        ("NVRTC", Need.KERNELS, _nvrtc),
        ("kernel sources", Need.KERNELS, _sources),
        ("kernel cache", Need.KERNELS, _cache),
    ]
    packages = {
        "vllm": "serve with `pip install 'vllm>=0.30,<0.34'` and `vllm serve`",
        "transformers": "load with `pip install transformers`",
        "humming-kernels": "compare in `chord bench` with `pip install humming-kernels`",
        "matplotlib": "plot with `pip install 'chord-moe[bench]'`",
        "ray": "convert on several machines with `pip install 'chord-moe[ray]'`",
    }
    return [_guarded(*check) for check in checks] + [_package(name, advice) for name, advice in packages.items()]


def lacks(findings: Iterable[Finding], need: Need) -> list[Finding]:
    """What is missing for ``need``; running the kernels takes what converting takes, too."""
    wanted = {Need.CONVERT, need}
    return [finding for finding in findings if finding.need in wanted and finding.status is Status.MISSING]


def _guarded(name: str, need: Need, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a broken installation can fail in any way, and this is where it is looked at
        text = str(error) if isinstance(error, ChordError) else f"{type(error).__name__}: {error}"
        advice = "" if isinstance(error, ChordError) else "reinstall with `pip install 'chord-moe[cuda]'`"
        return Finding(name, need, Status.MISSING, text, advice)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 10)
    return Finding("python", Need.CONVERT, _status(good), version, "" if good else "use Python 3.10 or later")


def _torch() -> Finding:
    import torch

    return Finding("torch", Need.CONVERT, Status.OK, torch.__version__)


def _torch_cuda() -> Finding:
    import torch

    if torch.version.cuda is None:
        return Finding(
            "torch CUDA build",
            Need.KERNELS,
            Status.MISSING,
            "CPU build",
            "install a CUDA build of torch to run the kernels",
        )
    return Finding("torch CUDA build", Need.KERNELS, Status.OK, f"CUDA {torch.version.cuda}")


def _driver() -> Finding:
    from cuda.bindings import driver

    compiler = int(_nvrtc_number().split(".")[0])
    try:
        status, version = driver.cuDriverGetVersion()
    except Exception:  # the bindings cannot load libcuda.so.1
        status, version = 1, 0
    found = f"for CUDA {version // 1000}.{version % 1000 // 10}"
    if int(status) or not version:
        advice = f"install an NVIDIA driver for CUDA {compiler} or later"
        return Finding("CUDA driver", Need.KERNELS, Status.MISSING, "none", advice)
    if compiler > version // 1000:
        advice = "update the driver, or install the nvidia-cuda-nvrtc of the driver's CUDA release"
        found += f", older than NVRTC {_nvrtc_number()}, whose kernels it cannot load"
        return Finding("CUDA driver", Need.KERNELS, Status.MISSING, found, advice)
    return Finding("CUDA driver", Need.KERNELS, Status.OK, found)


def _gpus() -> Finding:
    import torch

    from chord_runtime.cuda.compile import arch_of

    count = torch.cuda.device_count()
    if not count:
        return Finding(
            "GPU",
            Need.KERNELS,
            Status.MISSING,
            "none visible",
            "run on a Hopper or Blackwell GPU; see CUDA_VISIBLE_DEVICES",
        )
    found = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        arch = arch_of((properties.major, properties.minor))
        found.append(f"{properties.name} ({arch}, {properties.total_memory / 1e9:.0f} GB)")
    shown = ", ".join(f"{found.count(name)} × {name}" for name in dict.fromkeys(found))
    return Finding("GPU", Need.KERNELS, Status.OK, shown)


def _nvrtc_number() -> str:
    from chord_runtime.cuda.compile import nvrtc_version

    return nvrtc_version().split("+")[0]


def _nvrtc() -> Finding:
    from chord_runtime.cuda.compile import nvrtc_path

    return Finding("NVRTC", Need.KERNELS, Status.OK, f"{_nvrtc_number()} ({nvrtc_path() or 'path unknown'})")


def _sources() -> Finding:
    from chord_runtime.resources import csrc_dir

    folder = csrc_dir()
    kernels = sorted(path.stem for path in (folder / "kernels").glob("*.cu"))
    if not kernels:
        return Finding("kernel sources", Need.KERNELS, Status.MISSING, f"none under {folder}", "reinstall chord-moe")
    return Finding("kernel sources", Need.KERNELS, Status.OK, f"{', '.join(kernels)} ({folder})")


def _cache() -> Finding:
    from chord_runtime.cuda.cache import cache_dir

    folder = cache_dir()
    advice = "set CHORD_CACHE_DIR to a writable folder; until then each process compiles its kernels again"
    if folder is None:
        return Finding("kernel cache", Need.KERNELS, Status.OPTIONAL, "no home folder", advice)
    probe = folder / f".doctor-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        return Finding("kernel cache", Need.KERNELS, Status.OPTIONAL, f"{folder}: {error.strerror}", advice)
    count = sum(1 for _ in folder.glob("*-sm_*"))
    return Finding("kernel cache", Need.KERNELS, Status.OK, f"{folder} ({count} kernels)")


def _packer() -> Finding:
    from chord_runtime.format import native

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = native.library() is not None
    if built:
        return Finding("native packer", Need.CONVERT, Status.OK, "built")
    return Finding(
        "native packer",
        Need.CONVERT,
        Status.OPTIONAL,
        "not built: packing runs in PyTorch, slower",
        "reinstall chord-moe where a C++17 compiler is present",
    )


def _package(name: str, advice: str) -> Finding:
    try:
        return Finding(name, Need.EXTRA, Status.OK, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, Need.EXTRA, Status.OPTIONAL, "not installed", advice)


def _status(good: bool) -> Status:
    return Status.OK if good else Status.MISSING
