-- table: cancelling
-- By how much normalisations so far may have amplified relative errors: what is left of a gradient, of what came in.
-- key: rank, step, place
-- columns:
--   rank INTEGER: the rank
--   step INTEGER: the step
--   place DOUBLE: the normalisation's Node
--   until DOUBLE: the next one's
--   times DOUBLE: the product so far
-- reads: kept_node_events, baseline.module_calls, opened
WITH calls AS (
    SELECT rank, step, root, module_fqn, call_index, max(sqrt(input_numel) / nullif(input_norm, 0)) AS gain
    FROM baseline.module_calls t SEMI JOIN opened USING (rank, step)
    WHERE phase = 'forward' AND {here} GROUP BY ALL),
shares AS (
    SELECT d.rank, d.step, d.place, least(greatest(1, greatest(reads_b_norm, reads_c_norm) * c.gain
        / nullif(greatest(writes_b_norm, writes_c_norm), 0)), {most_amplified}) AS share
    FROM kept_node_events d JOIN calls c ON c.rank = d.rank AND c.step = d.step AND c.root = d.key_root
        AND c.module_fqn = d.key_module_fqn AND c.call_index = d.key_call_index
    WHERE d.key_node_name LIKE '%NormBackward%' AND d.only_in IS NULL)
SELECT rank, step, place, coalesce(lead(place) OVER w, 1e18) AS until, exp(sum(ln(share)) OVER w) AS times
FROM shares WINDOW w AS (PARTITION BY rank, step ORDER BY place)
