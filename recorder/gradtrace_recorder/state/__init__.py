"""What is known of the job while it runs: names, steps, owners of Nodes, versions of tensors."""
