"""Damaged boxes and trees: one sentence or an answer, never another exception."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_push.rails import box_io, doctor, machine, output, report
from neuron_push.rails.doctor_base import Situation
from neuron_push.rails.environment import actuate
from neuron_push.rails.errors import RailsError
from neuron_push.rails.hwloc_xml import to_xml
from neuron_push.rails.kv_sizes import KNOWN_MODELS
from neuron_push.rails.model import Box
from neuron_push.rails.predict import predict
from neuron_push.rails.select import select
from neuron_push.rails.svg import draw
from neuron_push.rails.topology import Topology

from .conftest import TOPOLOGIES, load, write_sysfs

TEXTS = {
    name: (TOPOLOGIES / f"{name}.json").read_text()
    for name in ("p5en.48xlarge", "trn2.48xlarge", "trn1.32xlarge", "g5.48xlarge")
}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["0000:00:00.0", "pci0000:44", "DOWN", "efa", [], {}, "nodes:0", -1, 0, 1]),
    st.lists(st.integers(), max_size=3),
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(node, dict):
        for key, value in node.items():
            found += places(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            found += places(value, (*path, index))
    return found


PLACES = {name: places(json.loads(text)) for name, text in TEXTS.items()}


def exercise(box: Box) -> None:
    """Everything that an operator could ask of a box."""
    selection = select(box)
    report.encode(report.show_document(selection))
    out = io.StringIO()
    output.print_selection(selection, output.console(out))
    assert out.getvalue()
    draw(selection)
    to_xml(box)
    doctor.diagnose(Situation(selection=selection, topology=Topology(box)))
    actuate(selection, selection.of_process_device(0), box.env)
    with contextlib.suppress(RailsError):
        predict(selection, KNOWN_MODELS["qwen3-8b"], num_tokens=100, tensor_parallel=2)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damaged_boxes(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(TEXTS)))
    document = json.loads(TEXTS[name])
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(PLACES[name]))
        place: Any = document
        try:
            for key in path[:-1]:
                place = place[key]
            if data.draw(st.booleans()):
                place[path[-1]] = data.draw(VALUES)
            else:
                del place[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue
    try:
        box = box_io.decode_box(json.dumps(document).encode(), "box")
    except RailsError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    exercise(box)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_damaged_trees(tmp_path: Path, data: st.DataObject) -> None:
    root = tmp_path / "tree"
    shutil.rmtree(root, ignore_errors=True)
    write_sysfs(load("p4d.24xlarge"), root)
    paths = sorted(path for path in root.rglob("*") if not path.is_symlink())
    for _ in range(data.draw(st.integers(1, 6))):
        path = data.draw(st.sampled_from(paths))
        if path.is_file():
            path.write_bytes(data.draw(st.binary(max_size=12)))
        elif path.is_dir() and data.draw(st.booleans()):
            shutil.rmtree(path)
    box = machine.look(root) if root.is_dir() else Box(1, "nothing")
    box_io.check_box(box, "tree")
    exercise(box)
