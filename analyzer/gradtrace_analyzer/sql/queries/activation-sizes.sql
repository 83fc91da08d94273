-- Which modules put out the most memory in one step, counting every call? (In elements; each takes four bytes, or two in half precision.)
-- $step = 0  The step.
-- $top = 20  How many rows.
SELECT
    run,
    rank,
    module_fqn,
    module_class,
    output_dtype,
    count(*) AS calls,
    sum(output_numel) AS elements,
    sum(output_numel * CASE
        WHEN output_dtype IN ('float64', 'int64', 'complex64') THEN 8
        WHEN output_dtype IN ('float32', 'int32') THEN 4
        WHEN output_dtype IN ('float16', 'bfloat16', 'int16') THEN 2
        WHEN output_dtype = 'complex128' THEN 16
        ELSE 1 END) / 1e6 AS mb
FROM module_calls
WHERE step = $step AND phase = 'forward'
GROUP BY run, rank, module_fqn, module_class, output_dtype
ORDER BY mb DESC, rank, module_fqn
LIMIT $top
