-- table: judged_node_events
-- Rows that are judged, with those that lengthen by the same factor time after time told by that.
-- key: rank, step, only_in, place, place_c
-- columns:
--   shown_by VARCHAR: steady, where nothing else tells
-- reads: the rows that are judged, steady
SELECT m.* REPLACE (
    CASE WHEN NOT m.exceeds AND {steady} IS NOT NULL THEN 'steady' ELSE m.shown_by END AS shown_by,
    CASE WHEN NOT m.exceeds THEN coalesce({steady}, m.writes_tolerance) ELSE m.writes_tolerance END AS writes_tolerance,
    m.beyond OR {steady} IS NOT NULL AS beyond,
    m.exceeds OR {steady} IS NOT NULL AS exceeds)
FROM ({judged}) m LEFT JOIN steady s ON s.id = m.id
