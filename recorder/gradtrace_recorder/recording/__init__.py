"""What one rank records into: the live recording, and the rows that sources write into its journal."""
