"""What a recording holds of the native observer: its library, and what was left to Python even so."""

from __future__ import annotations

import collections
from typing import Any


class Native:
    """The library, and what was left to the Python observer even so, by reason."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.python_passes: collections.Counter[str] = collections.Counter()
        self.python_nodes: collections.Counter[str] = collections.Counter()

    def as_json(self) -> dict[str, Any]:
        """What the rank's json says of it."""
        return {
            "kind": "native",
            "python_passes": dict(self.python_passes),
            "python_nodes": dict(self.python_nodes),
        }
