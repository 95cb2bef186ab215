"""devices/nrt.py against a libnrt.so.1 compiled here: success, each error code, missing and old."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from neuron_push.devices import nrt as nrt_module
from neuron_push.devices.nrt import Nrt, NrtError, NrtStatus, load_globally, mapped_copies
from tests.unit.devices.fakes import build_libnrt, knob, open_libnrt

CALLS: dict[str, Callable[[Nrt], object]] = {
    "nrt_get_version": lambda nrt: nrt.version(),
    "nrt_get_total_nc_count": lambda nrt: nrt.total_cores(),
    "nrt_get_attached_efa_bdf": lambda nrt: nrt.attached_efa(4096),
    "nrt_host_device_id_get": lambda nrt: nrt.host_device(1),
    "nrt_get_dmabuf_fd": lambda nrt: nrt.dmabuf_fd(4096, 4096),
    "nrta_get_sequence": lambda nrt: nrt.last_completed(0),
    "nrta_is_completed": lambda nrt: nrt.is_completed(7 << 48 | 100),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libnrt(tmp_path_factory.mktemp("new"))


@pytest.fixture
def nrt(library: Path) -> Nrt:
    found = open_libnrt(library)
    knob(found, "fake_status", ctypes.c_int).value = 0
    set_bdf(found, b"0000:c9:00.0")
    return found


def set_bdf(nrt: Nrt, text: bytes) -> None:
    knob(nrt, "fake_bdf", ctypes.c_char * 64).value = text


def test_success(nrt: Nrt) -> None:
    assert nrt.version() == "2.31.24.0"
    assert nrt.total_cores() == 128
    assert nrt.host_device(1) == 9
    assert nrt.dmabuf_fd(4096, 4096) == 42
    assert nrt.attached_efa(1 << 40) == "0000:c9:00.0"
    assert nrt.is_completed(nrt.last_completed(0)) is True
    assert nrt.is_completed(nrt.last_completed(0) + 5) is None


@pytest.mark.parametrize("symbol", CALLS)
@pytest.mark.parametrize("status", [s for s in NrtStatus if s != NrtStatus.SUCCESS])
def test_each_error_code_is_a_sentence(nrt: Nrt, symbol: str, status: NrtStatus) -> None:
    knob(nrt, "fake_status", ctypes.c_int).value = status
    if symbol == "nrta_is_completed" and status == NrtStatus.INVALID:
        assert CALLS[symbol](nrt) is None  # never submitted
        return
    with pytest.raises(NrtError) as caught:
        CALLS[symbol](nrt)
    assert caught.value.status == status
    text = str(caught.value)
    assert f"{symbol} answered NRT_{status.name} ({status.value}): " in text


def test_an_unknown_error_code(nrt: Nrt) -> None:
    knob(nrt, "fake_status", ctypes.c_int).value = 77
    with pytest.raises(NrtError, match="NRT_STATUS 77, which this release does not know"):
        nrt.total_cores()


@pytest.mark.parametrize(
    ("answer", "address"),
    [
        (b"0000:c9:00.0", "0000:c9:00.0"),
        (b"c9:00.0", "0000:c9:00.0"),
        (b"0:C9:0.1", None),
        (b"00000000:CA:00.0", "0000:ca:00.0"),  # longer than the first buffer: asked again
        (b"", None),
        (b"somewhere", None),
    ],
)
def test_spellings_of_a_pci_address(nrt: Nrt, answer: bytes, address: str | None) -> None:
    set_bdf(nrt, answer)
    if address is None:
        with pytest.raises(NrtError, match="expected a PCI address"):
            nrt.attached_efa(1)
    else:
        assert nrt.attached_efa(1) == address


def test_an_address_outside_of_device_memory(nrt: Nrt) -> None:
    start, end = knob(nrt, "fake_range_start"), knob(nrt, "fake_range_end")
    start.value, end.value = 1 << 40, 1 << 41
    try:
        assert nrt.attached_efa(1 << 40)
        for address in (4096, 1 << 41):
            with pytest.raises(NrtError, match="NRT_INVALID"):
                nrt.attached_efa(address)
    finally:
        start.value, end.value = 0, (1 << 64) - 1


def test_an_older_library_names_the_release_it_takes(tmp_path: Path) -> None:
    old = open_libnrt(build_libnrt(tmp_path, minor=30))
    assert old.version() == "2.30.24.0"
    assert not old.has("nrt_get_attached_efa_bdf")
    with pytest.raises(
        NrtError, match=r"has no nrt_get_attached_efa_bdf: it needs Neuron .* 2\.31"
    ):
        old.attached_efa(1)
    older = open_libnrt(build_libnrt(tmp_path / "older", minor=20))
    with pytest.raises(NrtError, match="has no nrta_is_completed") as caught:
        older.is_completed(1)
    assert caught.value.status is None


def test_no_library_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The fakes of other tests answer to the real soname in this process.
    monkeypatch.setattr(nrt_module, "SONAME", str(tmp_path / "libnrt.so.1"))
    monkeypatch.setattr(nrt_module, "INSTALLED", str(tmp_path / "opt/libnrt.so.1"))
    with pytest.raises(NrtError) as caught:
        load_globally(maps=tmp_path / "no maps")
    for words in ("libnrt.so.1 cannot be loaded", "aws-neuronx-runtime-lib", "LD_LIBRARY_PATH"):
        assert words in str(caught.value)


def test_mapped_copies(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r--p 0 08:01 1 /usr/lib/libc.so.6\n"
        "7f02-7f03 r--p 0 08:01 2 /opt/aws neuron/lib/libnrt.so.2.31\n"
        "7f03-7f04 r-xp 0 08:01 2 /opt/aws neuron/lib/libnrt.so.2.31\n"
        "7f05-7f06 rw-p 0 00:00 0\n"
        "7f07-7f08 r-xp 0 08:01 3 /tmp/libnrt.so.1 (deleted)\n"
    )
    assert mapped_copies(maps) == ["/opt/aws neuron/lib/libnrt.so.2.31", "/tmp/libnrt.so.1"]
    assert mapped_copies(tmp_path / "nothing") == []


def in_a_process(code: str, **environ: str) -> str:
    """A process of its own: what is loaded globally stays."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


FIND = """
    import ctypes
    from neuron_push.devices.nrt import load_globally
    {before}
    nrt = load_globally()
    nobody = ctypes.CDLL(None)  # what a library loaded later would find
    print(nrt.path, nrt.version(), hasattr(nobody, "nrt_get_attached_efa_bdf"))
"""


def test_found_on_the_loader_path_and_visible_to_libraries_loaded_later(library: Path) -> None:
    got = in_a_process(FIND.format(before=""), LD_LIBRARY_PATH=str(library.parent))
    assert got == "libnrt.so.1 2.31.24.0 True"


def test_a_mapped_copy_is_adopted_and_made_visible(library: Path, tmp_path: Path) -> None:
    other = build_libnrt(tmp_path, minor=32)
    before = f"ctypes.CDLL({str(library)!r})  # as torch loads it: not for everybody"
    got = in_a_process(FIND.format(before=before), LD_LIBRARY_PATH=str(other.parent))
    assert got == f"{library} 2.31.24.0 True"
