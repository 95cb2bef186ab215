"""The command `neuron-push devices`: each backend, and what it says of this machine."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List the device backends and what each says of this machine."""
    found = describe_all()
    if as_json:
        typer.echo(json.dumps({"schema_version": 1, "devices": found}, indent=2))
        return
    for one in found:
        typer.echo(f"{one['name']}: {'available' if one['available'] else 'not available'}")
        typer.echo(f"    {one['reason']}")
        for check in one["checks"]:
            if check["outcome"] != "skipped":
                typer.echo(f"    {check['outcome']:>6}  {check['name']}: {check['says']}")
        for name, version in one["versions"].items():
            typer.echo(f"      with  {name} {version}")


def describe_all() -> list[dict]:
    """name, available, reason, checks and versions of every installed backend."""
    from neuron_push.devices.base import installed_backends
    from neuron_push.devices.checks import Description

    found = []
    for entry in installed_backends():
        try:
            said = entry.load()().describe()
        except Exception as e:  # one that does not load must not hide the others
            said = Description(entry.name, False, f"{entry.value} does not load: {e!r}")
        found.append(dataclasses.asdict(said))
    return found
