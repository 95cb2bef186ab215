"""Commands whose libraries come with an extra, not with the base install."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingExtraError(Exception):
    """A command cannot run before an extra is installed. The message says which."""


def import_extra(module: str, *, extra: str) -> ModuleType:
    """Imports one of our modules whose own imports need `extra`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as err:
        if err.name is None or err.name.partition(".")[0] == "neuron_push":
            raise
        raise MissingExtraError(
            f"this command needs {err.name}, which is not installed; "
            f"install it with: pip install 'neuron-push[{extra}]'"
        ) from err
