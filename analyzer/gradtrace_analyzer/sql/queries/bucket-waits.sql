-- Which buckets were reduced, when were they ready, and how long until they were done?
-- $top = 20  How many rows.
SELECT
    run,
    step,
    rank,
    bucket_index,
    kind,
    size_bytes / 1e6 AS size_mb,
    (launched_ns - ready_ns) / 1e6 AS filling_ms,
    (done_ns - launched_ns) / 1e6 AS reducing_ms
FROM buckets
WHERE done_ns IS NOT NULL
ORDER BY reducing_ms DESC, step, rank, bucket_index
LIMIT $top
