-- Where does the time of each step go: forward, backward, optimizer, the recorder itself, and the rest?
SELECT
    run,
    rank,
    step,
    (end_ns - start_ns) / 1e6 AS step_ms,
    forward_ns / 1e6 AS forward_ms,
    backward_ns / 1e6 AS backward_ms,
    optimizer_ns / 1e6 AS optimizer_ms,
    recorder_ns / 1e6 AS recorder_ms,
    (end_ns - start_ns - forward_ns - backward_ns - optimizer_ns) / 1e6 AS rest_ms
FROM steps
ORDER BY run, rank, step
