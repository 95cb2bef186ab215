"""The one exception of this package: a sentence for an operator, and an exit code."""

from __future__ import annotations

EXIT_GOOD = 0
EXIT_PROBLEM = 1
EXIT_COULD_NOT_LOOK = 2


class RailsError(Exception):
    """Something could not be looked at. The message says what, where, and how to mend it."""

    exit_code = EXIT_COULD_NOT_LOOK
