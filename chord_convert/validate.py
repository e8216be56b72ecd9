"""Is this a checkpoint that Chord can convert? Every reason why not, found in one run from headers and config alone.

The rules are lists of functions, one message each, in ``validate_*.py``: a rule looks at :class:`Facts` and yields
problems. First come the rules that recognize another kind of checkpoint; when none speaks, those about the
quantization block and the tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chord_convert.checkpoint import Checkpoint, side_files
from chord_convert.report import Problem, show
from chord_convert.source import strict_json
from chord_convert.source.base import SMALL_FILE_LIMIT, Identity, Source
from chord_convert.source.headers import Tensors, scan_headers
from chord_convert.validate_config import CONFIG_RULES, block_schema
from chord_convert.validate_facts import Facts, Rule
from chord_convert.validate_files import FILE_RULES, FILE_WARNINGS
from chord_convert.validate_kind import FOREIGN_RULES, FORMAT_RULES
from chord_convert.validate_tensors import TENSOR_RULES, TENSOR_WARNINGS
from chord_runtime.errors import CheckpointError
from chord_runtime.format.layout import INDEX

__all__ = ["Checkpoint", "Report", "validate"]

# How many lines are written for one kind of problem; the last of them counts the rest.
_LINES_ALIKE = 3
_LINES_A_RULE = 12


@dataclass(frozen=True)
class Report:
    """What validation found. ``checkpoint`` is there exactly when there are no problems.

    ``problems`` and ``warnings`` are collapsed: of many alike, the first few, the last of which counts the rest.
    """

    identity: Identity
    problems: list[Problem]
    warnings: list[Problem] = field(default_factory=list)
    checkpoint: Checkpoint | None = None

    def require(self) -> Checkpoint:
        """The checkpoint. Raises CheckpointError with every problem when there is none."""
        if self.checkpoint is None:
            lines = "\n  ".join(str(problem) for problem in self.problems)
            raise CheckpointError(f"{self.identity.name} cannot be converted:\n  {lines}")
        return self.checkpoint


def validate(
    source: Source, *, scales: bool = False, workers: int = 16, progress: Callable[[int], object] | None = None
) -> Report:
    """Check a checkpoint by its config, index and headers, read with ``workers`` threads.

    ``scales`` reads the values of all scales too, when the rest is in order; ``progress`` is told the bytes read.

    Raises:
        SourceError: something could not be read, so that nothing can be said.
    """
    problems: list[Problem] = []
    files = source.files()
    config = _read_object(source, "config.json", problems)
    hf_quant = _read_object(source, "hf_quant_config.json", problems) if "hf_quant_config.json" in files else None
    index = _read_object(source, INDEX, problems) if INDEX in files else None
    weight_map = _weight_map(index, problems)
    facts = _read_tensors(source, Facts(
        files=frozenset(files), config=config or {}, hf_quant=hf_quant, weight_map=weight_map,
        total_size=_total_size(index), headers={}, broken=frozenset(),
    ), workers, problems)  # fmt: skip
    problems += _run(FILE_RULES, facts)
    if config is not None:
        problems += _about_model(facts)
    warnings = _run(FILE_WARNINGS, facts)
    if problems:
        return Report(source.identity, collapse(problems), collapse(warnings))
    warnings += _run(TENSOR_WARNINGS, facts)
    checkpoint = _checkpoint(facts)
    if scales:
        from chord_convert.validate_scales import scan_scales  # needs torch, which takes seconds to import

        problems = scan_scales(source, checkpoint, workers, progress)
    return Report(source.identity, collapse(problems), collapse(warnings), None if problems else checkpoint)


def _about_model(facts: Facts) -> list[Problem]:
    for rule in FOREIGN_RULES:
        if found := list(rule(facts)):
            return found
    formats = _run(FORMAT_RULES, facts)
    problems = formats + _run(CONFIG_RULES, facts)
    keys = [problem.key for problem in problems if problem.file == "config.json"]
    problems += [problem for problem in block_schema(facts) if not _covered(problem.key, keys)]
    return (
        problems
        if any(problem.rule == "tensor-format" for problem in formats)
        else problems + _tensors(facts, problems)
    )


def _tensors(facts: Facts, before: list[Problem]) -> list[Problem]:
    """The tensor rules; patterns of ``ignore`` that are no patterns cannot be matched."""
    rules = TENSOR_RULES
    if any(problem.rule == "ignore" for problem in before):
        rules = [rule for rule in rules if rule.__name__ != "config_agrees"]
    return _run(rules, facts)


def _covered(key: str, keys: Iterable[str]) -> bool:
    """Whether a rule of its own has spoken about ``key``, something inside it or something around it."""
    return any(f"{known}.".startswith(f"{key}.") or f"{key}.".startswith(f"{known}.") for known in keys)


def _run(rules: Iterable[Rule], facts: Facts) -> list[Problem]:
    return [problem for rule in rules for problem in rule(facts)]


def _read_object(source: Source, file: str, problems: list[Problem]) -> dict[str, Any] | None:
    """A JSON object, or None and a problem."""
    again = "Download the file again."
    if file not in source.files():
        step = "Check the path, and that the download is complete."
        problems.append(Problem("no-config", file, "", "no such file", "a checkpoint with its config.json", step))
        return None
    if (size := source.files()[file].size) > SMALL_FILE_LIMIT:
        problems.append(Problem("json", file, "", f"{size} bytes", f"at most {SMALL_FILE_LIMIT}", again))
        return None
    try:
        parsed = strict_json.parse(source.read_bytes(file))
    except ValueError as error:
        problems.append(Problem("json", file, "", str(error), "one JSON object", again))
        return None
    if not isinstance(parsed, dict):
        problems.append(Problem("json", file, "", f"a JSON {type(parsed).__name__}", "one JSON object", again))
        return None
    return parsed


def _weight_map(index: Mapping[str, Any] | None, problems: list[Problem]) -> dict[str, str] | None:
    if index is None:
        return None
    found = index.get("weight_map")
    if isinstance(found, dict) and all(isinstance(file, str) for file in found.values()):
        return found
    step = "Download the index again."
    problems.append(Problem("json", INDEX, "weight_map", show(found), "a map of tensor names to files", step))
    return None


def _total_size(index: Mapping[str, Any] | None) -> Any:
    metadata = (index or {}).get("metadata")
    return metadata.get("total_size") if isinstance(metadata, dict) else None


def _read_tensors(source: Source, facts: Facts, workers: int, problems: list[Problem]) -> Facts:
    """Add the headers of all shards at the top and of those that the index names elsewhere."""
    named = {file for file in (facts.weight_map or {}).values() if file in facts.files}
    wanted = sorted({*facts.shards, *(file for file in named if file.endswith(".safetensors"))})
    headers, found = scan_headers(source, wanted, workers)
    problems += found
    tensors: Tensors = {}
    for header in headers.values():
        for key, tensor in header.items():
            if key not in tensors or (facts.weight_map or {}).get(key) == tensor.file:
                tensors[key] = tensor
    broken = frozenset(wanted) - headers.keys()
    return replace(facts, headers=headers, broken=broken, tensors=tensors)


def _checkpoint(facts: Facts) -> Checkpoint:
    sizes = {key: facts.number(key) or 0 for key in facts.text}
    return Checkpoint(
        prefix=facts.prefix or "",
        layers=tuple(facts.moe_layers or ()),
        num_experts=sizes["n_routed_experts"],
        hidden=sizes["hidden_size"],
        intermediate=sizes["moe_intermediate_size"],
        top_k=sizes["num_experts_per_tok"],
        tensors=facts.tensors,
        config=facts.config,
        block_paths=tuple(facts.blocks),
        side_files=side_files(facts.files),
    )


def collapse(problems: Iterable[Problem]) -> list[Problem]:
    """Of problems that differ only in where, keep the first few; the last one kept counts the rest."""
    alike: dict[tuple[str, str], list[Problem]] = defaultdict(list)
    of_rule: dict[str, int] = defaultdict(int)
    order: list[tuple[str, str]] = []
    for problem in problems:
        key = (problem.rule, problem.found)
        if key not in alike:
            of_rule[problem.rule] += 1
            if of_rule[problem.rule] > _LINES_A_RULE:
                key = next(known for known in reversed(order) if known[0] == problem.rule)
            else:
                order.append(key)
        alike[key].append(problem)
    kept = []
    for key in order:
        group = alike[key]
        shown = list(dict.fromkeys(replace(problem, more=0) for problem in group))[:_LINES_ALIKE]
        kept += [*shown[:-1], replace(shown[-1], more=sum(1 + problem.more for problem in group) - len(shown))]
    return kept
