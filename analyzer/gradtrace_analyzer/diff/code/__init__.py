"""What one side alone has: told as changed code, or left out because it changes nothing."""
