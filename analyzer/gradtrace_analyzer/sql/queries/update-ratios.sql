-- How far does a step move each parameter, as a share of its size? About 1e-3 is usual; 0 is frozen or stale.
-- $step = null  One step, or null for all.
-- $top = 20  How many rows.
SELECT
    b.run,
    b.rank,
    b.step,
    b.parameter_fqn,
    b.norm AS norm_before,
    sqrt(
          power(a.sketch[1] - b.sketch[1], 2) + power(a.sketch[2] - b.sketch[2], 2) + power(a.sketch[3] - b.sketch[3], 2) + power(a.sketch[4] - b.sketch[4], 2)
        + power(a.sketch[5] - b.sketch[5], 2) + power(a.sketch[6] - b.sketch[6], 2) + power(a.sketch[7] - b.sketch[7], 2) + power(a.sketch[8] - b.sketch[8], 2)
        + power(a.sketch[9] - b.sketch[9], 2) + power(a.sketch[10] - b.sketch[10], 2) + power(a.sketch[11] - b.sketch[11], 2) + power(a.sketch[12] - b.sketch[12], 2)
        + power(a.sketch[13] - b.sketch[13], 2) + power(a.sketch[14] - b.sketch[14], 2) + power(a.sketch[15] - b.sketch[15], 2) + power(a.sketch[16] - b.sketch[16], 2)
    ) / nullif(b.norm, 0) AS moved_by,
    b.fingerprint = a.fingerprint AS is_unmoved
FROM parameters AS b
JOIN parameters AS a
    ON b.run = a.run AND b.attempt = a.attempt AND b.rank = a.rank AND b.step = a.step
    AND b.root = a.root AND b.parameter_fqn = a.parameter_fqn
WHERE b.point = 'before' AND a.point = 'after' AND b.kind = 'parameter'
    AND ($step IS NULL OR b.step = $step)
ORDER BY moved_by DESC, b.rank, b.step, b.parameter_fqn
LIMIT $top
