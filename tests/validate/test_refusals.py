"""Every refusal has its own message and its own test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import chord_convert
from tests.validate.cases import CASES, Case
from tests.validate.editing import Editor


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refusal(case: Case, request: pytest.FixtureRequest) -> None:
    editor: Editor = request.getfixturevalue(case.form)
    case.edit(editor)
    report = editor.validate()
    lines = [str(problem) for problem in report.problems]
    assert report.checkpoint is None
    assert {problem.rule for problem in report.problems} == {case.rule} | case.also, lines
    fitting = [
        problem
        for problem in report.problems
        if problem.rule == case.rule and problem.file == case.file and case.key in problem.key
    ]
    assert any(case.found in problem.found and case.step in problem.next_step for problem in fitting), lines
    for problem in report.problems:
        assert problem.supported
        assert problem.next_step.endswith((".", ")"))
        assert str(problem).isprintable()
        assert "found" in str(problem)


def test_every_rule_is_tested() -> None:
    """The names of rules, as the code writes them, are those of the cases (and of tests/validate/test_values.py)."""
    package = Path(chord_convert.__file__).parent
    written = set()
    for path in [*package.glob("validate*.py"), package / "source" / "headers.py"]:
        written |= set(re.findall(r'Problem\(\s*"([a-z0-9-]+)"', path.read_text()))
    computed = {"transform", "sparsity", "moe-sparsity"}  # from the names of keys
    computed |= {"num-bits", "type", "strategy", "group-size", "symmetric", "dynamic", "actorder", "block-structure"}
    elsewhere = {"scale-value", "recorded-shape", "total-size", "incomplete-model"}
    assert written | computed == {case.rule for case in CASES} | elsewhere
