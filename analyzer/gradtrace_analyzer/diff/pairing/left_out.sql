-- table: left_out
-- Rows that were judged and are no difference: they were set aside, are changed code, or were not asked for.
-- key: link_table, id
-- columns:
--   link_table VARCHAR: of judged_<table>
--   id BIGINT: of the row there
--   why VARCHAR: why it is no difference
-- reads: differing_<table>
SELECT NULL::VARCHAR AS link_table, NULL::BIGINT AS id, NULL::VARCHAR AS why WHERE false
