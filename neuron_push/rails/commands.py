"""What the commands do once the box is there; cli.py only parses."""

from __future__ import annotations

import shlex
import sys

from . import report
from .environment import actuate
from .errors import EXIT_GOOD, EXIT_PROBLEM, RailsError
from .model import SCHEMA_VERSION, Box
from .select import Choice, Selection, select


def choice_of_device(selection: Selection, number: int) -> Choice:
    """The accelerator that a process calls N. RailsError if there is none."""
    choice = selection.of_process_device(number)
    if choice is None:
        seen = sum(one.process_index >= 0 for one in selection.choices)
        expected = f"0 to {seen - 1}" if seen else "none, since no accelerator is visible here"
        raise RailsError(f"--device {number} does not exist; expected {expected}")
    return choice


def run_env(box: Box, device: int | None, *, same_host: bool, as_json: bool) -> int:
    """Print the environment of one worker. `device` None means host memory."""
    selection = select(box)
    choice = choice_of_device(selection, device) if device is not None else None
    actuation = actuate(selection, choice, box.env, same_host=same_host)
    good = not actuation.kept and (choice is None or choice.is_good)
    if as_json:
        document = {
            "schema_version": SCHEMA_VERSION,
            "device": device,
            "pci_address": choice.pci_address if choice is not None else None,
            "env": actuation.as_dict(),
            "settings": actuation.settings,
            "kept": actuation.kept,
            "backend": actuation.backend,
            "backend_params": actuation.backend_params,
            "notes": actuation.notes,
        }
        sys.stdout.write(report.encode(document))
        return EXIT_GOOD if good else EXIT_PROBLEM
    for setting in actuation.settings:
        print(f"export {setting.name}={shlex.quote(setting.value)}  # {setting.reason}")
    for kept in actuation.kept:
        print(f"# {kept.name}={shlex.quote(kept.value)} stays: {kept.reason}")
    print(f"# NIXL backend: {actuation.backend}")
    for note in actuation.notes:
        print(f"# {note}")
    return EXIT_GOOD if good else EXIT_PROBLEM
