-- table: judged_{table}
-- Of a link that computes (forward, backward, gradients, buckets, stages) the rows of kept_<table>, held against what
-- they are allowed: `direction` as a relative error, `length` as a change of the norm beyond what came in.
-- key: rank, step, only_in, place, place_c
-- columns:
--   id BIGINT: of the row, among those of its table
--   <role>_tolerance DOUBLE: the relative error that is allowed; of a norm, where its length alone tells
--   noise VARCHAR: measured, where the tolerance comes from repeats
--   shown_by VARCHAR: length or steady, where that tells and not the direction
--   given BOOLEAN: counts as it is: see paired_<table>
--   beyond BOOLEAN: larger than the tolerance: it can be an origin (`Difference.exceeds`)
--   exceeds BOOLEAN: so much larger that the verdict may rest on it
-- reads: kept_<table>, rounding, growth, cancelling, seen_noise, usual_gain, kinked, unsteady, arriving, shapes
WITH allowed AS (
    SELECT d.*, {direction} AS direction, {length} AS length, {shares}
    FROM kept_{table} d
    LEFT JOIN rounding r ON holds_at(r.rank, r.step, r.start, r.until, d.rank, d.step, d.place)
    LEFT JOIN growth g ON g.rank = d.rank AND g.step = d.step
    LEFT JOIN seen_noise w ON w.rank = d.rank AND w.step = d.step
    LEFT JOIN usual_gain q ON q.rank = d.rank AND q.step = d.step AND q.link_table = '{table}'
    LEFT JOIN cancelling k ON holds_at(k.rank, k.step, k.place, k.until, d.rank, d.step, d.place)
    LEFT JOIN kinked f ON holds_at(f.rank, f.step, f.place, f.until, d.rank, d.step, d.place)
    LEFT JOIN unsteady u ON holds_at(u.rank, u.step, u.place, u.until, d.rank, d.step, d.place)
    {floors}),
held AS (
    SELECT *, ({beyond}) AS is_beyond, ({decisive}) AS is_decisive, ({longer}) AS is_longer FROM allowed d)
SELECT * EXCLUDE (direction, length, {share_names}, is_beyond, is_decisive, is_longer),
    {tolerances},
    CASE WHEN is_longer AND NOT is_decisive THEN 'length' END AS shown_by,
    given OR is_beyond OR is_longer AS beyond,
    given OR is_decisive OR is_longer AS exceeds
FROM held
