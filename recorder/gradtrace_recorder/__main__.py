"""`python -m gradtrace_recorder build`: builds the native observer for the torch of this Python.

`python -m gradtrace_recorder examine` prints what `analyzer doctor` asks, as JSON.
"""

from __future__ import annotations

import sys

_USAGE = "usage: python -m gradtrace_recorder build [--again] | examine"


def main(arguments: list[str]) -> int:
    """The exit status: 0 when it is built, 1 when it cannot be, 2 for another command."""
    if arguments == ["examine"]:
        return _examine()
    if arguments[:1] != ["build"] or arguments[1:] not in ([], ["--again"]):
        print(_USAGE, file=sys.stderr)
        return 2
    from gradtrace_recorder.observers.native.build import NotBuilt, build_native

    try:
        print(build_native(again="--again" in arguments))
    except NotBuilt as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _examine() -> int:
    import json

    from gradtrace_recorder.examination import examination

    json.dump(examination(), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
