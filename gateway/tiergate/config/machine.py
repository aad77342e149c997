"""The facts of this machine that defaults are made of."""

import os
from dataclasses import dataclass
from pathlib import Path

_CGROUP_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class Machine:
    """`ram_bytes` is RAM we may use (a container's limit counts), `cores_count` the CPUs it may use."""

    ram_bytes: int
    cores_count: int
    user_id: int
    shared_memory_dir: Path = Path("/dev/shm")

    @classmethod
    def here(cls) -> "Machine":
        """The machine, or the container, this process runs on."""
        return cls(ram_bytes=_ram_bytes(Path("/")), cores_count=len(os.sched_getaffinity(0)), user_id=os.geteuid())


def _ram_bytes(root: Path) -> int:
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    own = _own_cgroup(root)
    for name in (*_CGROUP_LIMITS, *own):
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue  # that version of cgroups is not mounted here
        if text.isdigit():  # "max" means no limit
            limits.append(int(text))
    return min(limits)


def _own_cgroup(root: Path) -> list[str]:
    """The limit files of this process's cgroup and its ancestors (each of them binds), cgroup v2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            parts = [part for part in path.split("/") if part]
            return ["/".join(("sys/fs/cgroup", *parts[:depth], "memory.max")) for depth in range(1, len(parts) + 1)]
    return []
