"""What is compared: what was asked for, what both sides recorded, and how they are configured."""
