-- What is not in the recording, by rank: dropped rows, tensors without a summary, problems of the recorder?
SELECT run, rank, complete, last_step, dropped, dropped_steps, unsummarised, problems
FROM ranks
ORDER BY run, rank
