"""Where the command begins: `analyzer`, or `python -m gradtrace_analyzer`.

It loads nothing before it can be interrupted: what the commands need takes a good part of a second.
"""

from __future__ import annotations

import sys
from typing import NoReturn

INTERRUPTED = 130  # as shells report SIGINT


def main() -> NoReturn:
    """The console script."""
    try:
        from gradtrace_analyzer.cli import main as run

        run()
    except KeyboardInterrupt:
        print("analyzer: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
