"""What tests share; README.md says which folder holds what, and lists every module."""
