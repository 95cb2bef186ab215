"""The demo: real questions through a router, a prefill and a decode engine, checked twice.

Once by content: every segment of KV that arrives on the decode engine must have the digest
that the prefill engine computed before it wrote. Once by result: a single plain engine, asked
the same one at a time, must give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from neuron_push.bench.lab import Lab
from neuron_push.bench.loads import BenchError
from neuron_push.launch import (
    Engine,
    Host,
    LaunchError,
    free_ports,
    metrics,
    serving,
)

MODEL_NAME = "smollm2"

TIE = 0.15
"""Two candidates closer than this in log-probability are a tie: the decode engine computes the
prompt's last token on its own, in another batch shape, and rounding differs there."""

LONG_TEXT = (
    "A harbour town kept a ledger of every ship that came and went. The keeper wrote the name of "
    "the ship, the weather of that day, what it carried, and who had waited for it on the quay. "
) * 24

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours, and say in one sentence why they are called primary.",
    "Explain to a child why the sky is blue. Use no more than three sentences.",
    "Write a short poem about a river that forgets its own name.",
    "Give me a list of five things to check before a long bicycle tour, with a reason for each.",
    f"Summarise the following text in one sentence.\n\n{LONG_TEXT}",
    f"Here is a text.\n\n{LONG_TEXT}\n\nWhat did the keeper write down about each ship?",
    "What is 17 plus 25? Answer with the number first and then explain how you got it.",
]


@dataclass
class Answer:
    """What one engine, or the pair, said to one question."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    best_two: list[list[float]] = field(default_factory=list)
    ttft_s: float = 0.0
    tokens_per_s: float = 0.0
    prompt_tokens: int = 0


@dataclass
class Row:
    """One request of the report."""

    question: str
    prompt_tokens: int
    kv_bytes: int
    segments: int
    kv_verified: bool
    ttft_s: float
    tokens_per_s: float
    identical: bool
    tie: bool
    answer: str
    difference: str = ""


def ask(url: str, question: str, max_tokens: int, console: Console | None) -> Answer:
    """Stream one answer, greedily, with the two best candidates of each token."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
    answer = Answer()
    started_s = time.monotonic()
    first_s = last_s = 0.0
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
    )
    for chunk in stream:
        if chunk.usage is not None:
            answer.prompt_tokens = chunk.usage.prompt_tokens
        for choice in chunk.choices:
            if choice.logprobs is not None:
                for entry in choice.logprobs.content or ():
                    answer.tokens.append(entry.token)
                    answer.best_two.append([top.logprob for top in entry.top_logprobs[:2]])
            if choice.delta.content:
                last_s = time.monotonic()
                first_s = first_s or last_s
                answer.text += choice.delta.content
                if console is not None:
                    console.print(choice.delta.content, end="", highlight=False, markup=False)
    answer.ttft_s = (first_s or time.monotonic()) - started_s
    if len(answer.tokens) > 1 and last_s > first_s:
        answer.tokens_per_s = (len(answer.tokens) - 1) / (last_s - first_s)
    return answer


def compare(got: Answer, reference: Answer) -> tuple[bool, bool, str]:
    """(counts as identical, by a tie, what differs first)."""
    for i, (a, b) in enumerate(zip(got.tokens, reference.tokens, strict=False)):
        if a != b:
            best = reference.best_two[i]
            gap = best[0] - best[1] if len(best) == 2 else float("inf")
            text = f"token {i}: {a!r} instead of {b!r}, candidates {gap:.3f} apart"
            return gap <= TIE, gap <= TIE, text
    if len(got.tokens) != len(reference.tokens):
        return False, False, f"{len(got.tokens)} tokens instead of {len(reference.tokens)}"
    return True, False, ""


def settled(url: str, wanted: float) -> dict[str, float]:
    """The consumer's metrics once they count ``wanted`` loads (they lag a step behind)."""
    name = "vllm:neuron_push_load_bytes_count"
    for _ in range(50):
        found = metrics(url, "vllm:neuron_push_")
        if found.get(name, 0) >= wanted:
            break
        time.sleep(0.1)
    return found


