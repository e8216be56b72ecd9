"""A wheel carries what a checkout has: kernels, schemas, the native packer; and it works from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tracked(*folders: str) -> list[str]:
    """Files of the project, without what builds and editors leave beside them."""
    command = ["git", "ls-files", *folders]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # Build from a copy: setuptools leaves a build/ folder behind, whose old files would travel in the next wheel.
    source = out / "source"
    for name in tracked():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source],
        check=True,
        capture_output=True,
    )
    return next(out.glob("*.whl"))


def test_carries_every_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    python = {name for name in tracked("chord_convert", "chord_runtime") if name.endswith(".py")}
    assert python <= names, "a package is missing from [tool.setuptools] packages"
    for folder, endings in {"csrc": (".cu", ".cuh"), "schemas": (".json",)}.items():
        carried = {f"chord_runtime/{name}" for name in tracked(folder) if name.endswith(endings)}
        assert carried
        assert carried <= names
    assert any(name.startswith("chord_runtime/format/_pack") for name in names)


def test_works_installed(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel], check=True
    )
    program = (
        "import chord_runtime, pathlib\n"
        "from chord_runtime.resources import csrc_dir, schema\n"
        "from chord_runtime.format import native\n"
        "assert pathlib.Path(chord_runtime.__file__).is_relative_to(pathlib.Path('site').resolve())\n"
        "assert list((csrc_dir() / 'kernels').glob('*.cu')) and schema('manifest')\n"
        "assert native.library() is not None\n"
        "from chord_runtime.cuda import select\n"
        "from chord_runtime.cuda.compile import compile_kernel\n"
        "name, defines = next(select.all_configs('sm_90a'))\n"
        "assert compile_kernel(name, defines, 'sm_90a').registers and compile_kernel(name, defines, 'sm_90a').cached\n"
        "print('works')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site), "CHORD_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "works\n", done.stderr
