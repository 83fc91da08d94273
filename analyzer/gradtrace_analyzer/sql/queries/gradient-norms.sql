-- How large is the whole gradient at each step: before the reduction, after it, and as the optimizer saw it?
SELECT
    run,
    rank,
    step,
    sqrt(sum(CASE WHEN point = 'local' THEN norm * norm END)) AS local_norm,
    sqrt(sum(CASE WHEN point = 'reduced' THEN norm * norm END)) AS reduced_norm,
    sqrt(sum(CASE WHEN point = 'final' THEN norm * norm END)) AS final_norm
FROM gradients
GROUP BY run, rank, step
ORDER BY run, rank, step
