"""Outputs as a person reads them, held against the files in tests/golden; `scripts/regold` rewrites those."""

from __future__ import annotations

import os
import re
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


def must_be_golden(name: str, out: str, err: str, code: int) -> None:
    """Raise AssertionError where a command said something else; what it said lies beside the file then."""
    shown = masked(f"{out}--- stderr, exit {code}\n{err}")
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GRADTRACE_REGOLD"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(shown)
    expected = path.read_text() if path.exists() else ""
    if shown != expected:
        path.with_suffix(".actual").write_text(shown)
    assert shown == expected


def masked(text: str) -> str:
    """The text without what another machine, version or moment changes."""
    for pattern, replacement in (
        (r"\d[\d.,]* ?([kM]?B|bytes)\b", "<size>"),
        (r"\d+\.\d+% of", "<share> of"),
        (r"torch \S+, python [\d.]+, gradtrace [\d.]+", "<versions>"),
        (r"(hosts +)\S+", r"\1<host>"),
        (r" +$", ""),
        (r" -h' for help", " --help' for help"),  # click 8.1 names the short one
        # The last digits depend on the processor's own arithmetic.
        (r"(-?\d\.\d\d)\d*(e[-+]?\d+)", r"\1\2"),
        (r"(-?\d*\.0*[1-9]\d)\d+", r"\1"),
    ):
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return re.sub(r"( {2,}|-{3,})", lambda m: m[0][:2], text)
