"""What the analyzer's commands say, and the files that say what they should."""
