-- table: seen
-- The steps of which a side recorded anything, by side and rank.
-- key: side, rank, step
-- columns:
--   side VARCHAR: baseline or candidate
--   rank INTEGER: the rank
--   step INTEGER: the step
-- reads: baseline, candidate
{rows}
