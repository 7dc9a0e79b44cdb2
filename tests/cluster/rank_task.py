"""Tasks that end one rank as a run begins."""

import os
import signal

from ebbtide.errors import UserError
from ebbtide.tasks.builtin import Digits
from ebbtide.tasks.task import Problems


class Ends(Digits):
    def __init__(self, how: str) -> None:
        super().__init__(size=8, held_out=0, seed=0, reverse=False, digits=3)
        self.how = how

    def problems(self) -> Problems:
        if os.environ.get("RANK") == "1":
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise UserError("rank 1 wants other problems") if self.how == "mendable" else RuntimeError("rank 1 has had enough")
        return super().problems()
