"""What a person can be told, each with its exit code: one sentence, no traceback.

A text says which thing, what about it, and what would help. Anything else that is raised is a bug of ours.
"""


class GradtraceError(Exception):
    """Something the person who called us can understand and mend."""

    exit_code = 2
    """0 is same, 1 is different, 2 is cannot tell."""


class NotARun(GradtraceError):
    """The path is no run's directory."""


class NoSuchAttempt(GradtraceError):
    """The run holds other attempts than the one asked for."""


class NewerSchema(GradtraceError):
    """A newer gradtrace wrote the run."""


class Unreadable(GradtraceError):
    """Something of a run is there, and cannot be read."""


class IncompleteRun(GradtraceError):
    """The run lacks what the question needs."""


class NoFlight(GradtraceError):
    """The run cannot be asked for the steps that it keeps."""


class BadQuery(GradtraceError):
    """The SQL of a person is refused, or cannot be answered."""


class BadRename(GradtraceError):
    """A rename of modules that cannot be read, or fits nothing."""


class BadAlignment(GradtraceError):
    """Steps that `--align-steps` cannot pair."""


class CannotWrite(GradtraceError):
    """A file that was asked for cannot be written."""


class BadGate(GradtraceError):
    """A threshold of `--fail-on` that cannot be read."""


class NoRepeat(GradtraceError):
    """What `--noise` names is no repeat of the baseline."""


class NoPython(GradtraceError):
    """What `--python` names is no Python that can be started."""
