-- table: unsteady
-- By how much Nodes so far disagreed with themselves when they were run again, on either side.
-- key: rank, step, place
-- columns:
--   rank INTEGER: the rank
--   step INTEGER: the step
--   place DOUBLE: the Node
--   until DOUBLE: the next one's
--   extra DOUBLE: what is allowed for it from there on, relative
-- reads: baseline.node_events, candidate.node_events, opened, step_start
SELECT rank, step, place, coalesce(lead(place) OVER w, 1e18) AS until, {replayed} * max(error) OVER w AS extra
FROM (SELECT rank, step, place::DOUBLE AS place, max(error) AS error FROM ({replays}) GROUP BY ALL)
WINDOW w AS (PARTITION BY rank, step ORDER BY place)
