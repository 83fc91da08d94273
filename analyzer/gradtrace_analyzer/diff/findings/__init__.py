"""What is told beside the origins: factors, Nodes that disagree with themselves, batches left out."""
