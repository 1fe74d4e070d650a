"""How a command ends: a user's mistake or a signal is one line and an exit status."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

from hydra.errors import HydraException, InstantiationException
from omegaconf.errors import OmegaConfBaseException

from bmc_torchrl.errors import ResultsError, SettingsError
from bmc_torchrl.signals import Interrupted, StopSignals

__all__ = ["ends_in_a_line"]

MISTAKE = 2
FAILURE = 1

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def ends_in_a_line(
    command: str,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Let a function end as a command does.

    Exit status: 2 with a line that names the mistake, for settings and files that cannot be used;
    1 with a line for a disk or file system that fails; 130 or 143 after SIGINT or SIGTERM. Anything
    else is a fault of this package, whose traceback is shown.

    Args:
        command: What the line begins with, such as ``"bmc train"``.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def ending(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
            try:
                with StopSignals():
                    return function(*args, **options)
            except (SettingsError, ResultsError, HydraException, OmegaConfBaseException) as error:
                _end(command, in_a_line(error), MISTAKE)
            except OSError as error:
                _end(command, in_a_line(error), FAILURE)
            except Interrupted as stop:
                _end(command, str(stop), stop.exit_status)

        return ending

    return decorate


def in_a_line(error: BaseException) -> str:
    r"""What an error says, without the places in Hydra's and OmegaConf's own structures.

    >>> in_a_line(SettingsError("runs must be\n  positive."))
    'runs must be positive.'
    """
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error).partition("\n    full_key")[0].partition("\nConfig search path")[0]
    return " ".join(text.split()) or type(error).__name__


def _end(command: str, line: str, status: int) -> NoReturn:
    print(f"{command}: {line}", file=sys.stderr, flush=True)
    raise SystemExit(status)
