-- What was the loss of each backward pass?
SELECT run, rank, step, microbatch, backward_index, root_node_name, loss
FROM backward_passes
WHERE loss IS NOT NULL AND kind = 'backward'
ORDER BY run, rank, step, backward_index
