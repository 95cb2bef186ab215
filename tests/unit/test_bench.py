"""Benchmarks without servers: names, what is kept on resume, ratios, order of runs, CPU rates."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("psutil")

from neuron_push.bench import probes, serve, summary
from neuron_push.bench.client import Client, benchmark_arguments
from neuron_push.bench.connector import check_options, compare, flatten
from neuron_push.bench.couple import block_runs
from neuron_push.bench.geometry import GEOMETRIES, Tables
from neuron_push.bench.loads import (
    MODES,
    BenchError,
    Calibration,
    Load,
    RunName,
    custom_loads,
    is_good_run,
    kv_bytes_per_token,
    parse_run_name,
    preset_loads,
    run_name,
    run_path,
)
from neuron_push.bench.ports import quiet_ports
from neuron_push.cli import make_app

SMOLLM2_BYTES = 23_040


def result(path: Path, ttft: float, failed: int = 0, **ours: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {
                "failed": failed,
                "completed": 8 - failed,
                "mean_ttft_ms": ttft,
                "median_ttft_ms": ttft,
                "p99_ttft_ms": ttft * 2,
                "mean_tpot_ms": 10.0,
                "neuron_push": ours,
            }
        )
    )


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("qps", [0.0, 1.0, 0.23, 8.0])
def test_names_say_what_they_were_made_of(mode: str, qps: float) -> None:
    name = run_name(mode, Load(4096, 32, qps, 5), 3)
    assert parse_run_name(name) == RunName(mode, qps, 4096, 32, 3)


def test_names_are_those_of_the_published_sweep() -> None:
    assert run_name("push", Load(1024, 128, 2.0, 100), 1) == "push_qps2_in1024_out128_iter1.json"


@pytest.mark.parametrize(
    "name",
    [
        "summary.json",
        "part_push_qps1_in1_out1_iter1.json",
        "push_qps1_in1_out1_iter1.failed",
        "waiting_push_iter1.json",
    ],
)
def test_other_files_are_no_runs(name: str) -> None:
    assert parse_run_name(name) is None


def test_a_limited_link_has_a_folder_of_its_own(tmp_path: Path) -> None:
    fast, slow = Load(64, 8, 0.0, 1), Load(64, 8, 0.0, 1, link_mbps=240)
    assert run_path(tmp_path, "push", fast, 1) == tmp_path / "push_qps0_in64_out8_iter1.json"
    assert run_path(tmp_path, "push", slow, 1).parent == tmp_path / "link240"


@pytest.mark.parametrize("bad", [{"input_len": 0}, {"num_prompts": 0}, {"qps": -1.0}])
def test_a_load_refuses_nonsense(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        Load(**{"input_len": 64, "output_len": 8, "qps": 1.0, "num_prompts": 4} | bad)


# ---------------------------------------------------------------- loads


def test_seeds_are_equal_for_all_modes_and_differ_by_round_and_load() -> None:
    loads = [Load(1024, 32, 1.3, 8), Load(4096, 32, 0.0, 8), Load(4096, 32, 0.0, 8, 240)]
    seeds = {load.seed(i) for load in loads for i in range(1, 6)}
    assert len(seeds) == 15


def test_the_preset_offers_what_the_targets_name() -> None:
    loads = preset_loads(Calibration({1024: 0.5, 4096: 3.0}), SMOLLM2_BYTES)
    busy = [load for load in loads if load.qps]
    assert [(load.input_len, load.qps) for load in busy] == [(1024, 1.4), (4096, 0.23)]
    (limited,) = [load for load in loads if load.link_mbps]
    # 4096 tokens of 23,040 bytes in 3 s
    assert limited.link_mbps == round(4096 * 23_040 * 8 / 3e6)
    alone = [load for load in loads if not load.qps and not load.link_mbps]
    assert [load.input_len for load in alone] == [1024, 4096]
    assert all("plain" in load.modes for load in alone)
    assert not any("plain" in load.modes for load in [*busy, limited])


def test_calibration_survives_its_file() -> None:
    calibration = Calibration({1024: 0.5, 4096: 3.25})
    assert Calibration.from_json(json.loads(json.dumps(calibration.to_json()))) == calibration


def test_kv_bytes_of_the_small_model(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 30, "num_key_value_heads": 3, "num_attention_heads": 9,
              "hidden_size": 576}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_bytes_per_token(tmp_path) == SMOLLM2_BYTES


def test_plain_runs_one_request_at_a_time_only() -> None:
    loads = custom_loads([64], [8], [0.0, 2.0], 4, None, ["push", "plain"])
    assert [load.modes for load in loads] == [("push", "plain"), ("push",)]


def test_arguments_of_the_load_generator(tmp_path: Path) -> None:
    alone = benchmark_arguments(Load(64, 8, 0.0, 4), "http://x", "m", 2, tmp_path / "r.json")
    assert alone[alone.index("--max-concurrency") + 1] == "1"
    assert "--request-rate" not in alone
    rated = benchmark_arguments(Load(64, 8, 1.5, 4), "http://x", "m", 2, tmp_path / "r.json")
    assert rated[rated.index("--request-rate") + 1] == "1.5"
    assert rated[rated.index("--seed") + 1] == str(Load(64, 8, 1.5, 4).seed(2))


# ---------------------------------------------------------------- resume


DRIVER = """
import json, pathlib, sys, time
print(json.dumps({"error": None}), flush=True)
for line in sys.stdin:
    what, path = json.loads(line)
    if what == "slow":
        time.sleep(1)
    if what == "dies":
        sys.exit(1)
    if what not in ("fails", "writes nothing"):
        pathlib.Path(path).write_text(json.dumps({"said": what}))
    print(json.dumps({"error": "no route" if what == "fails" else None}), flush=True)
