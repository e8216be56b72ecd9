"""Checkpoints that the converter's tests read and never change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint
from tests.convert.helpers import run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two MoE layers of 8 experts, in the form of K2-Thinking."""
    return write_checkpoint(tmp_path_factory.mktemp("flat") / "model")


@pytest.fixture(scope="session")
def nested_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The form of K2.5 and later, tensors cut into files anywhere, 12 experts."""
    folder = tmp_path_factory.mktemp("nested") / "model"
    return write_checkpoint(folder, nested=True, experts=12, intermediate=256, shards=5)


@pytest.fixture(scope="session")
def packed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model``, converted for two ranks. Copy it before changing it."""
    output = tmp_path_factory.mktemp("packed") / "out"
    run(model, output)
    return output


@pytest.fixture(scope="session")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes long enough to be killed in the middle: 20 files of experts."""
    return write_checkpoint(tmp_path_factory.mktemp("larger") / "model", layers=6, experts=16)
