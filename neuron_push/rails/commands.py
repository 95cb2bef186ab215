"""What the commands do once the box is there; cli.py only parses."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from . import report
from .compare import compare_log
from .doctor_base import Peer, PeerRails, PeerSilence, Situation
from .environment import Actuation, Setting, actuate
from .errors import EXIT_COULD_NOT_LOOK, EXIT_GOOD, EXIT_PROBLEM, RailsError
from .log_parser import read_log
from .model import SCHEMA_VERSION, Box
from .select import Choice, Selection, select

PeerRailsFetcher = Callable[[str, Path | None], PeerRails]
"""Given HOST:PORT and a key file, fetch the other engine's rails cards; PeerSilence with a sentence
if it gives none, RailsError if the question is wrong.

This package knows no side channel. Whoever does (the main command) puts a function here, and
`doctor --peer` then compares the cards with this machine's.
"""
peer_rails_fetcher: PeerRailsFetcher | None = None


class DoctorRequest(msgspec.Struct):
    """What `doctor` was asked beside the box."""

    peer: str | None = None
    key_file: Path | None = None
    peer_box: Path | None = None
    log: Path | None = None
    tensor_parallel: int = 1
    strict: bool = False
    info: bool = True


def choice_of_device(selection: Selection, number: int) -> Choice:
    """The accelerator that a process calls N. RailsError if there is none."""
    choice = selection.of_process_device(number)
    if choice is None:
        seen = sum(one.process_index >= 0 for one in selection.choices)
        expected = f"0 to {seen - 1}" if seen else "none, since no accelerator is visible here"
        raise RailsError(f"--device {number} does not exist; expected {expected}")
    return choice


def run_env(
    box: Box, device: int | None, *, same_host: bool, write_hwloc: Path | None, as_json: bool
) -> int:
    """Print the environment of one worker. `device` None means host memory."""
    selection = select(box)
    choice = choice_of_device(selection, device) if device is not None else None
    actuation = actuate(selection, choice, box.env, same_host=same_host)
    good = not actuation.kept and (choice is None or choice.is_good)
    if write_hwloc is not None:
        good = _hide_other_gpus(selection, choice, actuation, write_hwloc)
    if as_json:
        document = {
            "schema_version": SCHEMA_VERSION,
            "device": device,
            "pci_address": choice.pci_address if choice is not None else None,
            "env": actuation.as_dict(),
            "settings": actuation.settings,
            "kept": actuation.kept,
            "backend": actuation.backend,
            "backend_params": actuation.backend_params,
            "notes": actuation.notes,
        }
        sys.stdout.write(report.encode(document))
        return EXIT_GOOD if good else EXIT_PROBLEM
    for setting in actuation.settings:
        print(f"export {setting.name}={shlex.quote(setting.value)}  # {setting.reason}")
    for kept in actuation.kept:
        print(f"# {kept.name}={shlex.quote(kept.value)} stays: {kept.reason}")
    print(f"# NIXL backend: {actuation.backend}")
    for note in actuation.notes:
        print(f"# {note}")
    return EXIT_GOOD if good else EXIT_PROBLEM


def _hide_other_gpus(
    selection: Selection, choice: Choice | None, actuation: Actuation, path: Path
) -> bool:
    """Write a topology with one GPU, and settings to match. True if the rails are right then."""
    from .hwloc_xml import pruned_to, to_xml

    if choice is None:
        raise RailsError("--write-hwloc needs --device: host memory belongs to no GPU")
    box = pruned_to(selection, choice)
    write_text(path, to_xml(box))
    names = ",".join(rail.name for rail in choice.rails)
    box.env = box.env | {"FI_EFA_IFACE": names}
    actuation.settings += [
        Setting("FI_EFA_IFACE", names, choice.reason),
        Setting("HWLOC_XMLFILE", str(path.resolve()), "shows NIXL this GPU only"),
    ]
    actuation.notes.clear()
    then = select(box).of_address(choice.pci_address)
    return then is not None and {rail.name for rail in then.nixl_rails} == set(names.split(","))


def write_text(path: Path, text: str) -> None:
    """Write a file. RailsError if that cannot be done."""
    try:
        path.write_text(text)
    except OSError as error:
        raise RailsError(f"{path} cannot be written: {error.strerror or error}") from None


def run_check_log(box: Box, log: Path, *, as_json: bool) -> int:
    """Print what a log says about rails, per NIXL agent."""
    found = read_log(log)
    selection = select(box)
    checks = compare_log(selection, found)
    if not found.num_nixl_lines and not found.troubles:
        raise RailsError(
            f"{log} holds no line of NIXL's; start the server with NIXL_LOG_LEVEL=DEBUG (before "
            "Python starts) and keep its stderr"
        )
    bad = found.has_failures or any(check.is_bad for check in checks)
    if as_json:
        document = {
            "schema_version": SCHEMA_VERSION,
            "good": not bad,
            "num_lines": found.num_lines,
            "num_nixl_lines": found.num_nixl_lines,
            "agents": found.agents,
            "checks": checks,
            "troubles": found.troubles,
        }
        sys.stdout.write(report.encode(document))
        return EXIT_PROBLEM if bad else EXIT_GOOD
    from . import output_checks

    out = output_checks.console()
    output_checks.print_agents(found, out)
    output_checks.print_checks(checks, out)
    output_checks.print_troubles(found.troubles, out)
    output_checks.print_end(bad, checks, out)
    return EXIT_PROBLEM if bad else EXIT_GOOD


def run_verify(
    box: Box, device: int | None, *, backend: str, timeout_s: float, as_json: bool
) -> int:
    """Start NIXL in a child and print what it did."""
    from .verify import verify

    selection = select(box)
    choice = choice_of_device(selection, device) if device is not None else None
    done = verify(selection, choice, backend=backend, timeout_s=timeout_s)
    if as_json:
        document = {"schema_version": SCHEMA_VERSION, "good": done.is_good}
        document |= msgspec.to_builtins(done)
        sys.stdout.write(report.encode(document))
    else:
        from . import output_checks

        out = output_checks.console()
        output_checks.print_verification(done, out)
    if done.could_not_look:
        return EXIT_COULD_NOT_LOOK
    return EXIT_GOOD if done.is_good else EXIT_PROBLEM


def run_watch(
    box: Box,
    *,
    root: Path,
    seconds: float,
    count: int,
    device: int | None,
    as_json: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print growth of counters, once per interval."""
    from .watch import watch

    if not 0 < seconds <= 86400:
        raise RailsError(f"--seconds is {seconds}; expected more than 0 and at most 86400")
    selection = select(box)
    if device is not None:
        choice_of_device(selection, device)
    good = True
    done = 0
    try:
        while count == 0 or done < count:
            result = watch(selection, root=root, seconds=seconds, device=device, sleep=sleep)
            good = good and result.good
            done += 1
            if as_json:
                document = {"schema_version": SCHEMA_VERSION, **msgspec.to_builtins(result)}
                sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
                sys.stdout.flush()
            else:
                from . import output_checks

                output_checks.print_watch(result, output_checks.console())
    except KeyboardInterrupt:
        pass
    return EXIT_GOOD if good else EXIT_PROBLEM


