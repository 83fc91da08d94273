-- Where are NaN and infinity, in the order in which each rank met them?
-- $top = 20  How many rows.
WITH met AS (
    SELECT run, rank, step, record_index, 'forward' AS link, module_fqn, module_class AS what,
        output_nan_count AS nan_count, output_inf_count AS inf_count
    FROM module_calls
    WHERE output_nan_count > 0 OR output_inf_count > 0
    UNION ALL
    SELECT run, rank, step, record_index, 'backward', module_fqn, node_name,
        grad_input_nan_count, grad_input_inf_count
    FROM node_events
    WHERE grad_input_nan_count > 0 OR grad_input_inf_count > 0
    UNION ALL
    SELECT run, rank, step, record_index, 'parameter', parameter_fqn, point, nan_count, inf_count
    FROM parameters
    WHERE nan_count > 0 OR inf_count > 0
)
SELECT run, rank, step, link, module_fqn, what, nan_count, inf_count
FROM met
ORDER BY run, rank, record_index
LIMIT $top
