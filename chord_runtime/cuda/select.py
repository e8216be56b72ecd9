"""Which tile a call uses: a few rules from (mode, weight shape, experts, rows per expert, architecture), and why.

Nothing here touches a device. ``choose`` is called once for each distinct mode, shape and rows; ``explain`` prints
what it chooses, ``all_configs`` lists every instantiation it can choose, for compiling ahead. For experiments a tile
can be passed to the functions of :mod:`chord_runtime.cuda.launch`, or fields of every chosen tile overridden with
``CHORD_TILE=tokens=64``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

from chord_runtime.errors import UsageError
from chord_runtime.format.block import BLOCK_BYTES, BLOCK_K, BLOCK_ROWS

SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that one thread block may use on Hopper; a multiprocessor has 1 KB more for each block."""

PLAIN, GATE_UP, SWIGLU = 0, 1, 2
"""What the epilogue stores: ``CHORD_OUTPUT`` of csrc/chord/tile.cuh."""

MODES = ("contiguous", "masked", "indexed")

RUN_ROWS = 128
"""Contiguous runs start at multiples of this; ``kRunRows`` of csrc/kernels/contiguous.cu."""

_HOPPER = "sm_90a"


@dataclass(frozen=True)
class TileConfig:
    """One instantiation of a kernel; csrc/chord/tile.cuh says what the figures mean."""

    tokens: int
    """Most tokens of a tile: N of the widest wgmma."""
    narrow: int
    """N for tiles with no more rows than this; ``tokens`` where one width serves all."""
    warpgroups: int
    """Consumer warpgroups of 128 threads; one more produces."""
    blocks: int
    """64-row blocks of the weight a warpgroup."""
    stage_k: int
    """k64 blocks a stage of the ring."""
    stages: int
    box: int = 0
    """Tokens of one tensor-map copy; 0 where rows are gathered."""
    producer_registers: int = 64
    resident: int = 0
    """k64 blocks, all of K, whose activations stay in shared memory for ``group`` tiles; 0: they come with weights."""
    slots: int = 0
    """Of activations that stay: with 2 the next are gathered while these are used; 0 where none stay."""
    group: int = 1
    """Tiles computed one after another on the same activations."""
    occupancy: int = 1
    """Thread blocks a multiprocessor."""
    why: str = field(default="", compare=False)

    @property
    def rows(self) -> int:
        """Rows of the weight that a tile covers."""
        return self.warpgroups * self.blocks * BLOCK_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.warpgroups + 1) * 128

    def shared_bytes(self, output: int) -> int:
        """Dynamic shared memory of a block: ``Shared`` of csrc/chord/tile.cuh, which checks this figure."""
        activations = (self.slots * self.resident or self.stages * self.stage_k) * self.tokens * BLOCK_K * 2
        weights = self.stages * self.stage_k * self.rows // BLOCK_ROWS * BLOCK_BYTES
        staging = min(self.tokens, 32) * self.blocks * BLOCK_ROWS * 2 // (2 if output == SWIGLU else 1)
        tables = self.tokens * 8
        barriers = self.stages * (16 + 16) + (self.slots or self.stages) * 16
        return activations + weights + barriers + self.warpgroups * (staging + tables) + 1024 + 128

    def defines(self, output: int) -> dict[str, int]:
        """The macros that instantiate it."""
        return {
            "CHORD_TOKENS": self.tokens,
            "CHORD_NARROW": self.narrow,
            "CHORD_WARPGROUPS": self.warpgroups,
            "CHORD_BLOCKS": self.blocks,
            "CHORD_STAGE_K": self.stage_k,
            "CHORD_STAGES": self.stages,
            "CHORD_RESIDENT": self.resident,
            "CHORD_SLOTS": self.slots or self.stages,
            "CHORD_GROUP": self.group,
            "CHORD_OCCUPANCY": self.occupancy,
            "CHORD_OUTPUT": output,
            "CHORD_PRODUCER_REGISTERS": self.producer_registers,
            "CHORD_SHARED_BYTES": self.shared_bytes(output),
            "CHORD_BOX": self.box,
        }


