-- table: kinked
-- What elements on the wrong side of a kink may change in the gradients from there on, relative.
-- key: rank, step, place
-- columns:
--   rank INTEGER: the rank
--   step INTEGER: the step
--   place DOUBLE: the kink's Node
--   until DOUBLE: the next one's
--   extra DOUBLE: of all kinks so far
-- reads: kept_node_events, seen_noise
WITH nodes AS (
    SELECT d.rank, d.step, d.place,
        CASE WHEN {flipped} * w.change * d.writes_b_numel > {fewest_flipped}
        THEN {flipped} * w.change + {more_flipped} / d.writes_b_numel ELSE 0 END AS share
    FROM kept_node_events d JOIN seen_noise w USING (rank, step)
    WHERE regexp_matches(d.key_node_name, '{kinks}') AND d.only_in IS NULL)
SELECT rank, step, place, coalesce(lead(place) OVER w, 1e18) AS until, {kink_times} * sqrt(sum(share) OVER w) AS extra
FROM nodes WINDOW w AS (PARTITION BY rank, step ORDER BY place)
