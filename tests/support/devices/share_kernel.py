"""The last part of the kernel alone: the sum over shares that lie in a workspace. Importing it needs Triton."""

import triton

from gradtrace_recorder.summaries.device import kernel


@triton.jit
def finish(row, ticket, partials, length, programs, constants):
    """As the program that ends last does it."""
    kernel._finish(row, ticket, partials, length, programs, constants)
