-- table: handed_on
-- Whether a parameter before a step is what the step before left: what that left is judged there.
-- key: rank, step, root, parameter_fqn
-- columns:
--   rank INTEGER: the rank
--   step INTEGER: the step
--   root INTEGER: the root
--   parameter_fqn VARCHAR: the parameter
--   is_kept BOOLEAN: it is, on both sides
--   is_buffer BOOLEAN: the forward changes it, and no optimizer
--   has_last BOOLEAN: the step before has a row of it
-- reads: baseline.parameters, candidate.parameters
SELECT rank, step, root, parameter_fqn, bool_and(is_kept) AS is_kept, bool_or(is_buffer) AS is_buffer,
    bool_or(has_last) AS has_last
FROM ({rows}) GROUP BY ALL
