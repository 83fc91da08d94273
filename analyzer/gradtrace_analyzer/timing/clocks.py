"""One time line for the ranks of several hosts.

On one host, times count on its monotonic clock: `ranks.monotonic_start_ns` plus the rank's own time. The clocks of
two hosts have nothing in common; they are laid over each other by the reductions, which all ranks leave together, or
by what the stages of a pipeline send each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb


@dataclass(frozen=True)
class HostClock:
    """How a host's clock was laid over that of another, `reference`.

    `offset_ns` is what its times are ahead; half of the reductions lie within `spread_ns` around it.
    """

    host: str
    reference: str
    offset_ns: int
    spread_ns: int
    reduction_count: int


# Ranks whose host is not known have a clock of their own.
MAKE_CLOCKS = """
CREATE OR REPLACE TEMP TABLE clocks AS
SELECT rank, coalesce(host, 'unknown host of rank ' || rank) AS host, monotonic_start_ns AS began_ns
FROM ranks WHERE monotonic_start_ns IS NOT NULL
"""

_PAIRS_OF_HOSTS = """
WITH leavings AS (
    SELECT pair, host, median(done_ns) AS done_ns FROM paired WHERE done_ns IS NOT NULL GROUP BY pair, host),
apart AS (
    SELECT a.host AS host, b.host AS other, b.done_ns - a.done_ns AS apart_ns
    FROM leavings a JOIN leavings b ON a.pair = b.pair AND a.host < b.host)
SELECT host, other, median(apart_ns), quantile_cont(apart_ns, 0.75) - quantile_cont(apart_ns, 0.25), count(*)
FROM apart GROUP BY host, other
"""


def aligned_hosts(connection: duckdb.DuckDBPyConnection) -> tuple[HostClock, ...]:
    """How each host's clock lies to the first's, from the table `paired`; makes the table `offsets`.

    A host that shares no reduction with the first goes by one that does. Hosts that share none, even so, keep
    their own clock: none of their times is ever compared.
    """
    hosts = [
        host
        for (host,) in connection.execute(
            "SELECT host FROM paired GROUP BY host ORDER BY min(rank)"
        ).fetchall()
    ]
    apart: dict[str, dict[str, tuple[int, int, int]]] = {host: {} for host in hosts}
    if len(hosts) > 1:
        for host, other, offset, spread, count in connection.execute(_PAIRS_OF_HOSTS).fetchall():
            apart[host][other] = (round(offset), round(spread), count)
            apart[other][host] = (-round(offset), round(spread), count)
    return tuple(HostClock(*laid) for laid in lay_over(connection, hosts, apart))


def lay_over(
    connection: duckdb.DuckDBPyConnection,
    hosts: Sequence[str],
    apart: Mapping[str, Mapping[str, tuple[int, int, int]]],
) -> list[tuple[str, str, int, int, int]]:
    """Each host whose clock was laid over another's: host, reference, offset, and what `apart` says of that pair.

    `apart[a][b]` is what b is ahead of a, with two numbers that tell how well that is known. Makes the table `offsets`.
    """
    offsets: dict[str, int] = {}
    laid: list[tuple[str, str, int, int, int]] = []
    for first in hosts:
        if first in offsets:
            continue
        offsets[first] = 0
        reached = deque([first])
        while reached:
            via = reached.popleft()
            for other, (offset, spread, count) in sorted(apart[via].items()):
                if other not in offsets:
                    offsets[other] = offsets[via] + offset
                    laid.append((other, first, offsets[other], spread, count))
                    reached.append(other)
    connection.execute("CREATE OR REPLACE TEMP TABLE offsets (host VARCHAR, offset_ns BIGINT)")
    if offsets:
        connection.executemany("INSERT INTO offsets VALUES (?, ?)", list(offsets.items()))
    return laid
