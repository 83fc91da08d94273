-- table: among
-- Where rows of the candidate alone stand among the baseline's: in front of the next pair that differs.
-- key: of_table, rank, step, place_c
-- columns:
--   of_table VARCHAR: the link table
--   rank INTEGER: the rank
--   step INTEGER: the step
--   place_c BIGINT: the row's place in the candidate's order
--   place DOUBLE: its place in the baseline's, between two of that
-- reads: paired_<table>
SELECT of_table, rank, step, place_c, place - 1 +
    row_number() OVER (PARTITION BY rank, step, place ORDER BY place_c)
    / (count(*) OVER (PARTITION BY rank, step, place) + 1) AS place
FROM (
    SELECT l.*, p.place FROM ({lone}) l
    ASOF JOIN ({pairs}) p ON p.rank = l.rank AND p.step = l.step AND l.place_c < p.place_c)
