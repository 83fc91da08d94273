-- Which modules take longest, forward and backward together? A backward's time is that of the Nodes it made itself.
-- $top = 20  How many rows.
WITH forward AS (
    SELECT run, root, module_fqn, sum(end_ns - start_ns) AS forward_ns, count(*) AS calls
    FROM module_calls
    WHERE phase = 'forward'
    GROUP BY run, root, module_fqn
),
backward AS (
    SELECT run, root, module_fqn, sum(end_ns - start_ns) AS backward_ns
    FROM node_events
    WHERE end_ns IS NOT NULL
    GROUP BY run, root, module_fqn
)
SELECT
    f.run,
    f.module_fqn,
    f.calls,
    f.forward_ns / 1e6 AS forward_ms,
    coalesce(b.backward_ns, 0) / 1e6 AS backward_ms
FROM forward AS f
LEFT JOIN backward AS b ON f.run = b.run AND f.root = b.root AND f.module_fqn = b.module_fqn
ORDER BY f.forward_ns + coalesce(b.backward_ns, 0) DESC, f.module_fqn
LIMIT $top
