"""The commands `neuron-push rails ...` and `neuron-push doctor`.

Exit codes: 0 good, 1 a problem was found, 2 could not look.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from .errors import EXIT_COULD_NOT_LOOK, EXIT_GOOD, EXIT_PROBLEM, RailsError
from .model import Box

P = ParamSpec("P")

rails_app = typer.Typer(
    name="rails",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Know, choose, check and explain the NICs (rails) that carry each device's KV memory.",
)

FromOption = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="Read a captured box or hwloc XML instead."),
]
RootOption = Annotated[
    Path, typer.Option("--root", metavar="DIR", help="Directory that holds sys/, proc/ and dev/.")
]
TypeOption = Annotated[
    str | None,
    typer.Option("--instance-type", metavar="TYPE", help="Take the box for this instance type."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON with a schema version.")]
DeviceOption = Annotated[
    int, typer.Option("--device", metavar="N", help="Device number as the process counts.")
]


def reporting_errors(command: Callable[P, int]) -> Callable[P, None]:
    """Turn a command's number into the exit code, and a RailsError into one sentence."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except RailsError as error:
            print(f"neuron-push: {error}", file=sys.stderr)
            code = error.exit_code
        except BrokenPipeError:
            sys.stderr.close()
            code = EXIT_GOOD
        raise typer.Exit(code)

    return run


@rails_app.command()
@reporting_errors
def show(
    *,
    from_: FromOption = None,
    root: RootOption = Path("/"),
    instance_type: TypeOption = None,
    as_json: JsonOption = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the machine into this file.")
    ] = None,
    tree: Annotated[bool, typer.Option(help="Draw the PCI tree.")] = True,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Predict for this model (or a path to config.json)."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt to predict.")] = 16384,
    tp: Annotated[int, typer.Option(help="Tensor parallel size to predict.")] = 8,
    block_tokens: Annotated[int, typer.Option(help="Tokens per KV block.")] = 16,
) -> int:
    """Show each device's rails, what NIXL would take, and where the two differ.

    \b
    Examples:
      neuron-push rails show
      neuron-push rails show --from box.json --json
      neuron-push rails show --svg machine.svg
      neuron-push rails show --model qwen3-32b --tokens 16384 --tp 8
    """
    from . import report
    from .select import select

    selection = select(_box(from_, root, instance_type))
    prediction = None
    if model is not None:
        from .kv_sizes import find_model
        from .predict import predict

        prediction = predict(
            selection,
            find_model(model),
            num_tokens=tokens,
            tensor_parallel=tp,
            block_tokens=block_tokens,
        )
    if svg is not None:
        from .svg import draw

        _write(svg, draw(selection))
    if as_json:
        sys.stdout.write(report.encode(report.show_document(selection, prediction)))
    else:
        from . import output

        out = output.console()
        output.print_selection(selection, out, with_tree=tree)
        if prediction is not None:
            output.print_prediction(prediction, out)
    if not selection.box.pci and selection.box.gaps:
        return EXIT_COULD_NOT_LOOK
    return EXIT_GOOD if selection.is_good else EXIT_PROBLEM


@rails_app.command()
@reporting_errors
def env(
    *,
    device: DeviceOption = 0,
    from_: FromOption = None,
    root: RootOption = Path("/"),
    instance_type: TypeOption = None,
    same_host: Annotated[
        bool, typer.Option("--same-host", help="Producer and consumer share this host.")
    ] = False,
    host_memory: Annotated[
        bool, typer.Option("--host-memory", help="KV lives in host memory, not on a device.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Print the environment that makes a device use its rails, as shell lines.

    \b
    Examples:
      eval "$(neuron-push rails env --device 3)"
      neuron-push rails env --device 0 --from box.json --json
    """
    from .commands import run_env

    box = _box(from_, root, instance_type)
    return run_env(box, None if host_memory else device, same_host=same_host, as_json=as_json)


def _box(from_: Path | None, root: Path, instance_type: str | None) -> Box:
    from .machine import look, read_box

    return read_box(from_, instance_type) if from_ is not None else look(root, instance_type)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise RailsError(f"{path} cannot be written: {error.strerror or error}") from None


def main() -> None:
    """Entry of `python -m neuron_push.rails`."""
    rails_app()
