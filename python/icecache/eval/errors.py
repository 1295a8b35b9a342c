"""What went wrong for a reason the user can act on."""

from __future__ import annotations


class EvalError(Exception):
    """Printed by the command line as one line, without a traceback."""
