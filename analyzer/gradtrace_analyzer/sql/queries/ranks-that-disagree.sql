-- Which parameters do not have the same bits on all ranks when a step begins? Legal between stages and shards.
-- $top = 20  How many rows.
SELECT
    run,
    step,
    parameter_fqn,
    count(DISTINCT rank) AS ranks,
    count(DISTINCT fingerprint) AS different_values,
    min(norm) AS smallest_norm,
    max(norm) AS largest_norm
FROM parameters
WHERE point = 'before'
GROUP BY run, step, root, parameter_fqn
HAVING count(DISTINCT fingerprint) > 1
ORDER BY run, step, parameter_fqn
LIMIT $top
