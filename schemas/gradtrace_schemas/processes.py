"""Whether a process still lives: what a rank notes of itself, and how it is found again by that.

A process identifier alone may be another process by now, so its start goes with it; and it means something on one
machine, since one boot, in one namespace of identifiers, so a token of these does too.
"""

from __future__ import annotations

import hashlib
import os
from typing import Literal

Life = Literal["alive", "dead", "elsewhere"]


def machine_token() -> int:
    """A number that processes share which see each other's identifiers; 0 where that cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return 0
    digest = hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def start_of(pid: int) -> int:
    """When a process started, in ticks since the boot; 0 where there is none, or it is dead and not yet reaped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *rest = file.read().rsplit(")", 1)[1].split()
        return 0 if state in "ZX" else int(rest[18])
    except (OSError, ValueError, IndexError):
        return 0


def life_of(pid: int, process_start: int, machine: int) -> Life:
    """Whether that process lives; `elsewhere` where this machine cannot tell."""
    if not machine or not process_start or machine != machine_token():
        return "elsewhere"
    return "alive" if start_of(pid) == process_start else "dead"
