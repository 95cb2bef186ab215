"""`neuron-push bench`. Imports nothing heavy until a command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from neuron_push.extras import import_extra

bench = typer.Typer(
    help="Measure: ours beside vLLM's own NIXL connectors, in one run.", no_args_is_help=True
)


@bench.command("serve")
def serve(
    *,
    model: Annotated[Path, typer.Option(help="Checkpoint folder (scripts/get_model.sh).")],
    results_dir: Annotated[Path, typer.Option(help="Where results go; kept and continued.")],
    preset: Annotated[
        str, typer.Option(help="'targets': the loads and rates of docs/performance.md.")
    ] = "",
    mode: Annotated[
        list[str] | None,
        typer.Option(help="push, vllm-push, vllm-pull or plain; repeat. Default: the three pairs."),
    ] = None,
    input_lens: Annotated[str, typer.Option(help="Prompt tokens, separated by spaces.")] = "1024",
    output_lens: Annotated[str, typer.Option(help="Answer tokens, separated by spaces.")] = "32",
    qps: Annotated[
        str, typer.Option(help="Requests a second, separated by spaces; 0: one at a time.")
    ] = "0",
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests a run.")] = 8,
    link_mbps: Annotated[
        int | None, typer.Option(min=1, help="Limit of each host's link, in Mbit/s.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times each load goes through each mode.")] = 5,
    backend: Annotated[str, typer.Option(help="NIXL backend of every mode.")] = "UCX",
    chunk_tokens: Annotated[
        int, typer.Option(min=32, help="Prefill chunk of every engine (max-num-batched-tokens).")
    ] = 512,
    num_blocks: Annotated[
        int, typer.Option(min=64, help="KV cache of each engine, blocks of 32 tokens.")
    ] = 800,
    placement: Annotated[
        str,
        typer.Option(
            help="free: any thread on any core, in all modes; as-is: as vLLM's connectors pin them."
        ),
    ] = "free",
    verify_kv: Annotated[
        bool, typer.Option("--verify-kv", help="Digests of all KV (push only; slows it).")
    ] = False,
    probe_len: Annotated[
        int, typer.Option(min=0, help="Prompt tokens of the probe of D's CPU; 0: no probe.")
    ] = 4096,
    no_lab: Annotated[
        bool, typer.Option("--no-lab", help="On loopback, even if namespaces could be had.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Summary file.")] = None,
) -> None:
    """Real vLLM servers under the same load, mode by mode, round by round."""
    serving = import_extra("neuron_push.bench.serve", extra="bench")
    loads = import_extra("neuron_push.bench.loads", extra="bench")
    pairs = import_extra("neuron_push.bench.pairs", extra="bench")
    from rich.console import Console

    console = Console(highlight=False)
    if preset not in ("", "targets"):
        raise _wrong("--preset", preset, "targets")
    if placement not in ("free", "as-is"):
        raise _wrong("--placement", placement, "free, as-is")
    modes = tuple(mode or loads.PAIR_MODES)
    for name in modes:
        if name not in loads.MODES:
            raise _wrong("--mode", name, ", ".join(loads.MODES))
    if preset:
        modes, chosen = loads.MODES, None
    else:
        chosen = tuple(
            loads.custom_loads(
                _numbers("--input-lens", input_lens, int),
                _numbers("--output-lens", output_lens, int),
                _numbers("--qps", qps, float),
                num_prompts, link_mbps, modes,
            )
        )  # fmt: skip
    plan = serving.ServePlan(
        settings=pairs.Settings(
            model=str(model.resolve()), backend=backend, chunk_tokens=chunk_tokens,
            num_blocks=num_blocks, placement=placement,
            extra={"verify_kv": True} if verify_kv else {},
        ),
        results_dir=results_dir, rounds=rounds, loads=chosen, modes=modes,
        probe_len=probe_len, use_lab=not no_lab,
    )  # fmt: skip
    failed: list[str] = []
    try:
        failed = serving.ServeBench(plan, console).run()
    except KeyboardInterrupt:
        console.print("interrupted: what is measured is kept; the same command goes on")
        raise typer.Exit(130) from None
    except (loads.BenchError, serving.LaunchError) as e:
        typer.echo(f"error: {e}", err=True)
        raise typer.Exit(1) from None
    show_ratios(serving.write_summary(results_dir, json_file), console)
    for sentence in failed:
        typer.echo(f"failed: {sentence}", err=True)
    if failed:
        raise typer.Exit(1)


def show_ratios(summary: dict[str, Any], console: Any) -> None:
    """The latencies of the summary as a table."""
    from rich.table import Table

    table = Table(title="push / other mode, medians over rounds (below 1: push took less)")
    for column in ("in", "qps", "link Mbit/s", "against", "metric", "min", "median", "max"):
        table.add_column(column, justify="right")
    for entry in summary["ratios"]:
        if not entry["metric"].startswith("cpu"):
            table.add_row(
                *(str(entry[key]) for key in ("input_len", "qps")), str(entry["link_mbps"] or "-"),
                *(str(entry[key]) for key in ("against", "metric")),
                *(f"{entry[key]:.3f}" for key in ("min", "median", "max")),
            )  # fmt: skip
    console.print(table)
    for entry in summary["waiting"]:
        console.print(
            f"{entry['mode']}: a decode engine that waits uses "
            f"{entry['above_idle_cores']['median']:.3f} core above an idle one"
        )


@bench.command("connector")
def connector(
    *,
    geometry: Annotated[
        str, typer.Option(help="qwen3-32b-tp8, llama-3.1-8b-tp1 or smollm2.")
    ] = "smollm2",
    mode: Annotated[
        list[str] | None,
        typer.Option(help="push, vllm-push or vllm-pull; repeat. Default: all three."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="handover, hooks, rate, handshake or events; repeat. Default: all."),
    ] = None,
    backend: Annotated[str, typer.Option(help="NIXL backend.")] = "UCX",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each measurement.")] = 5,
    step_ms: Annotated[
        float, typer.Option(min=0, help="A prefill step of one chunk takes this long.")
    ] = 40.0,
    decode_step_ms: Annotated[
        float, typer.Option(min=0, help="A decode step takes this long; 0: D has nothing else.")
    ] = 10.0,
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Prompt tokens a step.")] = 512,
    quick: Annotated[bool, typer.Option("--quick", help="Small: shows that it works.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Result file.")] = None,
) -> None:
    """The connector classes without a model: hand-over, hooks, rate, handshake, events."""
    bench_connector = import_extra("neuron_push.bench.connector", extra="bench")
    from rich.console import Console

    def keep(report: dict[str, Any]) -> None:
        """What is measured survives an interruption of the rest."""
        if json_file is not None:
            json_file.write_text(json.dumps(report, indent=1) + "\n")

    try:
        options = bench_connector.check_options(
            geometry=geometry, modes=mode, only=only, backend=backend, rounds=rounds,
            step_ms=step_ms, decode_step_ms=decode_step_ms, chunk_tokens=chunk_tokens, quick=quick,
        )  # fmt: skip
        report = bench_connector.run(options, Console(highlight=False), keep)
    except ValueError as e:
        typer.echo(f"error: {e}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if report["failed"]:
        raise typer.Exit(1)


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    try:
        values = [kind(part) for part in text.replace(",", " ").split()]
    except ValueError:
        values = []
    if not values:
        raise _wrong(option, text, "numbers separated by spaces")
    return values


def _wrong(option: str, value: str, allowed: str) -> typer.Exit:
    typer.echo(f"error: {option}: {value!r} is not allowed; allowed: {allowed}", err=True)
    return typer.Exit(2)
