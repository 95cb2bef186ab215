"""The commands `neuron-push rails ...` and `neuron-push doctor`.

Exit codes: 0 good, 1 a problem was found, 2 could not look.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from .errors import EXIT_COULD_NOT_LOOK, EXIT_GOOD, EXIT_PROBLEM, RailsError

if TYPE_CHECKING:
    from .commands import DoctorRequest
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
        from .commands import write_text
        from .svg import draw

        write_text(svg, draw(selection))
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
    write_hwloc: Annotated[
        Path | None,
        typer.Option("--write-hwloc", metavar="FILE", help="Hide a host's other GPUs from NIXL."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Print the environment that makes a device use its rails, as shell lines.

    \b
    Examples:
      eval "$(neuron-push rails env --device 3)"
      neuron-push rails env --device 0 --from box.json --json
      eval "$(neuron-push rails env --device 0 --write-hwloc /tmp/gpu0.xml)"
    """
    from .commands import run_env

    box = _box(from_, root, instance_type)
    return run_env(
        box,
        None if host_memory else device,
        same_host=same_host,
        write_hwloc=write_hwloc,
        as_json=as_json,
    )


@rails_app.command()
@reporting_errors
def capture(
    *,
    from_: FromOption = None,
    root: RootOption = Path("/"),
    instance_type: TypeOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here.")
    ] = None,
) -> int:
    """Save this machine as a box: one JSON file that every command takes with --from.

    Nothing private is in it: no serial numbers, network addresses, host names or instance ids.

    \b
    Examples:
      neuron-push rails capture > box.json
      neuron-push rails capture --from lstopo.xml --instance-type p5en.48xlarge -o box.json
    """
    from . import box_io
    from .commands import write_text
    from .host_facts import fill_host

    box = _box(from_, root, instance_type)
    if from_ is None:
        fill_host(box, root)
    text = box_io.dump_box(box).decode()
    if output is not None:
        write_text(output, text)
    else:
        sys.stdout.write(text)
    return EXIT_COULD_NOT_LOOK if not box.pci and box.gaps else EXIT_GOOD


@rails_app.command()
@reporting_errors
def verify(
    *,
    device: Annotated[
        int | None,
        typer.Option("--device", metavar="N", help="Device; without it, host memory."),
    ] = None,
    backend: Annotated[str, typer.Option(help="NIXL backend to start.")] = "LIBFABRIC",
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for NIXL.")] = 60.0,
    instance_type: TypeOption = None,
    as_json: JsonOption = False,
) -> int:
    """Start NIXL in a child process, register memory, and compare its rails with the choice.

    \b
    Examples:
      neuron-push rails verify
      neuron-push rails verify --device 0
    """
    from .commands import run_verify

    return run_verify(
        _box(None, Path("/"), instance_type),
        device,
        backend=backend,
        timeout_s=timeout_s,
        as_json=as_json,
    )


@rails_app.command("check-log")
@reporting_errors
def check_log(
    log: Annotated[Path, typer.Argument(metavar="FILE", help="Log of a server, with stderr.")],
    *,
    from_: FromOption = None,
    root: RootOption = Path("/"),
    instance_type: TypeOption = None,
    as_json: JsonOption = False,
) -> int:
    """Read a running server's log and say, per NIXL agent, which rails it took.

    NIXL_LOG_LEVEL=INFO shows the map of GPUs and counts; DEBUG shows the rails by name.

    \b
    Examples:
      neuron-push rails check-log server.log
      neuron-push rails check-log server.log --from box.json --json
    """
    from .commands import run_check_log

    return run_check_log(_box(from_, root, instance_type), log, as_json=as_json)


@rails_app.command()
@reporting_errors
def watch(
    *,
    seconds: Annotated[float, typer.Option(help="Length of one interval.")] = 5.0,
    count: Annotated[int, typer.Option(help="Intervals; 0 is until interrupted.")] = 1,
    device: Annotated[
        int | None, typer.Option("--device", metavar="N", help="Expect only this device's rails.")
    ] = None,
    root: RootOption = Path("/"),
    as_json: JsonOption = False,
) -> int:
    """Show which NICs carried bytes: growth of rdma_write_bytes and its kin.

    \b
    Examples:
      neuron-push rails watch --seconds 10
      neuron-push rails watch --device 3 --count 0
    """
    from .commands import run_watch

    box = _box(None, root, None)
    return run_watch(box, root=root, seconds=seconds, count=count, device=device, as_json=as_json)


def doctor(
    *,
    from_: FromOption = None,
    root: RootOption = Path("/"),
    instance_type: TypeOption = None,
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Side channel of the other engine: try it, compare rails."
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Key file of the deployment, for --peer."),
    ] = None,
    peer_box: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Box of the other end, to compare with.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also read this server log.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Workers per host, for memory figures.")] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings end with 1 too.")] = False,
    info: Annotated[bool, typer.Option(help="Show what is merely worth knowing.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Find out why NIXL is slow, silent or says 'unsupported backend', and how to mend it.

    Exit codes: 0 good, 1 a problem was found, 2 something could not be seen.

    \b
    Examples:
      neuron-push doctor
      neuron-push doctor --peer 10.0.0.7:5600 --key-file keys.json
      neuron-push doctor --peer-box peer.json
      neuron-push doctor --from box.json --json
    """
    from .commands import DoctorRequest

    request = DoctorRequest(
        peer=peer,
        key_file=key_file,
        peer_box=peer_box,
        log=log,
        tensor_parallel=tp,
        strict=strict,
        info=info,
    )
    reporting_errors(_doctor)(request, from_, root, instance_type, as_json)


def _doctor(
    request: DoctorRequest,
    from_: Path | None,
    root: Path,
    instance_type: str | None,
    as_json: bool,
) -> int:
    from .commands import run_doctor
    from .host_facts import fill_host

    box = _box(from_, root, instance_type)
    if from_ is None:
        fill_host(box, root)
    return run_doctor(box, request, root=None if from_ is not None else root, as_json=as_json)


def _box(from_: Path | None, root: Path, instance_type: str | None) -> Box:
    from .machine import look, read_box

    return read_box(from_, instance_type) if from_ is not None else look(root, instance_type)


def main() -> None:
    """Entry of `python -m neuron_push.rails`, with `doctor` as one more command."""
    rails_app.command()(doctor)
    rails_app(prog_name="neuron-push rails")
