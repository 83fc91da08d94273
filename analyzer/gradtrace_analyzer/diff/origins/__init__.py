"""Which of a step's differences follow from no other: the origins, and what inherits from each."""