def run_doctor(box: Box, request: DoctorRequest, *, root: Path | None, as_json: bool) -> int:
    """Run all checks. `root` None means that the box comes from a file."""
    from . import doctor
    from .card import make_card
    from .machine import read_box
    from .topology import Topology
    from .watch import read_counters

    selection = select(box)
    situation = Situation(
        selection=selection,
        topology=Topology(box),
        log=read_log(request.log) if request.log is not None else None,
        tensor_parallel=request.tensor_parallel,
    )
    if root is not None and box.nics:
        try:
            situation.counters = read_counters(root, [nic.name for nic in box.nics])
        except RailsError:
            situation.counters = None  # an old driver has none; nothing to conclude
    if root is not None and "HWLOC_XMLFILE" in os.environ:
        try:
            situation.hwloc_xml = Path(os.environ["HWLOC_XMLFILE"]).read_bytes()
        except OSError:
            situation.hwloc_xml = b""
    if request.key_file is not None and request.peer is None:
        raise RailsError("--key-file is for --peer; expected both, or neither")
    if request.peer is not None:
        _ask_peer(situation, request.peer, request.key_file, root)
    if request.peer_box is not None:
        theirs = make_card(select(read_box(request.peer_box)), None)
        situation.pairs.append((make_card(selection, None), theirs))
    diagnosis = doctor.diagnose(situation)
    if as_json:
        sys.stdout.write(report.encode(doctor.document(diagnosis)))
    else:
        from .output import console

        doctor.print_diagnosis(diagnosis, console(), with_info=request.info)
    return diagnosis.exit_code(strict=request.strict)


def _ask_peer(situation: Situation, name: str, key_file: Path | None, root: Path | None) -> None:
    """Reach the other end, fetch its cards, and lay this machine's beside each."""
    from .card import RailCard, expected_card, host_token
    from .doctor_peer import has_gateway, split_peer, try_peer

    split_peer(name)
    peer = situation.peer = Peer(name, try_peer(name))
    if root is not None:
        peer.has_gateway = has_gateway(root, peer.reach.address)
    if peer.reach.speaks != "zmq" or peer_rails_fetcher is None:
        return
    try:
        peer.rails = peer_rails_fetcher(name, key_file)
    except PeerSilence as silence:
        peer.silence = (silence.kind, str(silence))
        return
    now_s = time.time() if root is not None else 0.0  # a captured box tells no time
    token = host_token(root) if root is not None else ""
    own: dict[str | None, RailCard] = {}
    for theirs in peer.rails.cards.values():
        if theirs.device not in own:
            own[theirs.device] = expected_card(
                situation.selection, theirs.device, same_host_token=token
            )
            own[theirs.device].time_s = now_s
        theirs.time_s = peer.rails.time_s
        situation.pairs.append((own[theirs.device], theirs))
