"""A folder with proc/ and sys/ as a machine has them: how much memory there is, and which cgroups limit it."""

from __future__ import annotations

from pathlib import Path


def machine(root: Path, available_bytes: int, cgroup: str = "0::/\n") -> Path:
    """In whole KiB."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable: {available_bytes // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def v2(folder: Path, limit: str, current: int, inactive: int = 0, active: int = 0, high: str = "max") -> None:
    """A cgroup of version 2."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file {active}\nshmem 3\n")


def limited(root: Path, available_bytes: int) -> Path:
    """To the byte: a cgroup with nothing in it."""
    machine(root, 1 << 50)
    v2(root / "sys/fs/cgroup", str(available_bytes), 0)
    return root
