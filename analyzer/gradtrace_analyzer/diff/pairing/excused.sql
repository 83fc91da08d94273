-- table: excused
-- Nodes that no tolerance judges: changed code has given them another part of the work.
-- key: id
-- columns:
--   id BIGINT: of the row in judged_node_events
-- reads: differing_node_events
SELECT NULL::BIGINT AS id WHERE false
