"""What the stages of a pipeline did, on one time line: the tables that the answers about stages are made of.

Temporary tables, all times in nanoseconds on one time line (see `clocks`):
- `actions`: a row of `stage_events` for each action that ended, without those that raised;
- `stage_waits`: the same for waits; `share` divides a wait that stands for several (a backend may coalesce them);
- `hand_overs`: each receive of another rank's activations or gradients with the moment at which its sender had made
  them: `late_ns` of the wait lie before that moment, `transfer_ns` after it.

With data parallelism there are several pipelines, `line` numbers them: the first rank of each stage belongs to the
first, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass

import duckdb

from gradtrace_analyzer.sql.pipelines import ACTIONS, stepless_ranks
from gradtrace_analyzer.timing.clocks import MAKE_CLOCKS, lay_over
from gradtrace_analyzer.timing.slices import Steps
from gradtrace_analyzer.words.numbers import ranks_phrase


@dataclass(frozen=True)
class MessageClock:
    """How a host's clock was laid over that of another, `reference`, by what was sent between the two.

    Nothing arrives before it was sent: `offset_ns`, what its times are ahead, is so known to within `error_ns`; None
    where nothing was ever sent the other way.
    """

    host: str
    reference: str
    offset_ns: int
    error_ns: int | None
    message_count: int


@dataclass(frozen=True)
class Pipelines:
    """What there is to answer from, its tables made. `warm_up` is the step that was left out."""

    connection: duckdb.DuckDBPyConnection
    steps: tuple[int, ...]
    warm_up: int | None
    line_count: int
    clocks: tuple[MessageClock, ...]
    notes: tuple[str, ...]


# Times of a host's own clock; a rank whose clock is not known is left out, and told.
_ROWS = """
CREATE OR REPLACE TEMP TABLE stage_rows AS
WITH of_lines AS (
    SELECT rank, min(line) AS line FROM (
        SELECT rank, stage_index, dense_rank() OVER (PARTITION BY stage_index ORDER BY rank) - 1 AS line
        FROM (SELECT DISTINCT rank, stage_index FROM stage_events WHERE stage_index IS NOT NULL))
    GROUP BY rank)
SELECT s.rank, s.step, s.microbatch, s.stage_index, s.kind, s.occurrence, s.record_index, c.host,
    coalesce(l.line, 0) AS line, s.start_ns + c.began_ns AS start_ns, s.end_ns + c.began_ns AS end_ns,
    s.kind IN {kinds} AS is_action
FROM stage_events s JOIN clocks c ON c.rank = s.rank LEFT JOIN of_lines l ON l.rank = s.rank
WHERE s.end_ns IS NOT NULL AND s.error IS NULL AND {steps}
"""

# An action's gradients come of its full backward or of its input half.
_MESSAGES = """
CREATE OR REPLACE TEMP TABLE messages AS
WITH sent AS (
    SELECT rank, host, line, step, microbatch, stage_index, end_ns, kind = 'forward' AS is_forward,
        row_number() OVER (PARTITION BY line, step, microbatch, stage_index, kind = 'forward' ORDER BY end_ns) AS turn
    FROM stage_rows WHERE kind IN ('forward', 'backward_full', 'backward_input')),
received AS (
    SELECT rank, host, line, step, microbatch, stage_index, start_ns, end_ns,
        kind = 'receive_activations' AS is_forward,
        row_number() OVER (PARTITION BY line, step, microbatch, stage_index, kind ORDER BY end_ns) AS turn
    FROM stage_rows WHERE kind IN ('receive_activations', 'receive_gradients'))
SELECT r.line, r.step, r.microbatch, r.is_forward, s.stage_index AS from_stage, r.stage_index AS to_stage,
    s.host AS from_host, r.host AS to_host, s.rank AS from_rank, r.rank AS to_rank, s.end_ns AS made_ns,
    r.start_ns, r.end_ns
FROM received r JOIN sent s ON s.line = r.line AND s.step = r.step AND s.microbatch = r.microbatch
    AND s.is_forward = r.is_forward AND s.turn = r.turn
    AND s.stage_index = CASE WHEN r.is_forward THEN r.stage_index - 1 ELSE r.stage_index + 1 END
"""

_BETWEEN_HOSTS = """
SELECT from_host, to_host, min(end_ns - made_ns), count(*) FROM messages WHERE from_host <> to_host
GROUP BY from_host, to_host
"""

_ALIGNED = """
CREATE OR REPLACE TEMP TABLE actions AS
SELECT r.* EXCLUDE (host, start_ns, end_ns, is_action), start_ns - offset_ns AS start_ns, end_ns - offset_ns AS end_ns,
    end_ns - start_ns AS took_ns
FROM stage_rows r JOIN offsets o ON o.host = r.host WHERE is_action;
CREATE OR REPLACE TEMP TABLE stage_waits AS
SELECT r.* EXCLUDE (host, start_ns, end_ns, is_action), start_ns - offset_ns AS start_ns, end_ns - offset_ns AS end_ns,
    1.0 / count(*) OVER (PARTITION BY rank, start_ns, end_ns) AS share,
    CASE WHEN kind IN ('receive_activations', 'send_gradients') THEN stage_index - 1 ELSE stage_index + 1 END
        AS other_stage
