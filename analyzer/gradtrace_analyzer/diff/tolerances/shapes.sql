-- table: shapes
-- What parameters and buffers are, in the first step that has any.
-- key: root, parameter_fqn
-- columns:
--   root INTEGER: the root
--   parameter_fqn VARCHAR: the parameter
--   is_flat BOOLEAN: of fewer than two dimensions: a bias, a scale, a number
--   is_buffer BOOLEAN: no optimizer trains it
-- reads: baseline.parameters
SELECT root, parameter_fqn, bool_or(len(shape) < 2) AS is_flat, bool_or(kind = 'buffer') AS is_buffer
FROM baseline.parameters WHERE step = {first_step} GROUP BY ALL
