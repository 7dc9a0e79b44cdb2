"""The inside of the sandbox, a program of its own: makes the fences, then becomes the snippet. Run by sandbox.py with a
request on its standard input; uses the standard library alone.

Three processes: this one outlives the snippet until it is killed; the second is the init of a PID namespace, whose end
ends everything in it; the third becomes the snippet, without any rights.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

# From <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>.
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
NOBODY = 65534
UNUSED_IDS = 2_000_000_000  # user ids from here on belong to nobody; each snippet has its own, and so its own limits
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """Calls a function of the C library."""
    arguments = tuple(one.encode() if isinstance(one, str) else one for one in arguments)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def main(status: int) -> NoReturn:
    """Runs the request; `status` is the pipe on which it says how that went."""
    request = json.load(sys.stdin)
    request["user"] = UNUSED_IDS + os.getpid()
    os.set_inheritable(status, False)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        if request["isolate"]:
            _enter_namespaces()
        if os.fork() == 0:
            _be_init(request, status)
        os.close(status)
        os.wait()
    except OSError as error:
        _report(status, refused=str(error))
    while True:
        signal.pause()  # Whoever started this kills it, after what is left below it.


def _be_init(request: dict[str, Any], status: int) -> NoReturn:
    try:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if request["isolate"]:
            _enter_root(request)
        else:
            _write_snippet(request, "")
        os.chdir(request["folder"])
        snippet = os.fork()
        if snippet == 0:
            _be_snippet(request, status)
        while (ended := os.wait())[0] != snippet:
            pass
        _report(status, code=os.waitstatus_to_exitcode(ended[1]))
    except OSError as error:
        _report(status, refused=str(error))
    finally:
        os._exit(0)


def _be_snippet(request: dict[str, Any], status: int) -> NoReturn:
    try:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        if request["isolate"] and os.geteuid() == 0:
            _become_nobody(request["user"])
        for name, value in request["limits"].items():
            _, most = resource.getrlimit(number := getattr(resource, name))
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            # At the soft limit on CPU time a signal of its own says so.
            soft = max(value - 1, 0) if name == "RLIMIT_CPU" else value
            resource.setrlimit(number, (soft, value))
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        os.execve(request["command"][0], request["command"], request["environment"])  # noqa: S606
    except OSError as error:
        _report(status, refused=str(error))
    finally:
        os._exit(1)


def _enter_namespaces() -> None:
    """Leaves the network, and the processes, mounts and shared memory of others. Root needs no user namespace: it
    becomes nobody later."""
    user, group = os.geteuid(), os.getegid()
    call("unshare", NEW_NETWORK | NEW_PIDS | NEW_MOUNTS | NEW_IPC | (NEW_USER if user else 0))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _enter_root(request: dict[str, Any]) -> None:
    """Makes a root folder of the system's and Python's own files, read-only, and of an empty folder to work in."""
    root, folder = request["root"], request["folder"]
    call("mount", "none", "/", None, MS_REC | MS_PRIVATE, None)
    call("mount", "tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,mode=755")
    for path in (*SYSTEM, *DEVICES, *request["readable"]):
        _show(root, path)
    for path in (folder, "/proc"):
        os.makedirs(root + path, exist_ok=True)
    _write_snippet(request, root)
    call("mount", "tmpfs", root + folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={request['disk_bytes']},mode=777")
    with suppress(OSError):  # A container may forbid it. Python needs no /proc.
        call("mount", "proc", root + "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV, None)
    os.chdir(root)
    call("pivot_root", ".", ".")
    call("umount2", ".", DETACH)
    os.chdir("/")
    call("mount", "none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, None)


def _show(root: str, path: str) -> None:
    """Shows a file or folder under the new root, at the same path and read-only."""
    if not os.path.exists(path) or os.path.lexists(root + path):
        return
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), root + path)
        if os.path.isabs(os.readlink(path)):
            _show(root, os.readlink(path))
        return
    if os.path.isdir(path):
        os.mkdir(root + path)
    else:
        os.close(os.open(root + path, os.O_CREAT, 0o644))
    call("mount", path, root + path, None, MS_BIND | MS_REC, None)
    kept = os.statvfs(path).f_flag & 0xF  # read-only, nosuid, nodev, noexec: a user namespace cannot take them away
    call("mount", "none", root + path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept, None)


def _write_snippet(request: dict[str, Any], root: str) -> None:
    with open(root + request["snippet"], "w", encoding="utf-8") as file:
        file.write(request["code"])


def _become_nobody(user: int) -> None:
    """Gives up all rights of root. A container may have no user ids beyond 65,535."""
    os.setgroups([])
    for number in (user, NOBODY):
        with suppress(OSError):
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
            return
    raise PermissionError("root cannot become another user")


def _report(status: int, **what: Any) -> None:
    os.write(status, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
