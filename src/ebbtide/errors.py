"""The exception for what a user can fix (a bad key, a missing file, a prompt that is too long), and those for a run
that is stopped before its end."""


class UserError(Exception):
    """An error that is shown as one paragraph without a traceback; the exit code is 2. The text says what to change."""


class LoopStopped(KeyboardInterrupt):
    """Raised by the loop when it ends before its last step, for a signal or the deadline, once everything is saved. It
    is a KeyboardInterrupt, which a second Ctrl-C raises anywhere: both end a run in the same way."""


class RunStopped(Exception):  # noqa: N818 (nothing went wrong)
    """Raised when Ctrl-C or SIGTERM has stopped a run, after its checkpoint and its summary are written."""