"""


@pytest.mark.parametrize(
    ("what", "sentence"),
    [("fails", "failed: no route"), ("writes nothing", "left no result"),
     ("dies", "has ended"), ("slow", "gave no answer in 0.3 s")],
)  # fmt: skip
def test_a_failed_run_of_the_load_generator_is_not_taken_for_the_next(
    tmp_path: Path, what: str, sentence: str
) -> None:
    client = Client(tmp_path / "client.log", [sys.executable, "-c", DRIVER])
    try:
        client.wait_ready()
        lost = tmp_path / "lost.json"
        with pytest.raises(BenchError, match=sentence):
            client.run([what, str(lost)], lost, 0.3)
        good = tmp_path / "good.json"
        assert client.run(["next", str(good)], good, 5.0) == {"said": "next"}
    finally:
        client.close()


def test_only_complete_runs_without_failures_are_kept(tmp_path: Path) -> None:
    good, bad, torn = (tmp_path / name for name in ("good", "bad", "torn"))
    result(good, 1.0)
    result(bad, 1.0, failed=1)
    torn.write_text('{"failed": 0, "comp')
    assert [is_good_run(path) for path in (good, bad, torn, tmp_path / "none")] == [
        True, False, False, False,
    ]  # fmt: skip


def bench_of(tmp_path: Path, rounds: int, loads: tuple[Load, ...]) -> serve.ServeBench:
    from rich.console import Console

    from neuron_push.bench.pairs import Settings

    plan = serve.ServePlan(Settings("m"), tmp_path, rounds, loads, MODES, probe_len=0)
    return serve.ServeBench(plan, Console())


def test_each_round_takes_every_mode_in_turn_and_begins_with_another(tmp_path: Path) -> None:
    loads = (Load(64, 8, 1.0, 4),)
    work = [text for text, _ in bench_of(tmp_path, 2, loads)._work(loads)]
    modes = [text.split(": ")[1] for text in work]
    assert modes == ["push", "vllm-push", "vllm-pull", "vllm-push", "vllm-pull", "push"]


def test_a_resumed_measurement_does_what_is_missing(tmp_path: Path) -> None:
    loads = (Load(64, 8, 1.0, 4),)
    result(run_path(tmp_path, "push", loads[0], 1), 1.0)
    result(run_path(tmp_path, "vllm-pull", loads[0], 1), 1.0, failed=1)
    work = [text for text, _ in bench_of(tmp_path, 1, loads)._work(loads)]
    assert [text.split(": ")[1] for text in work] == ["vllm-push", "vllm-pull"]


# ---------------------------------------------------------------- ratios


def test_ratios_are_taken_round_by_round(tmp_path: Path) -> None:
    load = Load(64, 8, 1.0, 4)
    for i, (mine, theirs) in enumerate([(10.0, 20.0), (12.0, 40.0), (9.0, 10.0)], 1):
        result(run_path(tmp_path, "push", load, i), mine,
               cpu_s_per_request={"decode worker": 1.0})  # fmt: skip
        result(run_path(tmp_path, "vllm-push", load, i), theirs,
               cpu_s_per_request={"decode worker": 4.0})  # fmt: skip
    result(run_path(tmp_path, "push", load, 4), 1.0)  # a round the other has not
    entries = {entry["metric"]: entry for entry in summary.summarise(tmp_path)["ratios"]}
    ttft = entries["ttft_mean"]
    assert ttft["rounds"] == [0.5, 0.3, 0.9]
    assert (ttft["min"], ttft["median"], ttft["max"]) == (0.3, 0.5, 0.9)
    assert (ttft["against"], ttft["input_len"], ttft["qps"], ttft["link_mbps"]) == (
        "vllm-push", 64, 1.0, None,
    )  # fmt: skip
    assert entries["cpu_s_per_request decode worker"]["median"] == 0.25


def test_loads_that_differ_by_the_link_are_kept_apart(tmp_path: Path) -> None:
    for link, mine in ((None, 10.0), (240, 5.0)):
        load = Load(64, 8, 0.0, 4, link)
        result(run_path(tmp_path, "push", load, 1), mine, link_mbps=link)
        result(run_path(tmp_path, "vllm-pull", load, 1), 10.0, link_mbps=link)
    found = {
        entry["link_mbps"]: entry["median"]
        for entry in summary.summarise(tmp_path)["ratios"]
        if entry["metric"] == "ttft_mean"
    }
    assert found == {None: 1.0, 240: 0.5}


def test_failed_runs_count_for_nothing(tmp_path: Path) -> None:
    load = Load(64, 8, 0.0, 4)
    result(run_path(tmp_path, "push", load, 1), 1.0, failed=1)
    result(run_path(tmp_path, "vllm-pull", load, 1), 10.0)
    assert summary.summarise(tmp_path)["ratios"] == []


def test_waiting_is_summed_up_by_mode(tmp_path: Path) -> None:
    for i, above in enumerate((0.1, 0.3, 0.2), 1):
        probes.write(
            probes.waiting_path(tmp_path, "push", i),
            {"mode": "push", "input_len": 4096, "idle_cores": 0.0, "waiting_cores": above,
             "above_idle_cores": above},
        )  # fmt: skip
    (entry,) = summary.waiting(tmp_path)
    assert entry["above_idle_cores"]["median"] == 0.2


def test_a_cpu_rate_is_taken_between_two_moments() -> None:
    samples = [(0.0, 5.0), (1.0, 5.0), (2.0, 5.5), (3.0, 6.0), (4.0, 9.0)]
    assert probes.rate_between(samples, 0.9, 3.1) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="too short"):
        probes.rate_between(samples, 1.1, 1.9)


# ---------------------------------------------------------------- bench connector's arithmetic


def test_geometries_have_the_size_of_their_models() -> None:
    per_token = {name: geometry.bytes_per_token for name, geometry in GEOMETRIES.items()}
    assert per_token == {
        "qwen3-32b-tp8": 32 * 1024, "llama-3.1-8b-tp1": 128 * 1024, "smollm2": SMOLLM2_BYTES,
    }  # fmt: skip
    for geometry in GEOMETRIES.values():
        assert 2 * geometry.pool_bytes < 6 * 2**30
        assert (geometry.num_blocks - 1) * 32 >= 4 * 4096


@pytest.mark.parametrize("run", [None, 8])
def test_tables_hold_no_block_twice_and_never_the_null_block(run: int | None) -> None:
    tables = Tables(200, run, seed=3)
    first, second = tables.take(64 * 32), tables.take(100 * 32)
    assert 0 not in first + second
    assert len(set(first + second)) == 164
    breaks = sum(b != a + 1 for a, b in pairwise(first))
    if run is None:
        assert breaks == 0
    else:
        assert 4 <= breaks <= 9
    tables.give(second)
    with pytest.raises(ValueError, match="free"):
        tables.take(200 * 32)


def test_plain_runs_join_blocks_that_adjoin_at_both_ends() -> None:
    geometry = GEOMETRIES["smollm2"]
    page = geometry.page_bytes
    runs = block_runs([1, 2, 3, 7], [4, 5, 9, 10], geometry, 0, 0)
    assert len(runs) == 3 * geometry.num_layers
    assert runs[0] == (page, 4 * page, 2 * page)
    assert sum(size for _, _, size in runs) == 4 * page * geometry.num_layers


def test_options_name_what_is_allowed() -> None:
    good: dict[str, Any] = {
        "geometry": "smollm2", "modes": None, "only": None, "backend": "UCX", "rounds": 1,
        "step_ms": 1.0, "decode_step_ms": 0.0, "chunk_tokens": 64, "quick": True,
    }  # fmt: skip
    assert check_options(**good).modes == ("push", "vllm-push", "vllm-pull")
    for change in ({"geometry": "x"}, {"modes": ["plain"]}, {"only": ["x"]}, {"backend": "x"}):
        with pytest.raises(ValueError, match="is not allowed; allowed: "):
            check_options(**good | change)


def test_hand_over_is_compared_with_each_other_mode() -> None:
    handover = {"push": {"median_ms": 5.0}, "vllm-push": {"median_ms": 20.0}}
    assert compare({"handover": handover}) == {"hand-over push / vllm-push": 0.25}


def test_flatten_names_nested_figures() -> None:
    assert flatten({"a": {"b": 1}, "c": 2}) == [("a, b", 1), ("c", 2)]


def test_ports_are_below_those_of_outgoing_connections() -> None:
    ports = quiet_ports(8)
    assert len(set(ports)) == 8
    assert max(ports) < 32_768


# ---------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--mode", "pull"], "--mode"),
        (["--preset", "all"], "--preset"),
        (["--placement", "x"], "--placement"),
        (["--qps", "fast"], "--qps"),
        (["--input-lens", ""], "--input-lens"),
    ],
)
def test_serve_refuses_wrong_options(tmp_path: Path, arguments: list[str], option: str) -> None:
    done = CliRunner().invoke(
        make_app(), ["bench", "serve", "--model", "m", "--results-dir", str(tmp_path), *arguments]
    )
    assert done.exit_code == 2
    assert f"error: {option}: " in done.output
    assert "allowed: " in done.output
