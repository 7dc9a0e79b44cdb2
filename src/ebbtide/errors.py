"""The one exception for what a user can mend: a bad key, a missing file, a prompt that is too long."""


class UserError(Exception):
    """Shown as one paragraph, without a traceback; the process exits with code 2. Its text says what to change."""
