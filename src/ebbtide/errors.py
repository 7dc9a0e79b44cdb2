"""The one exception for what a user can mend: a bad key, a missing file, a prompt that is too long; and the one for a run that a user stopped."""


class UserError(Exception):
    """Shown as one paragraph, without a traceback; the process exits with code 2. Its text says what to change."""


class Stopped(Exception):  # noqa: N818 (nothing went wrong)
    """By Ctrl-C or SIGTERM, after what was to be said and saved."""
