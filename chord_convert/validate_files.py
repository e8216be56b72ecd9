"""Rules about the index and the shards: whatever one says, the other must say too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from chord_convert.report import Problem, name, show
from chord_convert.validate_facts import Facts, Rule
from chord_runtime.format.layout import INDEX

_AGAIN = "Download the checkpoint again: files and index are of different versions."


def index_present(facts: Facts) -> Iterator[Problem]:
    """Several shards need an index."""
    if INDEX not in facts.files and len(facts.shards) > 1:
        yield Problem(
            "no-index", INDEX, "", f"{len(facts.shards)} safetensors files and no index",
            "an index, or a single file", "Download the index too; it tells which file holds which tensor.",
        )  # fmt: skip


def files_of_index(facts: Facts) -> Iterator[Problem]:
    """Every file that the index names exists."""
    counts = Counter((facts.weight_map or {}).values())
    for file, tensors in sorted(counts.items()):
        if file in facts.files and file.endswith(".safetensors"):
            continue
        reason = "missing" if file not in facts.files else "not a safetensors file"
        yield Problem(
            "missing-file", INDEX, name(file), f"{tensors} tensors in this file, which is {reason}",
            "files that are all there", "Finish the download (a resumed `hf download` fetches only what is missing).",
        )  # fmt: skip


def tensors_of_index(facts: Facts) -> Iterator[Problem]:
    """Every tensor of the index is in the file it names."""
    for tensor, file in (facts.weight_map or {}).items():
        if file not in facts.headers or tensor in facts.headers[file]:
            continue
        elsewhere = facts.tensors.get(tensor)
        where = f"it in {name(elsewhere.file)}" if elsewhere is not None else "it in no file"
        yield Problem("index-tensor", name(file), name(tensor), where, "the file that the index names", _AGAIN)


def tensors_of_files(facts: Facts) -> Iterator[Problem]:
    """Every tensor of the shards is in the index."""
    if facts.weight_map is None:
        return
    for file, header in facts.headers.items():
        for tensor in header:
            if tensor not in facts.weight_map:
                found = "a tensor that the index does not name"
                yield Problem("unindexed-tensor", name(file), name(tensor), found, "an index of all tensors", _AGAIN)


def one_file_each(facts: Facts) -> Iterator[Problem]:
    """No tensor is in two files."""
    for file, header in facts.headers.items():
        for tensor in header:
            if (first := facts.tensors[tensor].file) != file:
                yield Problem(
                    "duplicate-tensor", name(file), name(tensor), f"the tensor here and in {name(first)}",
                    "each tensor in one file", "Remove the files that do not belong to this checkpoint.",
                )  # fmt: skip


def total_size(facts: Facts) -> Iterator[Problem]:
    """``metadata.total_size`` of the index is the sum of all tensors. A warning: nothing depends on it."""
    complete = (
        facts.weight_map is not None and not facts.broken and set(facts.weight_map.values()) <= set(facts.headers)
    )
    found = sum(tensor.nbytes for tensor in facts.tensors.values())
    if complete and facts.total_size is not None and facts.total_size != found:
        yield Problem(
            "total-size", INDEX, "metadata.total_size", show(facts.total_size), f"{found}, the sum of all tensors",
            "Nothing, unless a download was interrupted.",
        )  # fmt: skip


FILE_RULES: list[Rule] = [index_present, files_of_index, tensors_of_index, tensors_of_files, one_file_each]
FILE_WARNINGS: list[Rule] = [total_size]
