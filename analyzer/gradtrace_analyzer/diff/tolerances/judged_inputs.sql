-- table: differing_inputs
-- Inputs are given, not computed: of another dtype they are rounded once.
-- key: rank, step, only_in, place, place_c
-- columns:
--   id BIGINT: of the row, among those of its table
--   writes_tolerance DOUBLE: the relative error that is allowed
--   noise VARCHAR: null: inputs are no noise
--   shown_by VARCHAR: null
--   given BOOLEAN: counts as it is: see paired_<table>
--   beyond BOOLEAN: larger than the tolerance
--   exceeds BOOLEAN: the same
-- reads: kept_inputs
SELECT *, {once} AS writes_tolerance, NULL::VARCHAR AS shown_by,
    given OR coalesce(writes_error > {once}, true) AS beyond, given OR coalesce(writes_error > {once}, true) AS exceeds
FROM kept_inputs d
