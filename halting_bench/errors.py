"""The one exception that means "the user can mend this": it becomes one line on stderr and exit code 2."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the user's. The message says what is wrong, the offending value, and what to type next."""


class PolicyFailed(Exception):
    """A user's policy raised while it was run. The message is its own error: a record keeps it, and the sweep goes on."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Builds the error for a misspelt name: suggests the nearest known one and lists the rest."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{nearest[0]}'? " if nearest else ""
    return UserError(f"unknown {kind} '{name}': {hint}known: {', '.join(known) or 'none'}")
