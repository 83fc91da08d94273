-- table: seen_noise
-- How much a step's forward differs: the larger of the root's output and the median of all modules that differ.
-- key: rank, step
-- columns:
--   rank INTEGER: the rank
--   step INTEGER: the step
--   change DOUBLE: a relative error
-- reads: kept_module_calls
SELECT rank, step, greatest(median(writes_error), max(writes_error) FILTER (key_module_fqn = '')) AS change
FROM kept_module_calls
WHERE only_in IS NULL AND writes_differs AND key_phase = 'forward' AND writes_error > 0 GROUP BY ALL
