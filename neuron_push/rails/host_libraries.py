"""Which of the libraries that NIXL's LIBFABRIC plugin needs can be loaded here.

Loading happens in a child process: a library's initialisers may print, crash or claim devices, and
a doctor must not.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata as distributions
from pathlib import Path

from .elf import contains, read_elf
from .environ_filter import masked
from .model import Host, Library, Plugin

NIXL_DISTRIBUTIONS = ("nixl", "nixl-cu12", "nixl-cu13")
PLUGIN_NAME = "libplugin_LIBFABRIC.so"
# Part of every system; a plugin that lacks them has other troubles than rails.
COMMON_LIBRARIES = ("libc.so", "libm.so", "libstdc++", "libgcc_s", "libpthread", "libdl", "ld-")
BUNDLED_LIBRARIES = ("libnixl", "libserdes", "libnuma-")
LIBRARY_DIRECTORIES = (
    "/opt/amazon/efa/lib",
    "/opt/amazon/efa/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
)
SYSTEM_PLUGINS = (
    "/usr/local/nixl/lib/x86_64-linux-gnu/plugins",
    "/usr/local/nixl/lib/aarch64-linux-gnu/plugins",
)
PROBE_TIMEOUT_S = 30.0

_PROBE = """
import ctypes, json, os, sys
request = json.loads(sys.argv[1])
answer = {"libraries": {}, "plugins": {}, "fi_version": None}
sys.stdout.flush()
keep = os.dup(1)
os.dup2(2, 1)
def load(name):
    try:
        library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return None, str(error)
    return library, None
for name in request["libraries"]:
    library, error = load(name)
    path = None
    if library is not None:
        with open("/proc/self/maps") as maps:
            for line in maps:
                if os.path.basename(line.split()[-1]).startswith(name):
                    path = line.split()[-1]
                    break
        if name.startswith("libfabric.so"):
            value = library.fi_version()
            answer["fi_version"] = f"{value >> 16}.{value & 0xffff}"
    answer["libraries"][name] = [error, path]
for path in request["plugins"]:
    library, error = load(path)
    answer["plugins"][path] = error
os.write(keep, json.dumps(answer).encode())
"""


def fill_libraries(host: Host) -> None:
    """NIXL's versions and plugins, the libraries they need, libfabric and its providers."""
    host.nixl_versions = nixl_versions()
    paths = _plugin_paths()
    needed: dict[str, None] = {"libfabric.so.1": None, "libhwloc.so.15": None}
    facts = {path: read_elf(path) for path in paths}
    for one in facts.values():
        for name in one.needed:
            if not name.startswith(COMMON_LIBRARIES + BUNDLED_LIBRARIES):
                needed.setdefault(name)
    answer = _probe(needed, paths)
    host.libfabric_version = answer.get("fi_version")
    host.libraries = tuple(_library(name, answer) for name in needed)
    host.plugins = tuple(
        Plugin(
            distribution=_distribution_of(path),
            version=host.nixl_versions.get(_distribution_of(path), "unknown"),
            needed=one.needed,
            needed_versions=tuple(v for v in one.needed_versions if v.startswith("libfabric")),
            load_error=_clean(answer.get("plugins", {}).get(str(path))),
            loads=answer.get("plugins", {}).get(str(path), "") is None,
        )
        for path, one in facts.items()
    )
    libfabric = next((one.path for one in host.libraries if one.name == "libfabric.so.1"), None)
    if libfabric is not None:
        host.libfabric_providers = _providers(Path(libfabric))
    host.libfabric_copies = tuple(masked(path) for path in _copies(libfabric))
    host.verbs_abi, host.efa_verbs_abi = _verbs_abi()
    for library in host.libraries:
        library.path = masked(library.path) if library.path else None


