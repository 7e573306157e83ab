"""The one exception for what a user can mend."""

__all__ = ["UserError"]


class UserError(ValueError):
    """A mistake in the input or the settings.

    The message says what was found, what was expected and what to type; command lines print it without a traceback.
    """
