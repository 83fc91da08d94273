"""Models and autograd functions of a user's kind."""
