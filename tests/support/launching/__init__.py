"""Real jobs, in processes of their own: started, waited for, and gone when a call returns."""
