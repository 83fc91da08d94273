-- table: arriving
-- The largest gradient that reaches a module's Nodes: what its parameters' gradients are summed from.
-- key: rank, step, root, module_fqn
-- columns:
--   rank INTEGER: the rank
--   step INTEGER: the step
--   root INTEGER: the root
--   module_fqn VARCHAR: the module
--   norm DOUBLE: the norm, the larger one of both sides
-- reads: kept_node_events
SELECT rank, step, key_root AS root, key_module_fqn AS module_fqn, max(greatest(reads_b_norm, reads_c_norm)) AS norm
FROM kept_node_events WHERE key_parameter_fqn IS NULL AND key_module_fqn IS NOT NULL GROUP BY ALL
