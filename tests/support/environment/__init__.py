"""What a test needs around it: an observer that is built, a disk that is small."""
