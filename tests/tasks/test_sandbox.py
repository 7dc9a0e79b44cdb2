"""The sandbox against code that misbehaves: it costs its own call, and nothing outside notices."""

import json
import os
import socket
import sys

import pytest

from ebbtide.errors import UserError
from ebbtide.tasks import sandbox
from ebbtide.tasks.sandbox import Limits, python_tool, run_python
from ebbtide.tasks.tool_calls import ToolCall
from ebbtide.tasks.tool_functions import call, schema
from patience import PATIENCE


def why_not_isolated() -> str:
    try:
        run_python("", limits=Limits(seconds=PATIENCE))
    except UserError as error:
        return str(error)
    return ""


WHY_NOT = why_not_isolated()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
in_both = pytest.mark.parametrize("isolation", [pytest.param("namespaces", marks=needs_namespaces), "none"])


def run(code: str, isolation="namespaces", **limits):
    return run_python(code, isolation, Limits(**{"seconds": PATIENCE, **limits}))


@in_both
def test_output_and_how_it_ended_come_back(isolation) -> None:
    ran = run("import sys; print('é'); print('e', file=sys.stderr)", isolation)
    assert (ran.stdout, ran.stderr, ran.ended, ran.why) == ("é\n", "e\n", "finished", "")
    ran = run("1 / 0", isolation)
    assert ran.ended == "failed"
    assert ran.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert ran.why == "The code ended with exit code 1."
    ran = run("import os; os.abort()", isolation)
    assert (ran.ended, ran.why) == ("killed", "The code was killed by the signal SIGABRT.")


@in_both
def test_an_infinite_loop_ends_at_the_limits(isolation) -> None:
    ran = run("while True: pass", isolation, cpu_seconds=1)
    assert (ran.ended, ran.why) == ("killed", "The code was stopped after 1 seconds of CPU time.")
    ran = run("print('a', flush=True)\nimport time\nwhile True: time.sleep(1)", isolation, seconds=1.5)
    assert (ran.stdout, ran.ended) == ("a\n", "timeout")
    assert ran.why == "The code was stopped after 1.5 seconds."


@in_both
def test_processes_that_it_leaves_behind_are_killed(isolation, tmp_path) -> None:
    """A process with a session of its own holds the output open: a reader that waits for its end would wait for it."""
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True: time.sleep(60)\nprint('done')"
    ran = run(code, isolation)
    assert (ran.stdout, ran.ended) == ("done\n", "finished")


@in_both
def test_a_memory_hog_gets_a_memory_error(isolation) -> None:
    ran = run("x = bytearray(2 << 30); print('had it')", isolation, memory_mib=512)
    assert (ran.stdout, ran.ended) == ("", "failed")
    assert "MemoryError" in ran.stderr


@in_both
def test_a_hundred_megabytes_of_output_are_cut(isolation) -> None:
    ran = run("import os\nfor _ in range(100): os.write(1, b'a' * 1000000)\nprint('end')", isolation, output_bytes=1000)
    assert ran.ended == "finished"
    assert ran.stdout.startswith("aaa")
    assert ran.stdout.endswith("aaaend\n")
    assert f"\n[{100_000_004 - 1000} bytes left out]\n" in ran.stdout
    assert len(ran.stdout) < 1100


@in_both
def test_a_file_has_a_limited_size(isolation) -> None:
    code = (
        "open('f', 'wb').write(b'a' * (1 << 20))\nprint('first')\nopen('g', 'wb').write(b'a' * (3 << 20))\nprint('no')"
    )
    ran = run(code, isolation, disk_mib=2)
    assert (ran.stdout, ran.ended) == ("first\n", "failed")


@in_both
def test_the_environment_has_no_secrets(isolation, monkeypatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "xyzzy")
    code = "import os\nprint(os.environ)\nprint(open('/proc/self/environ').read())\nprint(os.listdir('.'))"
    ran = run(code, isolation)
    assert ran.ended == "finished"
    assert "xyzzy" not in ran.stdout
    assert ran.stdout.endswith("[]\n")


@needs_namespaces
def test_nor_has_any_other_process_that_it_sees(monkeypatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "xyzzy")
    code = (
        "import glob\nfor path in glob.glob('/proc/[0-9]*/environ'):\n    try: print(open(path).read())\n"
        "    except PermissionError: print('no')"
    )
    ran = run(code)
    assert ran.ended == "finished"
    assert "xyzzy" not in ran.stdout
    assert ran.stdout.count("\n") <= 2  # its own, and the one that waits for it


