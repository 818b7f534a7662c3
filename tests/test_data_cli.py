import os
import shlex
import subprocess
import sys

import pytest
from harness.drawn import list_all, make_archive, make_folder

from lab_common import checkout
from lab_utils import data
from lab_utils.data import packing, shapes
from lab_utils.data.__main__ import main
from lab_utils.data.packing import make_command

FEW = {"train": 30, "valid": 10, "test": 10}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "checkout", lambda: tmp_path / "checkout")
    monkeypatch.setattr(shapes, "COUNTS", FEW)
    monkeypatch.setenv("LAB_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


def run(capsys, *arguments):
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_prepare_draws_shapes10_and_says_how_to_get_the_real_one(root, capsys):
    code, out, _ = run(capsys, "prepare")
    assert code == 0
    assert out.startswith("shapes10: 30 train, 10 valid, 10 test images of 10 classes, drawn on the spot (no CINIC-10")
    assert "fetch cinic10 " in out and "(688 MB)" in out and "import CINIC-10.tar.gz" in out
    assert (root / "packed" / "shapes10" / "manifest.json").exists()


def test_prepare_packs_a_folder_and_asks_nothing_more(root, capsys):
    make_folder(root / "cinic10")
    assert run(capsys, "prepare")[:2] == (
        0,
        "cinic10: 40 train, 20 valid, 30 test images of 10 classes, from a folder in CINIC-10's layout\n",
    )


def test_prepare_stops_at_bad_images_and_goes_on_when_asked(root, capsys):
    make_folder(root / "cinic10")
    (root / "cinic10" / "train" / "cat" / "bad.png").write_text("no image")
    code, out, err = run(capsys, "prepare")
    assert (code, out) == (1, "")
    assert "train/cat/bad.png (cannot be decoded)" in err and "prepare --skip-bad" in err
    code, out, _ = run(capsys, "prepare", "--skip-bad")
    assert code == 0 and "1 unreadable" in out
    # The choice holds for the labs that load it later.
    assert run(capsys, "prepare")[0] == 0


def test_import_info_and_verify(root, tmp_path, capsys):
    assert run(capsys, "info")[1].splitlines()[1] == "cinic10:  not found; the labs draw shapes10 instead"
    archive = make_archive(make_folder(tmp_path / "source"), tmp_path / "CINIC-10.tar.gz")
    code, out, _ = run(capsys, "import", str(archive))
    assert code == 0 and out.startswith("cinic10: 40 train")
    code, out, _ = run(capsys, "info")
    assert "packed:   cinic10: 40 train, 20 valid, 30 test; " in out
    assert run(capsys, "verify")[:2] == (0, "[ok] cinic10: 6 arrays are what was packed\n")
    assert run(capsys, "verify", "cinic10")[0] == 0

    array = root / "packed" / "cinic10" / "valid-images.npy"
    content = bytearray(array.read_bytes())
    content[-1] ^= 1
    array.write_bytes(content)
    code, out, err = run(capsys, "verify")
    assert code == 1 and "valid-images.npy" in err and "import CINIC-10.tar.gz" in err

    make_folder(root / "my-cinic")
    assert "goes before the imported pack" in run(capsys, "import", str(archive))[1]


def test_verify_without_a_pack_is_explained(root, capsys):
    code, _, err = run(capsys, "verify", "cifar10")
    assert code == 1 and err.startswith("There is no pack of cifar10 to verify.\n  where: ")


def test_fetch_tries_every_address_and_explains(root, capsys, monkeypatch):
    monkeypatch.setattr(data.fetch_archive, "__kwdefaults__", data.fetch_archive.__kwdefaults__ | {
        "urls": ("http://127.0.0.1:9/one", "http://127.0.0.1:9/two"), "size": 10,
    })  # fmt: skip
    code, out, err = run(capsys, "fetch", "cinic10")
    assert (code, out) == (1, "")
    assert "/one: " in err and "/two: " in err and f"fix: {make_command('import FILE.tar.gz')} " in err
    assert list_all(root) == [".CINIC-10.tar.gz.lock"]


def test_fetch_downloads_nothing_where_a_whole_pack_is(root, tmp_path, capsys, monkeypatch):
    run(capsys, "import", str(make_archive(make_folder(tmp_path / "source"), tmp_path / "CINIC-10.tar.gz")))
    fetched = []

    def fetch(root):
        fetched.append(root)
        return tmp_path / "CINIC-10.tar.gz"

    monkeypatch.setattr(data, "fetch_archive", fetch)
    code, out, _ = run(capsys, "fetch", "cinic10")
    assert (code, fetched) == (0, []) and "is here already" in out and "rm -r '" in out
    os.truncate(root / "packed" / "cinic10" / "test-images.npy", 1000)
    assert run(capsys, "fetch", "cinic10")[0] == 0 and fetched == [root]
    assert run(capsys, "verify")[0] == 0


def test_the_commands_in_the_hints_run_as_they_stand(root, capsys):
    hints = [line.split("   ")[0].strip() for line in run(capsys, "prepare")[1].splitlines()[2:4]]
    assert [hint.split(" -m ")[1] for hint in hints] == [
        "lab_utils.data fetch cinic10",
        "lab_utils.data import CINIC-10.tar.gz",
    ]
    for hint in hints:
        result = subprocess.run([*shlex.split(hint)[:4], "--help"], cwd=checkout(), env={}, capture_output=True)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("executable", "command"),
    [
        ("{}/.venv/bin/python", ".venv/bin/python -m lab_utils.data info"),
        ("/opt/my python/bin/python3", "'/opt/my python/bin/python3' -m lab_utils.data info"),
        ("", "python -m lab_utils.data info"),
    ],
)
def test_a_command_names_this_python(monkeypatch, executable, command):
    monkeypatch.setattr(sys, "executable", executable.format(checkout()))
    assert make_command("info") == command


def test_an_error_is_a_message_without_a_traceback(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "lab_utils.data", "import", "absent.tar.gz"],
        env=os.environ | {"LAB_DATA": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[0] == "Cannot open the archive: No such file or directory."
    assert "Traceback" not in result.stderr and "fix: " in result.stderr


def test_importing_the_room_loads_nothing_heavy():
    heavy = "torchvision", "matplotlib", "IPython", "pandas", "PIL"
    code = f"import lab_utils.data, sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