FROM stage_rows r JOIN offsets o ON o.host = r.host WHERE NOT is_action AND end_ns >= start_ns;
CREATE OR REPLACE TEMP TABLE hand_overs AS
WITH aligned AS (
    SELECT m.* EXCLUDE (made_ns, start_ns, end_ns), m.made_ns - f.offset_ns AS made_ns,
        m.start_ns - t.offset_ns AS start_ns, m.end_ns - t.offset_ns AS end_ns
    FROM messages m JOIN offsets f ON f.host = m.from_host JOIN offsets t ON t.host = m.to_host)
SELECT *, end_ns - start_ns AS wait_ns, greatest(least(end_ns, made_ns) - start_ns, 0) AS late_ns,
    greatest(end_ns - greatest(start_ns, made_ns), 0) AS transfer_ns
FROM aligned;
"""

# What is counted, and where its rows are.
_INCOMPLETE = {
    "actions that raised": f"kind IN {ACTIONS} AND error IS NOT NULL",
    "actions that were never seen to end": f"kind IN {ACTIONS} AND end_ns IS NULL",
    "rows of ranks whose clock is not known": "rank NOT IN (SELECT rank FROM clocks)",
}


def recorded_steps(
    connection: duckdb.DuckDBPyConnection, steps: Steps
) -> tuple[tuple[int, ...], int | None]:
    """The steps that a question about stages is about, and the first of the run where that is left out.

    It is where nobody asked for certain steps and there are others: it holds what happens only once.
    """
    found = connection.execute(
        f"SELECT DISTINCT step FROM stage_events WHERE {steps.condition()} ORDER BY step"
    ).fetchall()
    numbers = tuple(step for (step,) in found)
    if steps.text or len(numbers) < 2:
        return numbers, None
    return numbers[1:], numbers[0]


def pipelines(connection: duckdb.DuckDBPyConnection, steps: Steps) -> Pipelines | None:
    """The tables above, made in the connection of a run; None where it holds no stage's action of these steps."""
    numbers, warm_up = recorded_steps(connection, steps)
    if not numbers:
        return None
    asked = f"{steps.condition('s.step')} AND s.step >= {numbers[0]}"
    connection.execute(MAKE_CLOCKS)
    connection.execute(_ROWS.format(kinds=ACTIONS, steps=asked))
    connection.execute(_MESSAGES)
    clocks = _aligned(connection)
    connection.execute(_ALIGNED)
    row = connection.execute("SELECT count(DISTINCT line) FROM actions").fetchone()
    lines = 0 if row is None else int(row[0])
    if not lines:
        return None
    return Pipelines(connection, numbers, warm_up, lines, clocks, _notes(connection, asked))


def _aligned(connection: duckdb.DuckDBPyConnection) -> tuple[MessageClock, ...]:
    """How each host's clock lies to the first's; makes the table `offsets`.

    The quickest message of each direction tells most: half of what the two seem to take in different ways is offset.
    """
    hosts = [
        host
        for (host,) in connection.execute(
            "SELECT host FROM stage_rows GROUP BY host ORDER BY min(rank)"
        ).fetchall()
    ]
    quickest = {
        (a, b): (int(ns), int(count))
        for a, b, ns, count in connection.execute(_BETWEEN_HOSTS).fetchall()
    }
    apart: dict[str, dict[str, tuple[int, int, int]]] = {host: {} for host in hosts}
    for (a, b), (there, count) in quickest.items():
        back = quickest.get((b, a))
        if back is None:
            apart[a][b], apart[b][a] = (there, -1, count), (-there, -1, count)
        else:
            error = (there + back[0]) // 2
            apart[a][b] = ((there - back[0]) // 2, error, count + back[1])
    return tuple(
        MessageClock(host, reference, offset, None if error < 0 else error, count)
        for host, reference, offset, error, count in lay_over(connection, hosts, apart)
    )


def _notes(connection: duckdb.DuckDBPyConnection, asked: str) -> tuple[str, ...]:
    """What is missing from the answer, a clause each: actions without an end, ranks without a clock, and the like."""
    said = []
    for what, condition in _INCOMPLETE.items():
        row = connection.execute(
            f"SELECT count(*) FROM stage_events s WHERE {asked} AND {condition}"
        ).fetchone()
        if row is not None and row[0]:
            said.append(f"{what}: {row[0]:,}")
    row = connection.execute(
        "SELECT count(*) FROM ranks r WHERE device <> 'cpu' "
        "AND EXISTS (SELECT 1 FROM stage_rows s WHERE s.rank = r.rank)"
    ).fetchone()
    if row is not None and row[0]:
        said.append("times are the host's: what a device does after that is not in them")
    stepless = stepless_ranks(connection)
    if stepless:
        said.append(
            f"{ranks_phrase(stepless)} ran no optimizer, so that every run of the schedule there counts as one step; "
            "gradtrace_recorder.step(n) tells steps apart"
        )
    return tuple(said)
