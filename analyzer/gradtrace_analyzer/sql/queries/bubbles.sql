-- How much of each pipeline rank's step passes with no action of a stage running?
WITH busy AS (
    SELECT
        run,
        rank,
        step,
        min(start_ns) AS start_ns,
        max(end_ns) AS end_ns,
        sum(CASE WHEN kind LIKE 'receive%' OR kind LIKE 'send%' THEN 0 ELSE end_ns - start_ns END) AS busy_ns
    FROM stage_events
    GROUP BY run, rank, step
)
SELECT
    run,
    rank,
    step,
    (end_ns - start_ns) / 1e6 AS span_ms,
    busy_ns / 1e6 AS busy_ms,
    1 - busy_ns / nullif(end_ns - start_ns, 0) AS bubble_share
FROM busy
ORDER BY run, rank, step
