"""`analyzer repair`: the journals that killed ranks left behind, into parts."""

from __future__ import annotations

from pathlib import Path

import click

from gradtrace_analyzer.commands import answer, examples, tell
from gradtrace_analyzer.runs.opening import require_run
from gradtrace_analyzer.runs.repair import CannotRepair, repairs


@click.command(epilog=examples("analyzer repair runs/a"))
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--force",
    is_flag=True,
    help="Also ranks of another machine, which have ended though it cannot be seen from here.",
)
def repair(run: Path, force: bool) -> int:
    """Write what killed ranks left in their journals into parts, as a clean end would have, and remove the journals.

    Every command reads journals too: this is for tools that read Parquet alone, and for keeping. It may be killed and
    run again at any moment. Exit status: 0 nothing is left to repair, 2 a journal had to stay.
    """
    require_run(run)
    stayed, done = False, False
    for one in repairs(run, force=force):
        if isinstance(one, CannotRepair):
            tell(str(one))
            stayed = True
            continue
        done = True
        rows = sum(one.rows.values())
        torn = f"; {one.torn_count:,} half-written records were left out" if one.torn_count else ""
        answer([f"rank {one.rank} of attempt {one.attempt}: {rows:,} rows written out{torn}"])
    if not done and not stayed:
        answer(["nothing to repair"])
    return 2 if stayed else 0
