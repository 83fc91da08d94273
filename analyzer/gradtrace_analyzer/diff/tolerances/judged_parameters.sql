-- table: differing_parameters
-- Parameters after the optimizer, by what is new of the difference, against the update and what gradients explain of
-- it; and before a step, where it was given them: what the last step left is judged there, so that only what changed
-- since counts. Buffers have no row after the optimizer: statistics are held against a far wider tolerance.
-- key: rank, step, only_in, place, place_c
-- columns:
--   id BIGINT: of the row, among those of its table
--   writes_tolerance DOUBLE: the relative error that is allowed
--   noise VARCHAR: measured, where the tolerance comes from repeats
--   shown_by VARCHAR: null
--   given BOOLEAN: counts as it is: see paired_<table>
--   beyond BOOLEAN: larger than the tolerance
--   exceeds BOOLEAN: the same
-- reads: kept_parameters, gradient_errors, update_sizes, shapes, handed_on, growth, common
WITH known AS (
    SELECT d.*,
        -- Where counts of NaN differ there is no error: `greatest` alone would make 0 of it.
        CASE WHEN d.writes_error IS NOT NULL
            THEN greatest(0, d.writes_error * greatest(d.writes_b_norm, d.writes_c_norm) - {carried}) END AS added,
        greatest(roundoff(d.writes_b_dtype), roundoff(d.writes_c_dtype)) AS unit,
        greatest(d.writes_b_norm, d.writes_c_norm) AS norm,
        coalesce(u.size, 0) AS update_norm,
        {share} AS share,
        coalesce(h.is_kept, false) AS is_kept,
        -- What a buffer counts, in integers, is exact.
        CASE WHEN d.step > (SELECT min(step) FROM common) AND NOT h.has_last AND h.is_buffer
                AND roundoff(d.writes_b_dtype) > 0
            THEN greatest({statistics}, {drifted}) ELSE {once} END AS given_allowed
    FROM kept_parameters d
    LEFT JOIN (
        SELECT rank, step, key_root, key_parameter_fqn, max(writes_error * greatest(writes_b_norm, writes_c_norm)) AS was
        FROM kept_parameters WHERE key_point = 'before' GROUP BY ALL) before
        ON before.rank = d.rank AND before.step = d.step AND before.key_root = d.key_root
        AND before.key_parameter_fqn = d.key_parameter_fqn
    LEFT JOIN update_sizes u ON u.rank = d.rank AND u.step = d.step AND u.root = d.key_root
        AND u.parameter_fqn = d.key_parameter_fqn
    LEFT JOIN shapes s ON s.root = d.key_root AND s.parameter_fqn = d.key_parameter_fqn
    LEFT JOIN handed_on h ON h.rank = d.rank AND h.step = d.step AND h.root = d.key_root
        AND h.parameter_fqn = d.key_parameter_fqn
    LEFT JOIN growth g ON g.rank = d.rank AND g.step = d.step
    ASOF LEFT JOIN gradient_errors e ON e.rank = d.rank AND e.root = d.key_root
        AND e.parameter_fqn = d.key_parameter_fqn AND d.step >= e.step),
judged AS (
    SELECT *, {scale} * update_allowed(unit, norm, share, update_norm) AS new_allowed FROM known),
held AS (
    SELECT *, CASE WHEN only_in IS NOT NULL THEN NULL WHEN key_point = 'after' THEN new_allowed / nullif(norm, 0)
            WHEN key_point = 'before' THEN given_allowed END AS tolerance,
        CASE WHEN only_in IS NOT NULL THEN false WHEN key_point = 'after' THEN coalesce(added > new_allowed, true)
            WHEN key_point = 'before' THEN NOT is_kept AND coalesce(writes_error > given_allowed, true)
            ELSE false END AS is_apart
    FROM judged)
SELECT * EXCLUDE (added, unit, norm, update_norm, share, is_kept, given_allowed, new_allowed, tolerance, is_apart),
    tolerance AS writes_tolerance, NULL::VARCHAR AS shown_by, given OR is_apart AS beyond, given OR is_apart AS exceeds
FROM held
