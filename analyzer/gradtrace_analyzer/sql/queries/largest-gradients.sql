-- Where are the largest gradients, by the norm of what leaves a Node?
-- $top = 20  How many rows.
SELECT run, step, rank, module_fqn, node_name, parameter_fqn, grad_input_norm, grad_input_abs_max
FROM node_events
WHERE grad_input_norm IS NOT NULL
ORDER BY grad_input_norm DESC, step, rank, event_index
LIMIT $top