def lab(stack: ExitStack, console: Console) -> tuple[Host, Host]:
    """Two hosts of our own as root, else this host twice."""
    network = stack.enter_context(Lab())
    here, there = network.hosts
    if network.is_real:
        console.print(
            f"Two hosts of our own: prefill on {here.address}, decode on {there.address}."
        )
    else:
        console.print("Not root: both engines on this host, on loopback.")
    return here, there


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--json", type=Path, help="write the report here too")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--backend", choices=("UCX", "LIBFABRIC"), default="UCX")
    options = parser.parse_args()
    console = Console(highlight=False)
    log_dir = Path(tempfile.mkdtemp(prefix="neuron-push-demo-"))
    console.print(f"Logs of this run: {log_dir}")
    with ExitStack() as stack:
        here, there = lab(stack, console)
        ports = free_ports(5)
        # float32: this model's weights were 4 bits wide, and bf16 turns its thin margins around.
        common = {
            "model": options.model,
            "served_name": MODEL_NAME,
            "kv_cache_gib": 1,
            "backend": options.backend,
            "arguments": ("--dtype", "float32"),
        }
        if options.backend == "LIBFABRIC":
            common["environment"] = {"FI_TCP_IFACE": "eth0"}
        extra = {"verify_kv": True}
        producer = Engine("prefill", "producer", "push", port=ports[0], side_port=ports[1],
                          host=here, extra=extra, **common)  # fmt: skip
        consumer = Engine("decode", "consumer", "push", port=ports[2], side_port=ports[3],
                          host=there, extra=extra, **common)  # fmt: skip
        plain = Engine("plain", "plain", "plain", port=ports[4], **common)
        with console.status("Starting three vLLM servers ...") as status:
            pair = stack.enter_context(
                serving(
                    producer,
                    consumer,
                    log_dir,
                    lambda s: status.update(f"Starting three vLLM servers ... {s:.0f} s"),
                    more=[plain],
                )
            )
        console.print(f"Router at {pair.url}: prefill {producer.url}, decode {consumer.url}.\n")
        with console.status("First words with each server ..."):
            # vLLM loads its chat template with the first chat request: seconds that are not ours.
            for engine in (producer, consumer, plain):
                ask(engine.url, "Hello", 1, None)
        rows = []
        for number, question in enumerate(QUESTIONS, 1):
            shown = question if len(question) < 100 else question[:60] + " ... " + question[-35:]
            console.print(f"[bold]{number}. {shown}[/bold]".replace("\n", " "))
            before = metrics(consumer.url, "vllm:neuron_push_")
            got = ask(pair.url, question, options.max_tokens, console)
            console.print("\n")
            rows.append(report(question, got, before, consumer.url))
            rows[-1][0].answer = got.text
        with console.status("Asking the plain engine the same ..."):
            for row, got in rows:
                reference = ask(plain.url, row.question, options.max_tokens, None)
                row.identical, row.tie, row.difference = compare(got, reference)
    return show([row for row, _ in rows], console, options.json)


def report(question: str, got: Answer, before: dict[str, float], url: str) -> tuple[Row, Answer]:
    prefix = "vllm:neuron_push_"
    count = before.get(prefix + "load_bytes_count", 0)
    after = settled(url, count + 1)

    def grown(name: str) -> int:
        return int(after.get(prefix + name, 0) - before.get(prefix + name, 0))

    return (
        Row(
            question=question,
            prompt_tokens=got.prompt_tokens,
            kv_bytes=grown("load_bytes_sum"),
            segments=grown("load_segments_sum"),
            kv_verified=grown("verified_loads_total") == 1 and grown("load_bytes_count") == 1,
            ttft_s=round(got.ttft_s, 4),
            tokens_per_s=round(got.tokens_per_s, 1),
            identical=False,
            tie=False,
            answer="",
        ),
        got,
    )


def show(rows: list[Row], console: Console, path: Path | None) -> int:
    table = Table(title="Pushed KV, and the plain engine's answers beside ours")
    for column in ("", "prompt tokens", "KV pushed", "segments", "verified", "TTFT", "tokens/s",
                   "identical"):  # fmt: skip
        table.add_column(column, justify="right")
    for number, row in enumerate(rows, 1):
        verdict = "tie" if row.tie else "yes" if row.identical else "[red]no[/red]"
        table.add_row(
            str(number),
            str(row.prompt_tokens),
            f"{row.kv_bytes / 2**20:.2f} MiB",
            str(row.segments),
            "yes" if row.kv_verified else "[red]no[/red]",
            f"{row.ttft_s * 1000:.0f} ms",
            f"{row.tokens_per_s:.1f}",
            verdict,
        )
    console.print(table)
    for number, row in enumerate(rows, 1):
        if row.difference:
            console.print(f"{number}: first difference: {row.difference}", markup=False)
    identical_all = all(row.identical for row in rows)
    verified_all = all(row.kv_verified for row in rows)
    if path is not None:
        result = {
            "requests": [asdict(row) for row in rows],
            "identical_all": identical_all,
            "verified_all": verified_all,
        }
        path.write_text(json.dumps(result, indent=2) + "\n")
    if identical_all and verified_all:
        console.print("Every segment verified, every answer identical.")
        return 0
    console.print("[red]Not every segment verified, or not every answer identical.[/red]")
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LaunchError, BenchError) as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(2)
