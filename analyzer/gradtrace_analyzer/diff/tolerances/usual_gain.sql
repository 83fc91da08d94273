-- table: usual_gain
-- By how much Nodes, and modules, lengthen what they hand on as a rule, where a few of them show any.
-- Of Nodes it is the root of the mean square without the largest. Modules hold each other, so that one that lengthens
-- makes several do so: of them it is the median.
-- key: link_table, rank, step
-- columns:
--   link_table VARCHAR: node_events or module_calls
--   rank INTEGER: the rank
--   step INTEGER: the step
--   gain DOUBLE: a share of the norm
-- reads: kept_node_events, kept_module_calls
WITH gains AS (
    SELECT 'node_events' AS link_table, rank, step,
        abs(gain(reads_b_norm, reads_c_norm, writes_b_norm, writes_c_norm)) AS gain
    FROM kept_node_events WHERE {of_nodes}
    UNION ALL SELECT 'module_calls', rank, step,
        abs(gain(reads_b_norm, reads_c_norm, writes_b_norm, writes_c_norm))
    FROM kept_module_calls WHERE only_in IS NULL AND key_phase = 'forward' AND writes_differs AND {many})
SELECT link_table, rank, step, if(link_table = 'node_events',
    sqrt(greatest(0, sum(gain * gain) - max(gain) ** 2) / (count(*) - 1)), median(gain)) AS gain
FROM gains WHERE gain > {as_added_up} AND isfinite(gain) GROUP BY link_table, rank, step
HAVING count(*) >= {fewest_gains}
