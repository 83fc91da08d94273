"""The command `analyzer`: finds its commands, and turns errors into sentences and exit codes.

Exit codes: 0 same or nothing found, 1 different or found, 2 cannot tell. A command returns its code.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import traceback
from typing import Any, NoReturn

import click
import duckdb

from gradtrace_analyzer import commands
from gradtrace_analyzer.errors import GradtraceError

_CANNOT_TELL = 2
_INTERRUPTED = 130  # as shells report SIGINT, and SIGPIPE below
_PIPE_CLOSED = 141
_INTERRUPTIONS = ("Query interrupted", "")  # click.Abort is a RuntimeError that says nothing


class Analyzer(click.Group):
    """Commands are the modules of the package `commands`, imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, without importing anything."""
        return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The object of the module's own name, None where there is no such module."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{commands.__name__}.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """The command's result, its answer all written."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # The reader has seen enough (`| head`). What is still buffered must not fail at exit,
            # and click would leave with 1, which says different.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(_PIPE_CLOSED)

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Run, and leave with the exit code. Bugs of ours keep their traceback."""
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except GradtraceError as error:
            click.echo(f"analyzer: {error}", err=True)
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt, duckdb.InterruptException, RuntimeError) as error:
            # DuckDB takes the signal of a Ctrl-C for itself, and says so by its message alone.
            if isinstance(error, RuntimeError) and str(error) not in _INTERRUPTIONS:
                raise
            click.echo("analyzer: interrupted", err=True)
            sys.exit(_INTERRUPTED)
        except (duckdb.Error, UnicodeDecodeError) as error:
            if not is_of_damage(error):
                raise
            said = str(error).splitlines()[0]
            click.echo(f"analyzer: the recording could not be read: {said}", err=True)
            sys.exit(_CANNOT_TELL)
        except OSError as error:
            # The commands name what they know of: this is a file that went, or changed hands, while it was read.
            if error.filename is None:
                raise
            reason = error.strerror or type(error).__name__
            click.echo(f"analyzer: {error.filename} cannot be read or written: {reason}", err=True)
            sys.exit(_CANNOT_TELL)
        except MemoryError:
            click.echo("analyzer: there is not enough memory for this question", err=True)
            sys.exit(_CANNOT_TELL)
        except click.ClickException as error:
            error.show()
            sys.exit(_CANNOT_TELL)
        sys.exit(code if isinstance(code, int) else 0)


def is_of_damage(error: Exception) -> bool:
    """Whether DuckDB met a part whose ends are whole but whose middle is not. It names the part, unless its own
    message then holds bytes that are no text."""
    of_a_file = (
        duckdb.IOException,
        duckdb.InvalidInputException,
        duckdb.SerializationException,
        duckdb.ConversionException,
        duckdb.OutOfMemoryException,  # for a page that says it is huge
    )
    if isinstance(error, UnicodeDecodeError):
        return True
    return isinstance(error, of_a_file) or type(error) is duckdb.Error


@click.group(cls=Analyzer, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gradtrace", prog_name="analyzer")
def analyzer() -> None:
    """Finds where two recorded training runs part, and answers questions about them.

    Answers go to stdout, all else to stderr. Exit status: 0 same, 1 different, 2 cannot tell.
    `analyzer COMMAND -h` shows examples.
    """


def main() -> NoReturn:
    """The console script. A bug of ours is 2, cannot tell: Python's own 1 would say different."""
    try:
        analyzer()
    except Exception:
        traceback.print_exc()
    sys.exit(_CANNOT_TELL)


if __name__ == "__main__":
    main()
