-- What do the actions of each pipeline stage take: forward, the two halves of backward, and waits for neighbours?
SELECT
    run,
    rank,
    stage_index,
    kind,
    count(*) AS actions,
    sum(end_ns - start_ns) / 1e6 AS total_ms,
    avg(end_ns - start_ns) / 1e6 AS mean_ms
FROM stage_events
GROUP BY run, rank, stage_index, kind
ORDER BY run, rank, stage_index, kind
