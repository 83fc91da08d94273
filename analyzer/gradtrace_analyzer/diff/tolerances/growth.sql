-- table: growth
-- By how much the parameters of a rank's step differ before it, and how much its forward then does.
-- key: rank, step
-- columns:
--   rank INTEGER: the rank
--   step INTEGER: the step
--   weights DOUBLE: the largest relative change of any module, whose parameters are taken together; no buffer's
--   forward DOUBLE: that of the forward, 0 where it is equal
-- reads: kept_parameters, shapes, seen_noise
WITH modules AS (
    SELECT rank, step, key_root, owner_of(key_parameter_fqn) AS owner,
        sqrt(sum((writes_error * greatest(writes_b_norm, writes_c_norm)) ** 2)
            / nullif(sum(greatest(writes_b_norm, writes_c_norm) ** 2), 0)) AS change
    FROM kept_parameters d
    WHERE key_point = 'before' AND only_in IS NULL AND NOT EXISTS (
        SELECT 1 FROM shapes s WHERE s.root = d.key_root AND s.parameter_fqn = d.key_parameter_fqn AND s.is_buffer)
    GROUP BY ALL),
received AS (SELECT rank, step, max(change) AS change FROM modules GROUP BY ALL)
SELECT r.rank, r.step, r.change AS weights, coalesce(f.change, 0) AS forward
FROM received r LEFT JOIN seen_noise f USING (rank, step)
