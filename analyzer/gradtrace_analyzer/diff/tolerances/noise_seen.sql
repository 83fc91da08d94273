-- table: noise_seen
-- What the repeats of the baseline show at a place: the largest relative errors, a row for each repeat.
-- key:
-- columns:
--   link_table VARCHAR: the link table
--   place VARCHAR: what the rows are of, never when they ran
--   kind VARCHAR: the kind of Node, phase or point
--   role VARCHAR: reads, writes or loss
--   step INTEGER: the step
--   error DOUBLE: the largest relative error
-- reads: differing_<table> of each repeat
SELECT unnest($1::VARCHAR[]) AS link_table, unnest($2::VARCHAR[]) AS place, unnest($3::VARCHAR[]) AS kind,
    unnest($4::VARCHAR[]) AS role, unnest($5::INTEGER[]) AS step, unnest($6::DOUBLE[]) AS error
