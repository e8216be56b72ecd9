"""``python -m chord_convert.bench``: a whole conversion beside ``cp`` of the same bytes, on the disk you name.

Layers of full size are written once. Then, run by run and in turn, ``cp`` copies them and ``chord-convert`` converts
them, each from the same cache state and as a process of its own, from start to exit. A conversion syncs all it writes;
``cp`` does not, so the time of a sync after it is given too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from chord_runtime.units import human

_HIDDEN, _INTERMEDIATE = 7168, 2048
_EXPERTS = 48  # of one EP8 rank of Kimi K2
_POOL_BYTES = 64 << 20
_BOUND = 0.6  # what takes this much of the time is said to bound it
_MODULES = (
    ("down_proj", _HIDDEN, _INTERMEDIATE),
    ("gate_proj", _INTERMEDIATE, _HIDDEN),
    ("up_proj", _INTERMEDIATE, _HIDDEN),
)
_LAYER_BYTES = _EXPERTS * 3 * _HIDDEN * _INTERMEDIATE * 9 // 16


def write_layers(path: Path, layers: int, experts: int = _EXPERTS) -> int:
    """A checkpoint of full-size MoE layers with random codes and valid scales, synced; returns its tensors' bytes.

    One file a layer, tensors in the order in which the safetensors library writes them: by dtype, then by name.
    """
    path.mkdir(parents=True, exist_ok=True)
    codes = os.urandom(_POOL_BYTES)
    # BF16 in 2^-8 … 2^-7: exponent byte 0x3b, any mantissa.
    scales = bytearray(codes)
    scales[1::2] = b"\x3b" * (_POOL_BYTES // 2)
    weight_map: dict[str, str] = {}
    total = 0
    for number, layer in enumerate(range(1, layers + 1), 1):
        file = f"model-{number:05d}-of-{layers:06d}.safetensors"
        entries = sorted(_tensors(layer, experts))
        total += _write_file(path / file, entries, codes, bytes(scales))
        weight_map.update(dict.fromkeys((entry[1] for entry in entries), file))
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    (path / "config.json").write_text(json.dumps(_config(layers, experts)))
    return total


def _tensors(layer: int, experts: int) -> Iterator[tuple[int, str, str, tuple[int, ...], int]]:
    """(rank of the dtype in the file, name, dtype, shape, bytes)"""
    for expert in range(experts):
        for module, n, k in _MODULES:
            name = f"model.layers.{layer}.mlp.experts.{expert}.{module}"
            yield 0, f"{name}.weight_packed", "I32", (n, k // 8), n * k // 2
            yield 0, f"{name}.weight_shape", "I32", (2,), 8
            yield 1, f"{name}.weight_scale", "BF16", (n, k // 32), n * k // 16
    yield 1, f"model.layers.{layer}.mlp.gate.weight", "BF16", (experts, _HIDDEN), experts * _HIDDEN * 2


def _write_file(
    path: Path, entries: list[tuple[int, str, str, tuple[int, ...], int]], codes: bytes, scales: bytes
) -> int:
    header: dict[str, object] = {}
    end = 0
    for _, name, dtype, shape, size in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        at = 0
        for _, name, dtype, shape, size in entries:
            if name.endswith("weight_shape"):
                out.write(b"".join(n.to_bytes(4, "little") for n in _weight_shape(name)))
                continue
            pool = codes if dtype == "I32" else scales
            at = (at + 4 * shape[0]) % (_POOL_BYTES - size)
            out.write(memoryview(pool)[at // 4 * 4 : at // 4 * 4 + size])
        out.flush()
        os.fsync(out.fileno())
    return end


def _weight_shape(name: str) -> tuple[int, int]:
    return next((n, k) for module, n, k in _MODULES if f".{module}." in name)


def _config(layers: int, experts: int) -> dict[str, object]:
    weights = {"group_size": 32, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "int", "dynamic": False}
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": _HIDDEN,
        "moe_intermediate_size": _INTERMEDIATE, "n_routed_experts": experts, "num_experts_per_tok": 8,
        "num_hidden_layers": layers + 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "moe_layer_freq": 1,
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
        },
    }  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--directory", type=click.Path(path_type=Path), default=Path(), help="Where to write. Default: here.")
@click.option("--gigabytes", type=float, default=8.0, show_default=True, help="Size of the source.")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True)
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--cold/--warm", default=True, show_default=True, help="Source out of the page cache, or in it.")
def main(directory: Path, gigabytes: float, runs: int, workers: int, cold: bool) -> None:
    """Time chord-convert beside cp: medians of some runs, in turn, and what bounds the conversion.

    Needs three times --gigabytes of disk space; --warm also needs that much memory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="chord-bench-", dir=directory) as folder:
        source, output = Path(folder) / "source", Path(folder) / "output"
        layers = max(1, round(gigabytes * 1e9 / _LAYER_BYTES))
        size = write_layers(source, layers)
        state = "cold" if cold else "warm"
        click.echo(
            f"{human(size)}: {layers} layers × {_EXPERTS} experts of full size, {state} source, {workers} workers"
        )
        click.echo(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} before the first run")
        convert = [sys.executable, "-m", "chord_convert", str(source), "--ep", "1", "--workers", str(workers)]
        copies, synced, conversions = [], [], []
        cpu = 0.0
        for number in range(1, runs + 1):
            _prepare(source, output, cold)
            copies.append(_timed(["cp", "-r", str(source), str(output)])[0])
            synced.append(copies[-1] + _sync(output))
            _prepare(source, output, cold)
            seconds, busy = _timed([*convert, "-o", str(output)])
            conversions.append(seconds)
            cpu += busy / runs
            click.echo(
                f"run {number}: cp {copies[-1]:.2f} s, with sync {synced[-1]:.2f} s; convert {seconds:.2f} s "
                f"({busy:.2f} s of processor time)"
            )
        shutil.rmtree(output)
        writing, reading = _disk_speeds(Path(folder) / "disk", min(size, 2 << 30))
        click.echo(f"the disk alone writes {writing / 1e9:.2f} GB/s and reads {reading / 1e9:.2f} GB/s")
        moving = size / writing + (size / reading if cold else 0)
        _report(statistics.median(copies), statistics.median(synced), statistics.median(conversions), cpu, moving)


