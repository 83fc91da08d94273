-- Which Nodes of the backward pass take longest, over all steps and ranks?
-- $top = 20  How many rows.
SELECT
    run,
    module_fqn,
    node_name,
    count(*) AS runs,
    sum(end_ns - start_ns) / 1e6 AS total_ms,
    avg(end_ns - start_ns) / 1e3 AS mean_us,
    max(end_ns - start_ns) / 1e3 AS longest_us
FROM node_events
WHERE end_ns IS NOT NULL
GROUP BY run, module_fqn, node_name
ORDER BY total_ms DESC, module_fqn, node_name
LIMIT $top