def loaded_libfabric() -> str | None:
    """The version of the libfabric that this process has loaded already; None without one."""
    try:
        library = ctypes.CDLL("libfabric.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        value = int(library.fi_version())
    except (OSError, AttributeError):
        return None
    return f"{value >> 16}.{value & 0xFFFF}"


def nixl_versions() -> dict[str, str]:
    """Installed NIXL distributions and their versions."""
    found = {}
    for name in NIXL_DISTRIBUTIONS:
        try:
            found[name] = distributions.version(name)
        except distributions.PackageNotFoundError:
            continue
    return found


def _plugin_paths() -> list[Path]:
    """Every copy of the plugin that Python's path leads to, or the one of NIXL_PLUGIN_DIR."""
    override = os.environ.get("NIXL_PLUGIN_DIR")
    if override:
        path = Path(override) / PLUGIN_NAME
        return [path] if path.exists() else []
    found = [path for place in SYSTEM_PLUGINS if (path := Path(place) / PLUGIN_NAME).exists()]
    for entry in sys.path:
        for name in ("cu12", "cu13"):
            path = Path(entry) / f".nixl_{name}.mesonpy.libs" / "plugins" / PLUGIN_NAME
            if path.exists() and path not in found:
                found.append(path)
    return found


def _distribution_of(path: Path) -> str:
    for name in ("cu12", "cu13"):
        if f"nixl_{name}" in str(path):
            return f"nixl-{name}"
    return "nixl"


def _probe(libraries: Iterable[str], plugins: Iterable[Path]) -> dict:  # type: ignore[type-arg]
    request = {"libraries": list(libraries), "plugins": [str(path) for path in plugins]}
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-c", _PROBE, json.dumps(request)],
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return answer if isinstance(answer, dict) else {}


def _library(name: str, answer: dict) -> Library:  # type: ignore[type-arg]
    error, path = answer.get("libraries", {}).get(name, ["the probe did not answer", None])
    versions = read_elf(Path(path)).defined_versions if path else ()
    shown = tuple(one for one in versions if one.startswith("FABRIC_"))
    return Library(name=name, found=error is None, path=path, error=_clean(error), versions=shown)


def _clean(error: str | None) -> str | None:
    return masked(error)[:300] if error else None


def _providers(libfabric: Path) -> tuple[str, ...]:
    """Providers built in or lying beside the library; only those that matter here."""
    directory = libfabric.parent
    places = [libfabric, *directory.glob("lib*-fi.so"), *(directory / "libfabric").glob("*-fi.so")]
    override = os.environ.get("FI_PROVIDER_PATH")
    if override:
        places.extend(Path(override).glob("*-fi.so"))
    found = []
    if any(contains(place, b"efadv_query_device") for place in places):
        found.append("efa")
    if any(contains(place, b"xnet_") or "libtcp" in place.name for place in places):
        found.append("tcp")
    return tuple(found)


def _copies(loaded: str | None) -> list[str]:
    """All copies of libfabric that a process might pick up, the loaded one first."""
    directories = os.environ.get("LD_LIBRARY_PATH", "").split(":") + list(LIBRARY_DIRECTORIES)
    found = [os.path.realpath(loaded)] if loaded else []
    for directory in directories:
        path = os.path.realpath(os.path.join(directory, "libfabric.so.1"))
        if directory and os.path.exists(path) and path not in found:
            found.append(path)
    return found


def _verbs_abi() -> tuple[str | None, str | None]:
    """ABI numbers of libibverbs and of its EFA driver; None where they are not found."""
    for directory in LIBRARY_DIRECTORIES:
        library = Path(directory) / "libibverbs.so.1"
        if library.exists():
            private = [
                version.removeprefix("IBVERBS_PRIVATE_")
                for version in read_elf(library.resolve()).defined_versions
                if version.startswith("IBVERBS_PRIVATE_")
            ]
            drivers = sorted((Path(directory) / "libibverbs").glob("libefa-rdmav*.so"))
            driver = drivers[-1].stem.removeprefix("libefa-rdmav") if drivers else None
            return (private[-1] if private else None), driver
    return None, None
