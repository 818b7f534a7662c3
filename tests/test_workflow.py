"""The dev container, whose set-up runs on other people's machines.

The workflow checks itself and the container against the schemas of GitHub and of the dev containers' specification.
"""

import json
import re
import subprocess

import pytest


@pytest.mark.parametrize("gpu", [False, True])
def test_the_container_takes_the_build_that_its_machine_can_use(root, tmp_path, gpu):
    container = json.loads((root / ".devcontainer" / "devcontainer.json").read_text())
    for name in ["make", *["nvidia-smi"] * gpu]:
        (tmp_path / name).write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / name).chmod(0o755)
    command = ["/bin/sh", "-c", container["postCreateCommand"]]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("setup TORCH=\n" if gpu else "setup TORCH=cpu\n", "")
    assert re.search(r"^setup:", (root / "Makefile").read_text(), re.MULTILINE)
