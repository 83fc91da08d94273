-- table: usual_noise
-- What noise allows where no repeat showed any: what the kind shows in the median.
-- key: link_table, role, kind
-- columns:
--   link_table VARCHAR: the link table
--   role VARCHAR: reads, writes or loss
--   kind VARCHAR: the kind of Node, phase or point
--   allowed DOUBLE: a tolerance
-- reads: noise_seen
SELECT link_table, role, kind, median(error) * ({scatter} * {scale})::DOUBLE AS allowed
FROM noise_seen GROUP BY link_table, role, kind
