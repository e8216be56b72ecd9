"""A fresh copy of a small checkpoint for every test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint
from tests.validate.editing import Editor


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The flat and the nested form, not to be changed."""
    base = tmp_path_factory.mktemp("originals")
    size = {"experts": 4, "hidden": 128, "intermediate": 64}
    return {nested: write_checkpoint(base / str(nested), nested=nested, **size) for nested in (False, True)}


@pytest.fixture
def flat(originals: dict[bool, Path], tmp_path: Path) -> Editor:
    """A checkpoint like K2-Thinking's: MoE layers 1 and 2, 4 experts, hidden 128, intermediate 64."""
    return Editor(shutil.copytree(originals[False], tmp_path / "flat"))


@pytest.fixture
def nested(originals: dict[bool, Path], tmp_path: Path) -> Editor:
    """The same in the form of K2.5 and later."""
    return Editor(shutil.copytree(originals[True], tmp_path / "nested"))
