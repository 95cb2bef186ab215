"""Checks of limits and of the machine around the NICs."""

from __future__ import annotations

from collections.abc import Iterator

from .doctor_base import Check, Finding, Situation

MIN_OPEN_FILES = 4096
PAGES_PER_REGISTRATION = 1 << 20
COMFORTABLE_MEMLOCK_BYTES = 16 << 30


def memlock(situation: Situation) -> Iterator[Finding]:
    limit = situation.selection.box.host.memlock_bytes
    if limit is None or limit < 0 or limit >= COMFORTABLE_MEMLOCK_BYTES:
        return
    level = "fail" if situation.selection.box.nics or limit < 1 << 20 else "warn"
    yield Finding(
        "R31",
        level,
        f"the memlock limit is {limit / 2**20:.3g} MiB",
        "RDMA pins the memory it registers; above the limit registration fails with -12",
        "ulimit -l unlimited; in /etc/security/limits.conf: * - memlock unlimited; "
        "docker: --ulimit memlock=-1; Kubernetes: the IPC_LOCK capability",
    )


def open_files(situation: Situation) -> Iterator[Finding]:
    limit = situation.selection.box.host.open_files
    if limit is not None and 0 <= limit < MIN_OPEN_FILES:
        yield Finding(
            "D16",
            "warn",
            f"the limit of open files is {limit}",
            "every rail and connection takes several descriptors",
            "ulimit -n 65536",
        )


def huge_pages(situation: Situation) -> Iterator[Finding]:
    host = situation.selection.box.host
    if not situation.selection.box.nics or host.page_bytes is None:
        return
    reach = host.page_bytes * PAGES_PER_REGISTRATION
    if not host.hugepages_total:
        yield Finding(
            "R32",
            "info",
            f"no huge pages are reserved; one registration of host memory may have "
            f"at most {reach / 2**30:.0f} GiB",
            "an EFA takes a million pages per registration",
            "sudo sysctl vm.nr_hugepages=..., or register host memory in smaller pieces",
        )


def iommu(situation: Situation) -> Iterator[Finding]:
    host = situation.selection.box.host
    arguments = host.kernel_arguments or ()
    is_on = any(word.endswith("iommu=on") for word in arguments)
    passes = any("iommu=pt" in word or word == "iommu.passthrough=1" for word in arguments)
    if (is_on or (host.iommu_groups or 0) > 0) and not passes:
        yield Finding(
            "D17",
            "info",
            "an IOMMU is active without pass-through",
            "on bare metal, traffic between NIC and GPU then goes through the root complex; in a "
            "virtual machine of AWS this is normal",
            "on bare metal: kernel arguments iommu=pt, and ACS off on the switches "
            "(sudo lspci -vvv | grep ACSCtl shows SrcValid+ where it is on)",
        )


def clock(situation: Situation) -> Iterator[Finding]:
    if situation.selection.box.host.clock_synchronised is False:
        yield Finding(
            "D18",
            "warn",
            "the clock is not synchronised",
            "logs of two hosts cannot be laid side by side, and leases may look expired",
            "sudo systemctl enable --now chronyd (on AWS it uses 169.254.169.123)",
        )


CHECKS: tuple[Check, ...] = (memlock, open_files, huge_pages, iommu, clock)
