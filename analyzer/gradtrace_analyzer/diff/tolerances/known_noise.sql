-- table: known_noise
-- What noise allows at a place up to a step: noise that was seen once stays.
-- key: link_table, role, place, step
-- columns:
--   link_table VARCHAR: the link table
--   role VARCHAR: reads, writes or loss
--   place VARCHAR: what the rows are of
--   step INTEGER: from which on
--   allowed DOUBLE: a tolerance
-- reads: noise_seen
SELECT link_table, role, place, step,
    max(max(error)) OVER (PARTITION BY link_table, role, place ORDER BY step) * ({scatter} * {scale})::DOUBLE AS allowed
FROM noise_seen GROUP BY link_table, role, place, step
