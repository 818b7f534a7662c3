import os
import subprocess
import sys

import pytest
from harness.drawn import make_archive, make_folder

from lab_common import LabError
from lab_utils import data
from lab_utils.data import packing, shapes
from lab_utils.data.__main__ import main

FEW = {"train": 30, "valid": 10, "test": 10}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "checkout", lambda: tmp_path / "checkout")
    monkeypatch.setattr(shapes, "COUNTS", FEW)
    monkeypatch.setenv("LAB_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


def test_prepare_draws_shapes10_and_says_how_to_get_the_real_one(root, capsys):
    assert main(["prepare"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("shapes10: 30 train, 10 valid, 10 test images of 10 classes, drawn on the spot (no CINIC-10")
    assert f"{sys.executable} -m lab_utils.data fetch cinic10 " in out
    assert "(688 MB)" in out and "import CINIC-10.tar.gz" in out
    assert (root / "packed" / "shapes10" / "manifest.json").exists()


def test_prepare_packs_a_folder_and_goes_on_without_bad_images_when_asked(root, capsys):
    make_folder(root / "cinic10")
    (root / "cinic10" / "train" / "cat" / "bad.png").write_text("no image")
    with pytest.raises(LabError, match="prepare --skip-bad"):
        main(["prepare"])
    assert main(["prepare", "--skip-bad"]) == 0
    assert main(["prepare"]) == 0  # the choice holds for the labs that load it later
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and first.endswith("unreadable: 1 image (such as train/cat/bad.png (cannot be decoded))")


def test_fetch_downloads_nothing_if_a_whole_pack_is_there(root, tmp_path, capsys, monkeypatch):
    archive = make_archive(make_folder(tmp_path / "source"), tmp_path / "CINIC-10.tar.gz")
    assert main(["import", str(archive)]) == 0
    assert capsys.readouterr().out.startswith("cinic10: 40 train")
    fetched = []
    monkeypatch.setattr(data, "fetch_archive", lambda root: fetched.append(root) or archive)
    assert main(["fetch", "cinic10"]) == 0 and fetched == []
    assert "is here already" in capsys.readouterr().out
    os.truncate(root / "packed" / "cinic10" / "test-images.npy", 1000)
    assert main(["fetch", "cinic10"]) == 0 and fetched == [root]


def test_beside_a_folder_of_cinic10_nothing_is_fetched_or_imported(root, tmp_path, capsys, monkeypatch):
    """The folder would be read before the new pack."""
    archive = make_archive(make_folder(tmp_path / "source"), tmp_path / "CINIC-10.tar.gz")
    make_folder(root / "cinic10")
    monkeypatch.setattr(data, "fetch_archive", lambda root: pytest.fail("688 MB for nothing"))
    assert main(["fetch", "cinic10"]) == 0
    assert "is here already, in the folder" in capsys.readouterr().out
    with pytest.raises(LabError, match="There is a folder of CINIC-10 already"):
        main(["import", str(archive)])


def test_an_error_is_a_message_without_a_traceback_and_nothing_heavy_is_loaded(tmp_path):
    code = "import sys; from lab_common.commandline import run_command; from lab_utils.data.__main__ import main; "
    code += "run_command(lambda: main(['import', 'absent.tar.gz'])); print(set(sys.modules) & set(sys.argv))"
    command = [sys.executable, "-c", code, "torchvision", "matplotlib", "IPython", "pandas", "PIL"]
    result = subprocess.run(command, env=os.environ | {"LAB_DATA": str(tmp_path)}, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "set()\n")
    assert result.stderr.splitlines()[0] == "Cannot open the archive: No such file or directory."
    assert "Traceback" not in result.stderr and "fix: " in result.stderr
