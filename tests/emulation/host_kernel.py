"""Compiles a kernel of csrc/kernels for the CPU (see host_cuda.h) and calls it on torch tensors."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from chord_runtime.resources import csrc_dir


class HostKernel:
    """One instantiation; ``folder`` holds what is built. The kernel's text is its file's unless given."""

    def __init__(self, name: str, defines: Mapping[str, int], folder: Path, text: str | None = None) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("emulating a kernel needs g++")
        if text is None:
            text = (Path(csrc_dir()) / "kernels" / f"{name}.cu").read_text()
        text, _ = re.subn(r"asm\(\"cvt\.rn\.bf16x2\.f32[^\n]*;\n", "pair = host_bf16x2(low, high);\n", text)
        source, library = folder / f"{name}.cpp", folder / f"{name}-{'-'.join(map(str, defines.values()))}.so"
        entry = f'extern "C" void* entry() {{ return (void*)host::Launch<chord_{name}>::run; }}\n'
        source.write_text(f'#include "host_cuda.h"\n{text}{entry}')
        macros = [f"-D{key}={value}" for key, value in defines.items()]
        includes = [f"-I{Path(__file__).parent}", f"-I{csrc_dir()}"]
        options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-w"]
        subprocess.run([compiler, *options, *macros, *includes, str(source), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
        loaded.entry.restype = ctypes.c_void_p
        self._entry = loaded.entry()

    def __call__(self, blocks: tuple[int, int], threads: int, *arguments: torch.Tensor | int | None) -> None:
        values = [
            ctypes.c_void_p(a.data_ptr() if a is not None else None) if not isinstance(a, int) else ctypes.c_int(a)
            for a in arguments
        ]
        types = [ctypes.c_uint] * 3 + [type(value) for value in values]
        ctypes.CFUNCTYPE(None, *types)(self._entry)(*blocks, threads, *values)
