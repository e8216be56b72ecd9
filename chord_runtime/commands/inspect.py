"""``chord inspect``: what a packed directory holds, from its manifest and file names alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from chord_runtime.format.layout import Projection
from chord_runtime.packed_dir import PackedDir
from chord_runtime.units import human


@click.command(
    epilog="Exit codes: 0 shown, 1 not a finished packed directory, or an altered manifest, 2 wrong command line."
)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def inspect(directory: Path, as_json: bool) -> None:
    """Show layers, ranks, modes, sizes and provenance of a packed DIRECTORY."""
    summary = summarize(PackedDir(directory))
    if as_json:
        click.echo(json.dumps(summary, indent=1))
        return
    for line in _lines(summary):
        click.echo(line)


def summarize(packed: PackedDir) -> dict[str, Any]:
    """The manifest and the sizes that follow from it, as JSON-ready data."""
    manifest, ranks = packed.manifest, []
    for ep_rank in manifest.ep_ranks:
        for tp_rank in range(manifest.packing.layout.tp_size):
            files = packed.experts_files(ep_rank=ep_rank, tp_rank=tp_rank)
            ranks.append(
                {
                    "ep_rank": ep_rank,
                    "tp_rank": tp_rank,
                    "experts": list(manifest.packing.layout.experts_of(ep_rank, manifest.packing.shape.num_experts)),
                    "files": len(files),
                    "bytes": sum(manifest.files[name].size for name in files),
                }
            )
    sizes = {name: record.size for name, record in manifest.files.items()}
    return {
        "directory": str(packed.path),
        "packing": manifest.packing.to_json(),
        "source": {"repo": manifest.source.repo, "commit": manifest.source.commit},
        "tool_version": manifest.tool_version,
        "experts_only": manifest.experts_only,
        "ranks": ranks,
        "expert_bytes": sum(sizes[name] for name in packed.experts_files()),
        "shared_bytes": sum(sizes[name] for name in packed.shared_files()),
        "total_bytes": sum(sizes.values()),
        "files": len(sizes),
    }


def _lines(summary: dict[str, Any]) -> list[str]:
    packing, source = summary["packing"], summary["source"]
    layers = packing["layers"]
    shapes = ", ".join(f"{p.name.lower()} {packing['shapes'][p.name.lower()]}" for p in Projection)
    lines = [
        f"directory  {summary['directory']}",
        f"format     version {packing['format_version']}, written by chord-moe {summary['tool_version']}",
        f"source     {source['repo']}{' at ' + source['commit'] if source['commit'] else ', commit not known'}",
        f"modes      {', '.join(packing['modes'])}",
        f"layers     {len(layers)}: {_ranges(layers)}, {packing['num_experts']} experts each, {packing['prefix']}",
        f"weights    INT4, group {packing['group_size']}; packed for a rank: {shapes}",
        f"parallel   ep {packing['ep_size']} × tp {packing['tp_size']}, {packing['placement']}",
        f"size       {human(summary['total_bytes'])} in {summary['files']} files: "
        f"experts {human(summary['expert_bytes'])}, "
        + ("other tensors left out" if summary["experts_only"] else f"others {human(summary['shared_bytes'])}"),
        "",
        f"{'ep':>4} {'tp':>3}  {'files':>5} {'size':>9}  experts",
    ]
    return lines + [
        f"{rank['ep_rank']:>4} {rank['tp_rank']:>3}  {rank['files']:>5} {human(rank['bytes']):>9}  "
        f"{_ranges(rank['experts'])}"
        for rank in summary["ranks"]
    ]


def _ranges(numbers: list[int]) -> str:
    """``1-60`` for a run, ``0, 8, 16 … 376`` for steps, so that a line stays a line."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    if len(numbers) > 4:
        return f"{numbers[0]}, {numbers[1]}, {numbers[2]} … {numbers[-1]}"
    return ", ".join(map(str, numbers))
