-- How far does a step move each parameter, as a share of its size? About 1e-3 is usual; 0 is frozen or stale.
-- $step = null  One step, or null for all.
-- $top = 20  How many rows.
SELECT
    b.run,
    b.rank,
    b.step,
    b.parameter_fqn,
    b.norm AS norm_before,
    sqrt(list_sum(list_transform(range(1, 17), lambda i:
        (a.sketch[i] - b.sketch[i]) * (a.sketch[i] - b.sketch[i])))) / nullif(b.norm, 0) AS moved_by,
    b.fingerprint = a.fingerprint AS is_unmoved
FROM parameters AS b
JOIN parameters AS a
    ON b.run = a.run AND b.attempt = a.attempt AND b.rank = a.rank AND b.step = a.step
    AND b.root = a.root AND b.parameter_fqn = a.parameter_fqn
WHERE b.point = 'before' AND a.point = 'after' AND b.kind = 'parameter'
    AND ($step IS NULL OR b.step = $step)
ORDER BY moved_by DESC, b.rank, b.step, b.parameter_fqn
LIMIT $top