@needs_namespaces
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        assert run(code, "none").ended == "finished"  # the server is there
        ran = run(code)
    assert ran.ended == "failed"
    names = run("import socket; print([name for _, name in socket.if_nameindex()])").stdout
    assert names in ("['lo']\n", "[]\n")


@needs_namespaces
def test_nor_a_way_to_a_socket_in_the_files(tmp_path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        tmp_path.chmod(0o755)
        ran = run(f"import socket; socket.socket(socket.AF_UNIX).connect({str(tmp_path / 's')!r})")
    assert "FileNotFoundError" in ran.stderr


@needs_namespaces
def test_a_fork_bomb_hits_the_limit() -> None:
    code = (
        "import os, time\nchildren = 0\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(3600)\n"
        "        children += 1\nexcept BlockingIOError:\n    print(children < 20)"
    )
    if os.geteuid() != 0 and _kernel() < (5, 14):
        pytest.skip("before Linux 5.14 the limit counts all processes of a user")
    assert run(code, processes=20).stdout == "True\n"


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


@needs_namespaces
@pytest.mark.parametrize(
    "path", ["/f", "/usr/f", "/etc/f", "/dev/shm/f", "/proc/sys/kernel/hostname", f"{sys.base_prefix}/f"]
)
def test_nothing_is_written_outside_the_folder(path) -> None:
    ran = run(f"open('inside', 'w')\nprint('wrote')\nopen({path!r}, 'w')")
    assert (ran.stdout, ran.ended) == ("wrote\n", "failed")
    assert any(error in ran.stderr for error in ("Read-only", "PermissionError", "FileNotFoundError"))


@needs_namespaces
def test_files_of_others_are_not_there(tmp_path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "private").write_text("xyzzy")
    ran = run(f"open({str(tmp_path / 'private')!r})")
    assert "FileNotFoundError" in ran.stderr


@needs_namespaces
def test_it_cannot_take_the_fences_down() -> None:
    """It has no capability, so that it can mount nothing; and one of a namespace of its own does not help."""
    code = """
import ctypes, os
libc = ctypes.CDLL(None)
print([line for line in open('/proc/self/status') if line.startswith('CapEff')][0].split()[1])
print(libc.mount(b'none', b'/', None, 32 | 4096, None))
if libc.unshare(0x10000000 | 0x20000) == 0:
    libc.mount(b'none', b'/', None, 32 | 4096, None)
open('/usr/f', 'w')
"""
    ran = run(code)
    assert ran.stdout == "0000000000000000\n-1\n"
    assert ran.ended == "failed"


@needs_namespaces
def test_a_process_outside_cannot_be_killed() -> None:
    ran = run(f"import os\nos.kill({os.getpid()}, 9)")
    assert "ProcessLookupError" in ran.stderr


@in_both
def test_nothing_is_left_of_it(isolation, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    run("open('f', 'w').write('x')", isolation)
    assert list(tmp_path.iterdir()) == []


def test_where_the_kernel_cannot_cut_the_network_it_is_refused(monkeypatch, tmp_path) -> None:
    child = tmp_path / "child.py"
    child.write_text(sandbox.CHILD.read_text().replace('call("unshare", ', 'call("unshare", -1 | '))  # It fails.
    monkeypatch.setattr(sandbox, "CHILD", child)
    with pytest.raises(UserError, match=r"cannot cut the network here .*or write `sandbox: none`"):
        run("print(1)")
    assert run("print(1)", "none").stdout == "1\n"


@in_both
def test_it_is_a_tool(isolation) -> None:
    tool = python_tool(isolation, Limits(seconds=PATIENCE))
    assert schema(tool)["function"]["parameters"]["required"] == ["code"]
    json.dumps(schema(tool))
    assert call({"python": tool}, ToolCall("python", {"code": "print(6 * 7)"})) == "42"
    assert call({"python": tool}, ToolCall("python", {"code": "exit(3)"})) == "The code ended with exit code 3."
    assert call({"python": tool}, ToolCall("python", {"code": "print('\\ud800')"})) == "?"
