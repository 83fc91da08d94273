-- table: judged_{table}
-- Rows that the rule has judged, held against what repeats of the baseline show instead.
-- key: rank, step, only_in, place, place_c
-- columns:
--   noise VARCHAR: measured, of each pair
-- reads: the rows that are judged, known_noise, usual_noise
WITH placed AS (SELECT *, {place} AS noise_place, {kind} AS noise_kind FROM ({ruled})),
allowed AS (SELECT p.*, {allowed} FROM placed p {joins})
SELECT * EXCLUDE (noise_place, noise_kind, {names}) REPLACE (
    {tolerances}
    CASE WHEN only_in IS NOT NULL THEN shown_by END AS shown_by,
    CASE WHEN only_in IS NULL THEN given OR {beyond} ELSE beyond END AS beyond,
    CASE WHEN only_in IS NULL THEN given OR {exceeds} ELSE exceeds END AS exceeds),
    CASE WHEN only_in IS NULL THEN 'measured' END AS noise
FROM allowed
