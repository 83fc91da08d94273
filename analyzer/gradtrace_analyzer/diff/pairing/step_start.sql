-- table: step_start
-- Where each open step begins in its rank's record, on each side: a place is counted from there.
-- key: side, rank, step
-- columns:
--   side VARCHAR: baseline or candidate
--   rank INTEGER: the rank
--   step INTEGER: the step
--   first BIGINT: record_index of its first row of any table
-- reads: baseline, candidate, opened
SELECT side, rank, step, min(record_index) AS first
FROM ({rows}) SEMI JOIN opened USING (rank, step) GROUP BY ALL
