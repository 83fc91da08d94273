-- table: rebucketed
-- Backward passes in which a side reduced buckets at all, of the steps that are open.
-- key: side, rank, step, backward_index
-- columns:
--   side VARCHAR: baseline or candidate
--   rank INTEGER: the rank
--   step INTEGER: the step
--   backward_index INTEGER: the pass
-- reads: baseline.buckets, candidate.buckets, opened
SELECT DISTINCT side, rank, step, backward_index FROM (
    SELECT 'baseline' AS side, rank, step, backward_index FROM baseline.buckets
    UNION ALL SELECT 'candidate', rank, step, backward_index FROM candidate.buckets
) SEMI JOIN opened USING (rank, step)