def _report(copy: float, synced: float, conversion: float, cpu: float, moving: float) -> None:
    """``moving``: seconds in which the disk alone moves as many bytes as the conversion makes it."""
    click.echo(f"median: cp {copy:.2f} s, cp and sync {synced:.2f} s, convert {conversion:.2f} s")
    click.echo(f"convert / cp = {conversion / copy:.2f}, convert / (cp and sync) = {conversion / synced:.2f}")
    shares = {"the disk": moving / conversion, "the processors": cpu / (os.cpu_count() or 1) / conversion}
    bound = max(shares, key=lambda name: shares[name])
    if shares[bound] < _BOUND:
        bound = "neither disk nor processors alone: other work on the machine, or one waiting for the other"
    click.echo(
        f"bound by {bound}. Of the conversion's time, the disk alone would take {shares['the disk']:.0%}, "
        f"its processor time spread over all processors {shares['the processors']:.0%}"
    )


def _prepare(source: Path, output: Path, cold: bool) -> None:
    """No output, nothing waiting to be written, and the source out of the page cache or in it."""
    shutil.rmtree(output, ignore_errors=True)
    os.sync()
    for file in source.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        if cold:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while os.read(descriptor, 16 << 20):
                pass
        os.close(descriptor)


def _timed(command: list[str]) -> tuple[float, float]:
    """(wall seconds, processor seconds) of a command, from start to exit."""
    before, started = os.times(), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds, after = time.monotonic() - started, os.times()
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, busy


def _sync(directory: Path) -> float:
    started = time.monotonic()
    for file in directory.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.monotonic() - started


def _disk_speeds(path: Path, size: int) -> tuple[float, float]:
    """Bytes per second of large writes to one file, synced, and of reading it, past the page cache where possible."""
    chunk = mmap.mmap(-1, 16 << 20)
    chunk.write(os.urandom(len(chunk)))
    size -= size % len(chunk)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
    speeds = []
    for reading in (False, True):
        started = time.monotonic()
        for offset in range(0, size, len(chunk)):
            if reading:
                os.preadv(descriptor, [chunk], offset)
            else:
                os.pwrite(descriptor, chunk, offset)
        os.fsync(descriptor)
        speeds.append(size / (time.monotonic() - started))
    os.close(descriptor)
    path.unlink()
    return speeds[0], speeds[1]


if __name__ == "__main__":
    main()