def choose(mode: str, n: int, k: int, experts: int, rows: float, arch: str, sms: int = 132) -> TileConfig:
    """The tile of a call.

    Args:
        mode: ``contiguous``, ``masked`` or ``indexed``.
        n, k, experts: shape of the weight.
        rows: rows an expert has on average, as far as the host knows; below 1, most experts have none.
        arch: NVRTC target of the device.
        sms: its multiprocessors.

    Raises:
        UsageError: ``CHORD_TILE`` names no field of a tile, a value that is not an integer, or no possible tile.
    """
    if arch != _HOPPER:
        chosen = TileConfig(16, 16, 1, 2, 1, 2, box=16, why="no wgmma: mma.sync, weights read once for 16 rows")
    elif mode == "contiguous":
        chosen = _prefill(128, 128, RUN_ROWS, "runs are 128 rows: one full-width wgmma, no narrower loop")
    elif mode == "masked":
        chosen = _masked(n, experts, max(math.ceil(rows), 1), sms)
    elif rows < SPARSE:
        chosen = _sparse(n, k, experts, rows, sms)
    else:
        chosen = _indexed(n, k, experts, rounded(rows), sms)
    if arch != _HOPPER:
        return chosen
    tile = _fit(_overridden(chosen), k)
    check(mode, tile, k)
    return tile


def rounded(rows: float) -> float:
    """Rows per expert as plans tell them apart: few plans, for a tile depends on less where there are more."""
    if rows <= SPARSE:
        return rows
    return math.ceil(rows) if rows > 8 else math.ceil(4 * rows) / 4


def _masked(n: int, experts: int, rows: int, sms: int) -> TileConfig:
    if rows <= 16:
        tokens = 8 if rows <= 8 else 16
        return _decode(tokens, min(tokens, 8), n, experts, rows, sms, box=tokens)
    if rows <= 32:
        return _decode(32, 32, n, experts, rows, sms, box=32)
    if rows <= 64:
        if _busiest(384, n, experts, rows, sms) < _CLEARLY * _busiest(256, n, experts, rows, sms):
            why = "384 rows a tile leave less work to the busiest multiprocessor"
            return TileConfig(64, 64, 3, 2, 1, 0, box=64, producer_registers=40, why=why)
        why = "four warpgroups of one block: 256 rows share the activations; registers hold their sums for 64 tokens"
        return TileConfig(64, 64, 4, 1, 2, 0, box=64, producer_registers=32, why=why)
    why = "more than 64 rows: tensor cores bound, two narrow tiles a run cost little"
    return replace(_prefill(128, 64, 64, why), stage_k=1)  # 128 k a stage has not been measured here


