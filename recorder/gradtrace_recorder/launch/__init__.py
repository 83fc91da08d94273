"""What started this process, which rank it is, and its place in the run's directory. No torch but in `environment`."""
