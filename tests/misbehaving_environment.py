"""An environment that goes wrong in every way that its seed names."""

import os
import socket
import subprocess
import time

NUMBER = 3
FAULTS = ("none", "hang", "crash", "flood", "garbage", "raise", "memory", "nan", "fork")


class Nothing:
    """Neither steps nor tools."""


class Unruly:
    """Says the length of what it was told, twice, and misbehaves in its second turn."""

    def __init__(self, faults: bool = False, first: int = 0) -> None:
        self._faults, self._first = faults, first
        self._episodes = self._turns = 0

    def reset(self, seed: int) -> str:
        self._episodes += 1
        number = seed - self._first
        self._fault = FAULTS[number] if self._faults and 0 <= number < len(FAULTS) else "none"
        return f"{seed % 7}="

    def step(self, text: str):
        self._turns += 1
        done = self._turns == 2
        if self._turns == 2 and self._fault != "none":
            found = getattr(self, f"_{self._fault}")()
            if found is not None:
                return found
        return f"{len(text)}=", float(len(text) % 3), done

    def _hang(self):
        time.sleep(1000)

    def _crash(self):
        os._exit(7)

    def _flood(self):
        return "x" * 100_000_000, 0.0, True

    def _garbage(self):
        for number in range(3, 64):  # every socket that it has
            try:
                socket.socket(fileno=os.dup(number)).sendall(b"\x00nonsense\n" * 3)
            except OSError:
                continue

    def _raise(self):
        raise RuntimeError("no more")

    def _memory(self):
        return "x" * len(bytearray(2_000_000_000))

    def _nan(self):
        return "", float("nan"), True

    def _fork(self):
        os.fork()  # both return: only one of them may answer

    def get_metrics(self):
        return {"episodes": self._episodes}


class Leaves:
    """Starts a process with a session of its own, notes its number in a file, and dies."""

    def __init__(self, note: str) -> None:
        self._note = note

    def reset(self) -> str:
        return "go"

    def step(self, text: str):
        left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open(self._note, "w") as file:
            file.write(str(left.pid))
        os._exit(1)


class Unclosable:
    def reset(self) -> str:
        return "go"

    def step(self, text: str):
        return "on", 0.5, text == "y"

    def close(self) -> None:
        raise ValueError("it does not close")