def _sparse(n: int, k: int, experts: int, rows: float, sms: int) -> TileConfig:
    active = experts * -math.expm1(-rows)  # experts that have rows, if routing is random
    if k > _LONG_K or active * -(-n // 512) <= sms / 2:
        why = "maybe few experts have rows: tiles of 128 rows of the weight spread them over the multiprocessors"
        return TileConfig(16, 8, 2, 1, 4, 0, 0, 56, why=why)
    return TileConfig(16, 8, 4, 2, 2, 0, 0, 64, why="maybe few experts have rows, but K is short: tiles of 512 rows")


def _indexed(n: int, k: int, experts: int, mean: float, sms: int) -> TileConfig:
    rows = math.ceil(mean)
    most = rows + 2 * math.isqrt(rows)  # routing scatters the rows of an expert by about their square root
    if most <= 16:
        return _decode(16, 8, n, experts, mean, sms, box=0)
    if most <= 32:
        return _decode(32, 32, n, experts, mean, sms, box=0)
    if k <= _RESIDENT_K:
        return _resident(k, rows)
    cuts, tokens, narrow = _cut(rows, 128)
    tiles = "are one tile each" if cuts == 1 else f"are cut into {cuts} equal tiles"
    why = f"runs of about {rows} rows {tiles}: N fits nearly all of those, a second width most"
    return _prefill(tokens, narrow, 0, why)


def _resident(k: int, rows: int) -> TileConfig:
    """A short K: activations stay while weights stream by, and two blocks a multiprocessor take turns at storing."""
    _, tokens, narrow = _cut(rows, _RESIDENT_TOKENS)
    if tokens == 96:  # NVRTC 13.5 finds too few registers for it, and enough for 104
        tokens = 104
    slots = 2 if tokens <= 48 else 1  # as shared memory allows
    why = "K is short: activations stay while weights stream by; of two thread blocks one stores while one multiplies"
    return TileConfig(
        tokens, narrow, 1, 2, 2, 0, 0, 56, resident=k // BLOCK_K, slots=slots, group=_GROUP, occupancy=2, why=why
    )


def _cut(rows: int, limit: int) -> tuple[int, int, int]:
    """How many tiles of at most ``limit`` tokens a run of about ``rows`` needs, the tokens of one, and of most.

    A run that needs one cut more than the others costs a whole tile, and often a whole wave of tiles. So tiles leave
    room for nearly three deviations, and the second width serves the runs that need less.
    """
    deviation = math.isqrt(rows)
    cuts = -(-(rows + 3 * deviation // 2) // limit)
    tokens = min(_up(-(-(rows + 11 * deviation // 4) // cuts)), limit)
    narrow = min(_up(-(-(rows + deviation // 2) // cuts)), tokens)
    return cuts, tokens, narrow


def _decode(tokens: int, narrow: int, n: int, experts: int, rows: float, sms: int, *, box: int) -> TileConfig:
    """Up to 32 rows: bound by memory, so many rows of the weight a block and deep stages."""
    wide, narrower = (_busiest(height, n, experts, rows, sms) for height in (512, 384))
    warpgroups = 3 if narrower < _CLEARLY * wide else 4
    why = f"memory bound: deep stages, {warpgroups * 128} rows leave the least work to the busiest multiprocessor"
    return TileConfig(tokens, narrow, warpgroups, 2, 2, 0, box, 32 if box else 64, why=why)


def _busiest(height: int, n: int, experts: int, rows: float, sms: int) -> float:
    """Rows of the weight on the busiest multiprocessor with tiles of ``height``: the fewer, the less idles at the end.

    Expected over the number of experts without rows, which random routing makes a Poisson variable.
    """
    mean = experts * math.exp(-rows)
    chance, expected = math.exp(-mean), 0.0
    for without in range(min(experts, round(2 * mean) + 8)):
        expected += chance * -(-(experts - without) * -(-n // height) // sms) * height
        chance *= mean / (without + 1)
    return expected


def _prefill(tokens: int, narrow: int, box: int, why: str) -> TileConfig:
    """Tensor cores bound: two warpgroups of two blocks, 256 rows, as many tokens as their registers hold.

    Stages of 128 k halve what a stage costs, and four of them fit beside 128 tokens.
    """
    return TileConfig(tokens, narrow, 2, 2, 2, 0, box, 56, why=why)


SPARSE = 2.0
"""Below this many rows an expert has on average, it matters how many experts have any."""
_CLEARLY = 0.99
"""Less work than this share is less; what differs by a rounding is the same."""
_LONG_K = 2048
"""Beyond this K, deeper stages and more tiles cost little."""
_RESIDENT_K = 256
"""Up to this K a tile's activations, all of K, leave room for the ring in each of two thread blocks."""
_RESIDENT_TOKENS = 104
"""Most tokens of such a tile: with more, the consumers' registers spill."""
_GROUP = 7
"""Tiles on the same resident activations: few enough to share out evenly; 7 divides Kimi's 56 blocks of 128 rows."""


def _fit(tile: TileConfig, k: int) -> TileConfig:
    """As many stages as shared memory holds, of a depth that divides K."""
    if tile.stage_k and k // BLOCK_K % tile.stage_k:
        # Two register buffers take turns: one block a warpgroup needs an even number of k64 blocks a stage.
        warpgroups = tile.warpgroups if tile.blocks == 2 else tile.warpgroups // 2
        registers = 56 if warpgroups == 2 else tile.producer_registers
        tile = replace(tile, stage_k=1, blocks=2, warpgroups=warpgroups, producer_registers=registers)
    if tile.stages:
        return tile
    stages = _MOST_STAGES
    while stages > 1 and replace(tile, stages=stages).shared_bytes(PLAIN) > _shared_limit(tile):
        stages -= 1
    return replace(tile, stages=stages)


_MOST_STAGES = 10


def _shared_limit(tile: TileConfig) -> int:
    return (SHARED_LIMIT + 1024) // max(tile.occupancy, 1) - 1024


def check(mode: str, tile: TileConfig, k: int) -> None:
    """Raise UsageError for a tile, chosen by hand, that a Hopper kernel cannot be made of or would hang with."""
    t, blocks = tile, k // BLOCK_K
    rules = {
        "tokens and narrow are multiples of 8, narrow <= tokens <= 128": t.tokens % 8 == t.narrow % 8 == 0
        and 0 < t.narrow <= t.tokens <= 128,
        "blocks is 1 or 2, warpgroups 1 to 4, and together they make strips of 128 rows": t.blocks in (1, 2)
        and t.warpgroups in (1, 2, 3, 4)
        and t.rows % 128 == 0,
        f"stage_k divides the {blocks} k64 blocks of K, and blocks * stage_k is even": t.stage_k > 0
        and blocks % t.stage_k == 0
        and t.blocks * t.stage_k % 2 == 0,
        # Consumers hold a stage while they wait for the next but one.
        "stages is at least 3; if no more fit, lower tokens, warpgroups, blocks or stage_k": t.stages >= 3,
        "box is 0 where rows are gathered (indexed), else a divisor of tokens": (
            t.box == 0 if mode == "indexed" else t.box > 0 and t.tokens % t.box == 0
        ),
        f"resident is 0, with group 1 and no slots, or in indexed {blocks} with 1 or 2 slots": (
            (t.resident, t.slots, t.group) == (0, 0, 1)
            or (mode == "indexed" and t.resident == blocks and t.slots in (1, 2) and t.group > 0)
        ),
        "occupancy is 1 or 2": t.occupancy in (1, 2),
        "producer_registers is a multiple of 8 from 24 to 240": t.producer_registers in range(24, 241, 8),
        f"shared memory, {t.shared_bytes(PLAIN)} B, is at most {_shared_limit(t)} B (stages left out are fitted)": (
            t.shared_bytes(PLAIN) <= _shared_limit(t)
        ),
    }
    for rule, holds in rules.items():
        if not holds:
            described = ", ".join(f"{f.name}={getattr(t, f.name)}" for f in fields(t) if f.name != "why")
            raise UsageError(f"no {mode} kernel can be made of this tile. It must hold that {rule}. Found {described}")


def _up(rows: int) -> int:
    return -(-rows // 8) * 8


def _overridden(tile: TileConfig) -> TileConfig:
    text = os.environ.get("CHORD_TILE", "")
    if not text:
        return tile
    names = {f.name for f in fields(TileConfig)} - {"why"}
    values: dict[str, int] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name.strip() not in names or not re.fullmatch("[0-9]{1,6}", value.strip()):
            raise UsageError(f"CHORD_TILE: {item[:80]!r} is not NAME=INTEGER with one of {', '.join(sorted(names))}")
        values[name.strip()] = int(value)
    tokens = values.get("tokens", tile.tokens)
    bounded = {"narrow": min(tile.narrow, tokens), "box": math.gcd(tile.box, tokens) if tile.box else 0}
    return replace(tile, why="overridden by CHORD_TILE", **{**bounded, **values})


def instantiation(mode: str, tile: TileConfig, output: int, arch: str) -> tuple[str, dict[str, int]]:
    """The kernel's name and its macros."""
    if arch == _HOPPER:
        return mode, tile.defines(output)
    return "portable", {**tile.defines(output), "CHORD_MODE": MODES.index(mode)}


# Kimi K2.x experts: (n, k, experts, is gate_up). EP8, EP16, EP32; TP4, TP8, TP16 over all 384.
SHAPES = (
    *((n, k, 384 // ep, n == 4096) for ep in (8, 16, 32) for n, k in ((4096, 7168), (7168, 2048))),
    *((n, k, 384, k == 7168) for tp in (4, 8, 16) for n, k in ((4096 // tp, 7168), (7168, 2048 // tp))),
)
ROWS = (1, 4, 8, 16, 24, 32, 43, 64, 86, 128, 171, 256, 341, 512)
"""Rows per expert that ``explain`` walks through."""
_ALL_ROWS = (
    *(i / 384 for i in range(1, 8)),
    *dict.fromkeys(rounded(i / 48) for i in range(1, 8 * 48)),
    *range(1, 601),
)
"""Rows per expert that ``all_configs`` walks through: beyond, tiles repeat."""


def configs(
    mode: str, n: int, k: int, experts: int, output: int, arch: str, sms: int = 132
) -> list[tuple[str, dict[str, int]]]:
    """Every instantiation that ``choose`` returns for a shape at any rows per expert, each once."""
    tiles = dict.fromkeys(choose(mode, n, k, experts, rows, arch, sms) for rows in _ALL_ROWS)
    return [instantiation(mode, tile, output, arch) for tile in tiles]


def all_configs(arch: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Every instantiation that ``choose`` returns for Kimi's shapes at any rows per expert, each once."""
    seen = set()
    for mode in MODES:
        for n, k, experts, gate_up in SHAPES:
            for output in (GATE_UP, SWIGLU) if gate_up else (PLAIN,):
                for name, defines in configs(mode, n, k, experts, output, arch):
                    key = (name, tuple(sorted(defines.items())))
                    if key not in seen:
                        seen.add(key)
                        yield name, defines


def explain(arch: str = _HOPPER) -> str:
    """What ``choose`` returns for Kimi's EP8 and TP8 shapes, as a table."""
    lines = [f"{'mode':<11}{'N':>5}{'K':>6}{'experts':>8}{'rows':>5}  {'tile':<47}why"]
    for mode in MODES:
        for n, k, experts, _ in (SHAPES[0], SHAPES[1], SHAPES[8], SHAPES[9]):
            before = None
            for rows in ROWS:
                tile = choose(mode, n, k, experts, rows, arch)
                if tile != before:
                    shape = f"{tile.tokens}|{tile.narrow} tokens x {tile.rows} rows, "
                    shape += f"{tile.stages} stages of {tile.stage_k * BLOCK_K} k"
                    lines.append(f"{mode:<11}{n:>5}{k:>6}{experts:>8}{rows:>5}  {shape:<47}{tile.why}")
                before = tile
    return "\n".join(lines)
