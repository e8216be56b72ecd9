"""csrc/chord/scheduler.cuh run on the CPU: whatever the routing, every row meets every weight row exactly once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from chord_runtime.cuda import select
from tests.emulation.host_kernel import HostKernel

BLOCKS = (1, 13, 40)

DUMP = """\
#include "chord/scheduler.cuh"
using namespace chord;
template <class Segments>
void dump(TileScheduler<Segments> scheduler, int* tiles, int* counts, int limit) {
  Tile tile;
  int count = 0;
  for (; scheduler.next(tile) && count < limit; count++) {
    const int all[5] = {tile.row0, tile.rows, tile.strip, tile.strips, tile.expert};
    for (int i = 0; i < 5; i++) {
      int& to = tiles[(blockIdx.x * limit + count) * 5 + i];
      if (lane_id() == 0) to = all[i];
      if (all[i] != __shfl_sync(kFullMask, all[i], 0)) to = -99;  // not the same in every lane
    }
  }
  counts[blockIdx.x] = count;
}
"""
MASKED = """\
void chord_masked_tiles(const int* masked_m, int* tiles, int* counts, int experts, int max_m, int n, int limit) {
  dump(TileScheduler<MaskedSegments>(MaskedSegments(masked_m, experts, max_m), n), tiles, counts, limit);
}
"""
RUNS = """\
void chord_run_tiles(const int* ids, int* tiles, int* counts, int stride, int blocks, int rows, int experts, int n,
                     int limit) {
  dump(TileScheduler<RunSegments>(RunSegments(ids, stride, blocks, rows, experts), n), tiles, counts, limit);
}
"""


def instantiation(mode: str, n: int, k: int, experts: int, rows: int) -> tuple[select.TileConfig, dict[str, int]]:
    tile = select.choose(mode, n, k, experts, rows, "sm_90a")
    return tile, select.instantiation(mode, tile, select.PLAIN, "sm_90a")[1]


CONFIGS = {
    "decode": instantiation("masked", 7168, 2048, 48, 8),
    "prefill": instantiation("indexed", 4096, 7168, 48, 341),
    "short": instantiation("indexed", 7168, 256, 384, 341),
}


@pytest.fixture(scope="module", params=CONFIGS)
def tile(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, int], HostKernel, HostKernel]:
    _, defines = CONFIGS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    masked = HostKernel("masked_tiles", defines, folder, DUMP + MASKED)
    return defines, masked, HostKernel("run_tiles", defines, folder, DUMP + RUNS)


Segments = list[tuple[int, int, int]]
"""(expert, first row, rows)."""


def check(
    kernel: HostKernel,
    ids: torch.Tensor,
    arguments: tuple[int, ...],
    segments: Segments,
    defines: dict[str, int],
    n: int,
    looked_at: int,
    least_rows: int,
) -> None:
    """The tiles of the segments cover rows × strips of the weight once, as few as can be, dealt out in turn."""
    group = defines["CHORD_GROUP"]
    strips = defines["CHORD_WARPGROUPS"] * defines["CHORD_BLOCKS"] // 2  # of a tile

    def tiles_of(rows: int) -> int:
        return -(-rows // defines["CHORD_TOKENS"]) * -(-n // (strips * group * 128))

    total = sum(tiles_of(rows) for _, _, rows in segments)
    for blocks in BLOCKS:
        limit = total // blocks + 3
        tiles = torch.zeros(blocks, limit, 5, dtype=torch.int32)
        counts = torch.zeros(blocks, dtype=torch.int32)
        kernel((blocks, 1), 32, ids, tiles, counts, *arguments, n, limit)
        whole, left = divmod(total, blocks)
        # Of the last wave each strip has a thread block to itself, if there are enough and tokens are many. Segments
        # that are left out may hide that a wave is the last, and it is not looked for among too many.
        divided = group == 1 and strips > 1 and defines["CHORD_TOKENS"] > 32 and left * strips <= blocks
        least = tiles_of(least_rows)
        divided = divided and (whole + 1) * blocks > least and looked_at // (least // blocks + 1) <= 128
        if divided:
            assert all(whole <= count <= whole + (block < left * strips) for block, count in enumerate(counts.tolist()))
        else:
            assert counts.tolist() == [whole + (block < left) for block in range(blocks)]
        covered: dict[tuple[int, int], NDArray[np.int64]] = {
            (expert, first): np.zeros((length, n // 128), dtype=np.int64) for expert, first, length in segments
        }
        for block, count in enumerate(counts.tolist()):
            for index, (row0, length, strip, width, expert) in enumerate(tiles[block, :count].tolist()):
                assert 0 < length <= defines["CHORD_TOKENS"]
                [(first, end)] = [(s, s + size) for e, s, size in segments if e == expert and s <= row0 < s + size]
                assert row0 + length <= end, "a tile stays in its segment"
                assert (row0 - first) % 8 == 0
                if divided and index == whole:
                    assert width == 1
                else:
                    assert strip % (strips * group) == 0
                    assert width == min(strips, n // 128 - strip)
                width = min(strips * group, n // 128 - strip) if group > 1 else width
                covered[expert, first][row0 - first : row0 - first + length, strip : strip + width] += 1
        assert all((times == 1).all() for times in covered.values())


@pytest.mark.parametrize("kind", ["none", "one hot", "some", "full", "beyond"])
@pytest.mark.parametrize(("experts", "max_m", "n"), [(1, 128, 384), (33, 40, 512), (100, 300, 128)])
def test_masked(
    tile: tuple[dict[str, int], HostKernel, HostKernel], experts: int, max_m: int, n: int, kind: str
) -> None:
    defines, masked, _ = tile
    generator = torch.Generator().manual_seed(experts)
    some = torch.randint(0, max_m + 1, (experts,), generator=generator)
    some *= torch.rand(experts, generator=generator) < 0.6
    counts = {
        "none": torch.zeros(experts),
        "one hot": (torch.arange(experts) == experts - 1) * max_m,
        "some": some,
        "full": torch.full((experts,), max_m),
        "beyond": some + max_m // 2,  # more than max_m must not leave the expert's rows
    }[kind].int()
    segments = [(e, e * max_m, min(int(c), max_m)) for e, c in enumerate(counts)]
    check(masked, counts, (experts, max_m), segments, defines, n, experts, 0)


RUN_LENGTHS: dict[str, list[tuple[int, int]]] = {
    "empty": [],
    "one": [(3, 1)],
    "window": [(0, 32)],
    "long": [(5, 200)],
    "long then more": [(5, 70), (6, 1), (7, 33)],
    "long ends on a window": [(1, 64), (2, 1)],
    "padding first": [(-1, 40), (2, 3)],
    "padding between": [(0, 5), (-1, 31), (1, 5), (-1, 100), (2, 1)],
    "padding last": [(4, 2), (-1, 500)],
    "all padding": [(-1, 77)],
    "same expert twice": [(2, 3), (4, 1), (2, 3)],
    "other rank's ids": [(0, 2), (99, 3), (1, 2)],
    "singles": [(e % 48, 1) for e in range(150)],
    "mixed": [(e, 1 + e * 7 % 45) for e in range(30)],
}


@pytest.mark.parametrize(("stride", "rows"), [(1, 16), (1, 8), (128, 128)])
@pytest.mark.parametrize("case", RUN_LENGTHS)
def test_runs(tile: tuple[dict[str, int], HostKernel, HostKernel], case: str, stride: int, rows: int) -> None:
    defines, _, runs = tile
    experts, n = 48, 384
    segments, first = [], 0
    for expert, length in RUN_LENGTHS[case]:
        if 0 <= expert < experts:
            segments.append((expert, first * rows, length * rows))
        first += length
    ids = torch.full(((first + 5) * stride,), 3, dtype=torch.int32)  # beyond the blocks in use: not to be taken
    ids[: first * stride : stride] = torch.tensor([e for e, length in RUN_LENGTHS[case] for _ in range(length)])
    check(runs, ids, (stride, first, rows, experts), segments, defines, n, first, first * rows)
