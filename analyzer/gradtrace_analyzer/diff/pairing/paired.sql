-- table: paired_{table}
-- Pairs of rows that differ, and rows without a partner, of the steps that are open: one table for each link table.
-- key: rank, step, only_in, place, place_c
-- columns:
--   rank INTEGER: the rank
--   step INTEGER: the step
--   place DOUBLE: records since the step began, of the baseline; of a row of the candidate alone, between those
--   place_c BIGINT: the same of the candidate
--   steps_before INTEGER: steps that both runs made before this one
--   only_in VARCHAR: the side that alone has the row; null of a pair
--   key_<key> <type>: what the rows pair by
--   event_index_b INTEGER: the Node's number in its pass, of the baseline (node_events)
--   event_index_c INTEGER: the same of the candidate (node_events)
--   bucket_index INTEGER: the bucket's number (buckets)
--   <role>_differs BOOLEAN: whether the summaries differ
--   <role>_error DOUBLE: the relative error; null where counts of NaN or infinities differ
--   <role>_b_<statistic> <type>: of the baseline's summary
--   <role>_c_<statistic> <type>: of the candidate's summary
--   value_b_<value> <type>: a plain value of the baseline
--   value_c_<value> <type>: the same of the candidate
--   given BOOLEAN: it counts as it is, no tolerance asked: a row of one side alone, or another setting
--   error DOUBLE: the largest relative error of the row
-- reads: baseline, candidate, opened, step_start, common
WITH b AS ({baseline}), c AS ({candidate})
SELECT
    coalesce(b.rank, c.rank) AS rank,
    coalesce(b.step, c.step) AS step,
    coalesce(b.record_index - b.first, c.record_index - c.first)::DOUBLE AS place,
    c.record_index - c.first AS place_c,
    -- A run's numbering may begin anywhere.
    coalesce(b.step, c.step) - (SELECT min(step) FROM common) AS steps_before,
    CASE WHEN b.rank IS NULL THEN 'candidate' WHEN c.rank IS NULL THEN 'baseline' END AS only_in,
    {columns},
    (b.rank IS NULL OR c.rank IS NULL OR {counts}) AS given,
    greatest({errors}, NULL)::DOUBLE AS error
FROM b FULL OUTER JOIN c ON b.rank = c.rank AND b.step = c.step AND b.nth = c.nth AND {same_key}
WHERE b.rank IS NULL OR c.rank IS NULL OR {differs}
