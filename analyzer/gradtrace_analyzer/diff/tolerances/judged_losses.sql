-- table: differing_backward_passes
-- A loss is one number, made from the last output: it may differ as that does.
-- key: rank, step, only_in, place, place_c
-- columns:
--   id BIGINT: of the row, among those of its table
--   noise VARCHAR: measured, where the tolerance comes from repeats
--   shown_by VARCHAR: null
--   given BOOLEAN: counts as it is: see paired_<table>
--   beyond BOOLEAN: larger than the tolerance
--   exceeds BOOLEAN: the same
-- reads: kept_backward_passes, rounding, growth
WITH held AS (
    SELECT d.*, losses_apart(value_b_loss, value_c_loss,
        coalesce(r.forward, {rule_forward}) + {scale} * {drift}) AS is_apart
    FROM kept_backward_passes d
    LEFT JOIN rounding r ON holds_at(r.rank, r.step, r.start, r.until, d.rank, d.step, d.place)
    LEFT JOIN growth g ON g.rank = d.rank AND g.step = d.step)
SELECT * EXCLUDE (is_apart), NULL::VARCHAR AS shown_by, given OR is_apart AS beyond, given OR is_apart AS exceeds
FROM held
