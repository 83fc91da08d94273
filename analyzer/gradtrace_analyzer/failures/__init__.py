"""How each rank ended, or where it is and whom it waits for; exceptions that left a backward pass."""
