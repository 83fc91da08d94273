-- table: steady
-- Nodes that lengthen by the same factor time after time, where few do so: rounding errs otherwise each time.
-- key: id
-- columns:
--   id BIGINT: the row of kept_node_events
--   least DOUBLE: the smallest factor that counts there, less 1
-- reads: kept_node_events
WITH gains AS (
    SELECT id, rank, step, place, {node}, gain(reads_b_norm, reads_c_norm, writes_b_norm, writes_c_norm) AS gain,
        greatest({least_factor}, {as_constant} * greatest(roundoff(writes_b_dtype), roundoff(writes_c_dtype))) AS least,
        {steady_rounded} * greatest(roundoff(writes_b_dtype), roundoff(writes_c_dtype)) / sqrt(writes_b_numel) AS rounded
    FROM kept_node_events WHERE {of_nodes}),
spans AS (
    SELECT *, min(gain) OVER w AS lowest, max(gain) OVER w AS highest, count(gain) OVER w AS times
    FROM gains WINDOW w AS (PARTITION BY {node} ORDER BY step, rank, gains.place
        ROWS BETWEEN CURRENT ROW AND {steady_times} - 1 FOLLOWING)),
begun AS (
    SELECT *, times = {steady_times} AND lowest * highest > 0 AND least(abs(lowest), abs(highest)) > least
        AND highest - lowest <= {steady_alike} * abs(lowest) + rounded AS is_alike FROM spans),
told AS (
    SELECT *, bool_or(is_alike) OVER (PARTITION BY {node} ORDER BY step, rank, begun.place
        ROWS BETWEEN {steady_times} - 1 PRECEDING AND CURRENT ROW) AS is_steady FROM begun),
counts AS (
    SELECT count(*) FILTER (is_steady) AS steady, count(*) AS noisy FROM (
        SELECT bool_or(is_steady) AS is_steady FROM told WHERE abs(gain) > least GROUP BY {node}
        HAVING count(*) >= {steady_times}))
SELECT id, least FROM told, counts WHERE is_steady AND steady <= greatest(1, {most_steady} * noisy)
