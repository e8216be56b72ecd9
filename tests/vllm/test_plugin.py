"""The entry point: found by name, cheap to import, harmless where it cannot work."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from tests.vllm.conftest import environment

pytestmark = pytest.mark.vllm


def test_entry_point() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="chord")
    from chord_runtime.integrations.vllm import register

    assert found.load() is register


def test_importing_it_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, chord_runtime.integrations.vllm; print({'vllm', 'torch'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert ran.stdout == "set()\n", ran.stderr


def test_a_vllm_without_a_hook_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.model_executor import model_loader

    from chord_runtime.integrations.vllm import register

    register()
    register()
    monkeypatch.delattr(model_loader, "register_model_loader")
    monkeypatch.delitem(sys.modules, "chord_runtime.integrations.vllm.plugin")
    monkeypatch.delattr("chord_runtime.integrations.vllm.plugin")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        register()
    assert "Chord's plugin is off" in caplog.text and "register_model_loader" in caplog.text
