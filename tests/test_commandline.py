"""Tests that a command ended from outside explains why, and has the matching exit status."""

import os
import stat
import subprocess
import sys

import pytest

from lab_common import LabError
from lab_common.commandline import run_command
from lab_common.files import write_atomically

ENDS = {
    "a number": (lambda: 3, 3, ""),
    "nothing": (lambda: None, 0, ""),
    "an error of ours": (LabError("It failed.\x1b[2J", fix="make lab"), 1, "It failed.\ufffd[2J\n  fix: make lab\n"),
    "an interrupt": (KeyboardInterrupt(), 130, "\nInterrupted.\n"),
    "a file": (PermissionError(13, "Permission denied", "/x/y"), 1, "/x/y: Permission denied\n"),
}


@pytest.mark.parametrize("end, status, said", ENDS.values(), ids=ENDS)
def test_a_command_ends_in_words(capsys, end, status, said):
    def main():
        if isinstance(end, BaseException):
            raise end
        return end()

    assert run_command(main) == status
    assert capsys.readouterr() == ("", said)


def test_a_fault_of_ours_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


# Each where something is wrong that a learner or the machine can do; the shell says which before it.
LONG = f"/{'x' * 300}"
COMMANDS = {
    "report, too long a name": (f"{{}} -m course.report --workspace {LONG}", "File name too long"),
    "preflight, a locale without letters": (
        "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {} -m nodelaunch preflight --local 2",
        "Preflight: ",
    ),
    "hosting, a file as its folder": ("{} -m hosting --state README.md up", "README.md"),
    "a reader that goes": (
        "LAB_RUNS={tmp} {} notebooks/scripts/plan.py --compute 1 --batch 1 --size 1 --lat 0 --band 1 | head -n1",
        "Assumed",
    ),
    "no port": ("{} -m course.running abc", "LAB_PORT has to be"),
}


@pytest.mark.parametrize("command, words", COMMANDS.values(), ids=COMMANDS)
def test_no_command_ends_in_a_traceback(root, tmp_path, command, words):
    command = command.replace("{tmp}", str(tmp_path)).replace("{}", sys.executable)
    ended = subprocess.run(["bash", "-c", command], cwd=root, capture_output=True, text=True, timeout=300)
    assert words in ended.stdout + ended.stderr and "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode == (0 if "|" in command or "preflight" in command else 1)


def test_a_device_is_not_replaced_by_a_file(tmp_path):
    """For example `--output /dev/null` as root."""
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")
    with pytest.raises(OSError, match="it is a device"), write_atomically(device) as file:
        file.write(b"x")
    assert stat.S_ISCHR(device.lstat().st_mode) and [path.name for path in tmp_path.iterdir()] == ["null"]
