-- table: gradient_errors
-- The largest relative error of the gradient that the optimizer saw of a parameter, up to a step: it may remember it.
-- key: rank, step, root, parameter_fqn
-- columns:
--   rank INTEGER: the rank
--   step INTEGER: the step, where it differs
--   root INTEGER: the root
--   parameter_fqn VARCHAR: the parameter
--   error DOUBLE: a relative error
-- reads: kept_gradients
SELECT rank, step, root, parameter_fqn,
    max(max(error)) OVER (PARTITION BY rank, root, parameter_fqn ORDER BY step) AS error
FROM (
    SELECT rank, step, key_root AS root, key_parameter_fqn AS parameter_fqn, writes_error AS error
    FROM kept_gradients WHERE only_in IS NULL AND key_point = 'final')
GROUP BY rank, step, root, parameter_fqn
