"""Files are whole or not there, on a disk that fills up too."""

import errno
import os

import pytest

from disk import room_for
from ebbtide.errors import UserError
from ebbtide.system.files import append_atomic, user_error_on_full_disk, write_atomic


def test_what_has_no_room_is_not_begun(tmp_path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old\n")
    with room_for(1000):
        with pytest.raises(OSError, match="File too large"):
            append_atomic(file, b"new" * 1000)  # of which the disk takes 996 bytes
        with pytest.raises(OSError, match="File too large"):
            write_atomic(file, [b"new" * 1000])
    assert file.read_bytes() == b"old\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    append_atomic(file, b"new\n")
    assert file.read_bytes() == b"old\nnew\n"


def test_what_was_removed_is_not_begun_again(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        append_atomic(tmp_path / "file", b"new")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_the_users_to_mend_and_other_errors_are_not() -> None:
    with (
        pytest.raises(UserError, match="/some/file cannot be written: No space left on device"),
        user_error_on_full_disk(),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "/some/file")
    with pytest.raises(IsADirectoryError), user_error_on_full_disk():
        raise IsADirectoryError


def test_only_ordinary_files_are_replaced(tmp_path) -> None:
    """As root, `--out /dev/null` would replace that for the whole machine."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not an ordinary file"):
        write_atomic(tmp_path / "pipe", [b"new"])
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to("file")
    write_atomic(tmp_path / "link", [b"new"])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"
