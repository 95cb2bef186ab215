"""What this package may import: it must start on a box where nothing else is installed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import neuron_push.rails

DIRECTORY = Path(neuron_push.rails.__file__).parent
ALLOWED = {"msgspec", "typer", "rich", *sys.stdlib_module_names}


@pytest.mark.parametrize("path", sorted(DIRECTORY.glob("*.py")), ids=lambda path: path.stem)
def test_imports(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] in ALLOWED, f"{path.name} imports {name}"
        if isinstance(node, ast.ImportFrom):
            assert node.level < 2, f"{path.name} reaches out of the package"


@pytest.mark.parametrize("path", sorted(DIRECTORY.glob("*.py")), ids=lambda path: path.stem)
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_functions_for_the_connector_are_there() -> None:
    for name in neuron_push.rails.__all__:
        assert getattr(neuron_push.rails, name) is not None
    with pytest.raises(AttributeError):
        _ = neuron_push.rails.absent
