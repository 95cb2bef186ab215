"""The documents say what is true of the code: options, commands, names, tables, links."""

from __future__ import annotations

import json
import pkgutil
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import msgspec
import pytest
import typer

from neuron_push.cli import make_app
from neuron_push.config import PushConfig
from neuron_push.core.session import CONSUMER_LEG, PRODUCER_LEG, CEvent, CState, PEvent, PState
from neuron_push.router.options import check_options

pytestmark = pytest.mark.timeout(30)

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

every_page = pytest.mark.parametrize("page", PAGES, ids=IDS)


@cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fences(page: Path) -> list[str]:
    """The contents of all fenced blocks, indented ones too."""
    return re.findall(r"^ *```\w*\n(.*?)^ *```", text(page), re.M | re.S)


def code(page: Path) -> list[str]:
    """All that stands in code: fenced blocks and spans."""
    prose = re.sub(r"^ *```.*?^ *```", "", text(page), flags=re.M | re.S)
    return fences(page) + re.findall(r"`([^`\n]+)`", prose)


def tables(page: Path) -> list[tuple[list[str], list[list[str]]]]:
    """(header, rows) of each table."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text(page), re.M):
        header, rule, *rows = [
            [cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()
        ]
        assert all(set(cell) <= set("-: ") for cell in rule), f"{page.name}: {rule}"
        assert all(len(row) == len(header) for row in rows), f"{page.name}: table {header}"
        found.append((header, rows))
    return found


def table(page: Path, *columns: str) -> list[list[str]]:
    """The rows of the only table with this header."""
    wanted = [rows for header, rows in tables(page) if header == list(columns)]
    assert len(wanted) == 1, f"{page.name}: {len(wanted)} tables with columns {columns}"
    return wanted[0]


def test_the_configuration_table_is_that_of_the_code() -> None:
    rows = table(ROOT / "README.md", "Option", "Default", "Unit", "Meaning")
    documented = {name.strip("`"): json.loads(default.strip("`")) for name, default, *_ in rows}
    actual = {
        field.name: list(field.default) if isinstance(field.default, tuple) else field.default
        for field in msgspec.structs.fields(PushConfig)
    }
    assert documented == actual
    for name, _, unit, meaning in rows:
        assert (unit == "s") == name.strip("`").endswith("_s"), name
        assert meaning


@every_page
def test_python_names_exist(page: Path) -> None:
    for span in code(page):
        if re.fullmatch(r"neuron_push(\.\w+)+", span):
            pkgutil.resolve_name(span)


def test_the_metrics_are_those_of_the_code() -> None:
    source = (ROOT / "neuron_push" / "metrics.py").read_text()
    actual = {f"{name}_total" for name in re.findall(r'each\(\s*counter,\s*"(\w+)"', source)}
    actual |= {f"{name}_total" for name in re.findall(r'name="vllm:neuron_push_(\w+)"', source)}
    actual |= set(re.findall(r'each\(\s*histogram,\s*"(\w+)"', source))
    rows = table(ROOT / "README.md", "Metric", "Type", "On", "Meaning")
    assert {row[0].strip("`") for row in rows} == actual


def test_every_reason_of_a_failure_has_its_advice() -> None:
    used: set[str] = set()
    for file in (ROOT / "neuron_push").rglob("*.py"):
        used |= set(re.findall(r"Reason\.([A-Z_]+)", file.read_text()))
    symptoms = " ".join(
        row[0]
        for row in table(ROOT / "README.md", "Symptom", "Cause", "Command, or what to change")
    )
    assert {reason for reason in used if f"`{reason.lower()}`" not in symptoms} == set()


@pytest.mark.parametrize(
    ("columns", "states", "events", "transitions"),
    [
        ("producer", PState, PEvent, PRODUCER_LEG),
        ("consumer", CState, CEvent, CONSUMER_LEG),
    ],
    ids=["producer", "consumer"],
)
def test_the_session_tables_are_those_of_the_code(columns, states, events, transitions) -> None:
    rows = table(ROOT / "docs" / "design.md", "State", *[event.value for event in events])
    documented = {
        (states[row[0]], event): states[cell]
        for row in rows
        for event, cell in zip(events, row[1:], strict=True)
        if cell != "-"
    }
    assert {row[0] for row in rows} == {state.name for state in states}
    assert documented == transitions


def test_the_servers_command_lines_are_accepted() -> None:
    """The engines' transfer configurations, and the router's options, as a reader copies them."""
    joined = "\n".join(fences(ROOT / "README.md")).replace("\\\n", " ")
    # A quoted argument may span lines.
    words = shlex.split(joined, comments=True)
    configs = [
        json.loads(words[i + 1]) for i, word in enumerate(words) if word == "--kv-transfer-config"
    ]
    assert {config["kv_role"] for config in configs} == {"kv_producer", "kv_consumer"}
    for config in configs:
        PushConfig.load(config["kv_connector_extra_config"], {})
        module = ROOT / (config["kv_connector_module_path"].replace(".", "/") + ".py")
        assert f"class {config['kv_connector']}(" in module.read_text()

    lines = [line for line in joined.splitlines() if line.startswith("neuron-push router ")]
    assert lines
    for line in lines:
        options: dict[str, list[str]] = {}
        rest = shlex.split(line)[2:]
        for name, value in zip(rest[::2], rest[1::2], strict=True):
            options.setdefault(name.removeprefix("--").replace("-", "_"), []).append(value)
        check_options(
            options.pop("prefill"),
            options.pop("decode"),
            **{name: values[-1] for name, values in options.items()},
        )


@every_page
def test_every_script_named_exists(page: Path) -> None:
    named = set(re.findall(r"scripts/[\w./-]*\w", text(page)))
    assert {name for name in named if not (ROOT / name).is_file()} == set()


@every_page
def test_every_file_named_exists(page: Path) -> None:
    """Paths in code spans. `tests/faults` is said to come later."""
    named = {
        path
        for span in code(page)
        for path in re.findall(r"^(?:neuron_push|tests|docs|devices|core|router)/[\w./-]*", span)
    } - {"tests/faults"}
    assert {
        path
        for path in named
        if not (ROOT / path).exists() and not (ROOT / "neuron_push" / path).exists()
    } == set()


@every_page
def test_every_subcommand_named_exists(page: Path) -> None:
    group = typer.main.get_command(make_app())
    known = set(getattr(group, "commands", {}))
    named = {
        name for part in code(page) for name in re.findall(r"\bneuron-push ([a-z][\w-]*)", part)
    }
    assert named - known == set()


@every_page
def test_every_pytest_marker_named_is_registered(page: Path) -> None:
    registered = set(re.findall(r'^ +"(\w+): ', (ROOT / "pyproject.toml").read_text(), re.M))
    for part in code(page):
        for quoted, bare in re.findall(r'pytest[^\n]* -m (?:"([\w ]+)"|(\w+))', part):
            named = set((quoted or bare).split())
            assert named - {"and", "or", "not"} <= registered, part


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


@every_page
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{page.name}: {target}"
        if fragment:
            headings = re.findall(r"^#+ (.*)", text(file), re.M)
            assert fragment in {anchor(heading) for heading in headings}, f"{page.name}: {target}"


def project_files() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("not a git checkout: no list of the project's files")
    return [ROOT / name for name in done.stdout.decode().split("\0") if name]


def test_nothing_depends_on_a_folder_that_is_not_part_of_the_project() -> None:
    """Only a test that skips where that folder is absent may name it."""
    foreign = re.compile(rb"(?<![\w-])" + b"sha" + b"red/")
    naming = []
    for file in project_files():
        if not file.is_file() or file.is_symlink():
            continue
        content = file.read_bytes()
        may = file.is_relative_to(ROOT / "tests") and b"skip" in content
        if foreign.search(content) and not may:
            naming.append(str(file.relative_to(ROOT)))
    assert naming == []
