-- table: common
-- The steps of a rank that both sides have.
-- key: rank, step
-- columns:
--   rank INTEGER: the rank
--   step INTEGER: the step
-- reads: seen
SELECT rank, step FROM seen WHERE side = 'baseline'
INTERSECT SELECT rank, step FROM seen WHERE side = 'candidate'
