"""Reads index arithmetic out of the CUDA headers, so that the emulation runs the kernels' own expressions.

A layout test that repeats a formula proves only that it was typed twice. Here ``constexpr``, ``const`` and ``return``
expressions are taken from the header's text and evaluated; a header that no longer has them fails the test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from chord_runtime.resources import csrc_dir


class Header:
    """One file under csrc/chord."""

    def __init__(self, name: str) -> None:
        text = (Path(csrc_dir()) / "chord" / name).read_text()
        self.name = name
        self.text = re.sub(r"//[^\n]*", "", text)

    def constants(self) -> dict[str, int]:
        """Its ``constexpr int`` constants, each decided by those before it."""
        found: dict[str, int] = {}
        for name, expression in re.findall(r"constexpr int (k\w+) = ([^;]+);", self.text):
            found[name] = evaluate(expression, found)
        return found

    def function(self, name: str) -> str:
        """The body of a function."""
        start = re.search(rf"\b{name}\([^{{;]*\) ?{{", self.text)
        assert start, f"{self.name} has no function {name}"
        depth, at = 1, start.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(self.text[at], 0)
            at += 1
        return self.text[start.end() : at - 1]


def assigned(body: str, name: str) -> str:
    """The expression that a variable is initialised with."""
    found = re.search(rf"[\s,(]{name} = ([^;]+?)(?:;|, \w+ = )", body, re.DOTALL)
    assert found, f"nothing is assigned to {name}"
    return found[1]


def returned(body: str) -> str:
    """The expression of the last return statement."""
    return re.findall(r"return ([^;]+);", body, re.DOTALL)[-1]


def evaluate(expression: str, values: Mapping[str, int]) -> int:
    """A C integer expression of non-negative operands, with the given variables."""
    python = _ternary(" ".join(expression.split()))
    python = re.sub(r"(?<=\d)(?:u|ull)\b", "", python).replace("/", "//").replace("&&", " and ")
    functions = dict.fromkeys(("i64", "u32", "u64", "kept", "uniform", "shared_address"), int)  # all keep the value
    return int(eval(python, {"__builtins__": {}}, {**functions, **values}))


def _ternary(expression: str) -> str:
    """``a ? b : c`` as Python writes it; parenthesised parts first, nested arms to the right, as in C."""
    text, at = "", 0
    while at < len(expression):
        text += expression[at]
        if expression[at] == "(":
            end = _closing(expression, at)
            text += _ternary(expression[at + 1 : end]) + ")"
            at = end
        at += 1
    question = _outside(text, "?")
    if question < 0:
        return text
    colon = _outside(text, ":")
    yes, no = _ternary(text[question + 1 : colon]), _ternary(text[colon + 1 :])
    return f"(({yes}) if ({text[:question]}) else ({no}))"


def _closing(text: str, opening: int) -> int:
    depth = 0
    for at in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
    raise AssertionError(f"unbalanced: {text}")


def _outside(text: str, wanted: str) -> int:
    """First ``wanted`` outside parentheses and, for a colon, outside inner ternaries; -1 if there is none."""
    depth = open_ternaries = 0
    for at, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth:
            continue
        if character == wanted == "?" or (character == wanted == ":" and open_ternaries == 1):
            return at
        open_ternaries += {"?": 1, ":": -1}.get(character, 0)
    return -1
