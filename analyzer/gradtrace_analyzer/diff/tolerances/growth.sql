-- table: growth
-- By how much the parameters of a rank's step differ before it, and how much its forward then does.
-- key: rank, step
-- columns:
--   rank INTEGER: the rank
--   step INTEGER: the step
--   weights DOUBLE: the largest relative change of any module, whose parameters are taken together; no buffer's
--   forward DOUBLE: that of the forward, 0 where it is equal
-- reads: kept_parameters, baseline.parameters, shapes, seen_noise
WITH apart AS (
    SELECT rank, step, key_root AS root, owner_of(key_parameter_fqn) AS owner,
        sum((writes_error * greatest(writes_b_norm, writes_c_norm)) ** 2) AS change,
        sum(greatest(writes_b_norm, writes_c_norm) ** 2) AS square
    FROM kept_parameters d
    WHERE key_point = 'before' AND only_in IS NULL AND NOT EXISTS (
        SELECT 1 FROM shapes s WHERE s.root = d.key_root AND s.parameter_fqn = d.key_parameter_fqn AND s.is_buffer)
    GROUP BY ALL),
-- A module's parameters that are equal are part of it: a small bias that is all noise hardly changes what it gives.
whole AS (
    SELECT rank, step, root, owner_of(parameter_fqn) AS owner, sum(norm ** 2) AS square
    FROM baseline.parameters t SEMI JOIN apart USING (rank, step)
    WHERE point = 'before' AND kind = 'parameter' AND {here} GROUP BY ALL),
received AS (
    SELECT a.rank, a.step, max(sqrt(a.change / nullif(greatest(a.square, w.square), 0))) AS change
    FROM apart a LEFT JOIN whole w USING (rank, step, root, owner) GROUP BY ALL)
SELECT r.rank, r.step, r.change AS weights, coalesce(f.change, 0) AS forward
FROM received r LEFT JOIN seen_noise f USING (rank, step)
