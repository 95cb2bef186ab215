"""One of the two processes of `scripts/libfabric_cpu.sh check`: host `p` writes to host `d`.

Usage: _libfabric_check.py p|d FOLDER. They meet by files in FOLDER, which both see. Neither has a
progress thread, and the first contact needs both sides' progress: each polls whenever it waits.
"""

import sys
import time
from pathlib import Path

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

SIZE = 4 << 20
PEER = {"p": "d", "d": "p"}


def main(me: str, folder: Path) -> None:
    peer = PEER[me]
    agent = nixl_agent(me, nixl_agent_config(enable_prog_thread=False, backends=["LIBFABRIC"]))
    if "LIBFABRIC" not in agent.backends:
        sys.exit(
            f"{me}: NIXL has no plugin LIBFABRIC (it has {agent.get_plugin_list()}): this build of "
            "nixl does not bring it; install nixl 1.4.1"
        )
    buffer = np.full(SIZE, ord(me), dtype=np.uint8)
    address = buffer.ctypes.data
    agent.register_memory([(address, SIZE, 0, "")], "DRAM", backends=["LIBFABRIC"])

    def publish(name: str, content: bytes) -> None:
        partial = folder / f"{name}.part"
        partial.write_bytes(content)
        partial.rename(folder / name)

    def wait_for(name: str) -> bytes:
        while not (folder / name).exists():
            agent.get_new_notifs()
            time.sleep(1e-4)
        return (folder / name).read_bytes()

    publish(f"{me}.card", address.to_bytes(8, "little") + agent.get_agent_metadata())
    card = wait_for(f"{peer}.card")
    agent.add_remote_agent(card[8:])
    publish(f"{me}.added", b"")
    wait_for(f"{peer}.added")

    if me == "p":
        remote = int.from_bytes(card[:8], "little")
        handle = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs([(address, SIZE, 0)], "DRAM"),
            agent.get_xfer_descs([(remote, SIZE, 0)], "DRAM"),
            peer,
            b"written",
        )
        began = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(5e-5)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            sys.exit(f"p: the WRITE of {SIZE} bytes to d ended in state {state}")
        seconds = time.perf_counter() - began
        print(f"p: wrote {SIZE >> 20} MiB in {seconds * 1e3:.1f} ms", flush=True)
        agent.release_xfer_handle(handle)
        wait_for("d.done")
    else:
        notes: list[bytes] = []
        while not notes:
            notes = agent.get_new_notifs().get(peer, [])
            time.sleep(1e-4)
        if notes != [b"written"] or not (buffer == ord("p")).all():
            sys.exit(f"d: the WRITE arrived damaged: notification {notes}, first byte {buffer[0]}")
        print("d: every byte and the notification arrived", flush=True)
        publish("d.done", b"")
    # Towards a peer that is already gone, closing the endpoints could wait for an answer.
    publish(f"{me}.end", b"")
    wait_for(f"{peer}.end")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
