"""`python -m gradtrace_recorder build`: builds the native observer for the torch of this Python.

`... self-test`: asks that torch for what the recorder leans on. `... examine`: what `analyzer doctor` asks, as JSON.
"""

from __future__ import annotations

import sys

_USAGE = """usage: python -m gradtrace_recorder build [--again]
       python -m gradtrace_recorder self-test [--json]
       python -m gradtrace_recorder examine"""


def main(arguments: list[str]) -> int:
    """The exit status: 0 when it is built, or every source has what it needs, 1 when not, 2 for another command."""
    if arguments[:1] == ["self-test"] and arguments[1:] in ([], ["--json"]):
        return _self_test(as_json="--json" in arguments)
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


def _self_test(*, as_json: bool) -> int:
    import dataclasses
    import json

    import torch

    from gradtrace_recorder.torch_internals.privates import TESTED_TORCH, self_test

    findings = self_test()
    failed = [finding for finding in findings if not finding.ok]
    status = 1 if any(finding.source for finding in failed) else 0
    if as_json:
        found = [dataclasses.asdict(finding) for finding in findings]
        print(
            json.dumps({"torch": str(torch.__version__), "tested": TESTED_TORCH, "findings": found})
        )
        return status
    for finding in failed:
        without = f"the {finding.source} records nothing" if finding.source else "done without"
        proved = f"it was as it should be on {', '.join(finding.proved_on)}"
        print(f"{finding.name}: {finding.detail} (for {finding.used_for}; {without}; {proved})")
    print(
        f"{len(findings) - len(failed)} of {len(findings)} self-tests pass on torch {torch.__version__}"
    )
    return status


def _examine() -> int:
    import json

    from gradtrace_recorder.examination import examination

    json.dump(examination(), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
