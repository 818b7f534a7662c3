"""The workflow and the dev container run on other people's machines; what they name exists, and bounds are set.

The workflow itself checks both against the schemas of GitHub and of the dev containers' specification.
"""

import json
import re
import shlex
import subprocess
import tomllib

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from course.check import LABS


@pytest.fixture(scope="module")
def path(root):
    return root / ".github" / "workflows" / "ci.yml"


@pytest.fixture(scope="module")
def workflow(path):
    return yaml.safe_load(path.read_text())


@pytest.fixture(scope="module")
def container(root):
    return json.loads((root / ".devcontainer" / "devcontainer.json").read_text())


def list_steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_its_targets_variables_and_notebooks_exist(workflow, root):
    makefile = (root / "Makefile").read_text()
    commands = [shlex.split(step["run"]) for step in list_steps(workflow) if step.get("run", "").startswith("make ")]
    assert [command[1] for command in commands] == ["lint", "test", "test"]
    for _, target, *settings in commands:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
        assert all(f"$({setting.partition('=')[0]})" in makefile for setting in settings)
    chosen = re.findall(r"\S+\.ipynb", " ".join(commands[2]))
    assert chosen == sorted(f"notebooks/{one.name}" for one in (root / "notebooks").glob("0[0-5]_*.ipynb"))
    assert len(chosen) == 6 <= len(LABS)


def test_its_python_and_the_container_s_are_ours(workflow, container, root):
    ours = SpecifierSet(tomllib.loads((root / "pyproject.toml").read_text())["project"]["requires-python"])
    pythons = {step["with"]["python-version"] for step in list_steps(workflow) if "setup-python" in str(step)}
    (tag,) = re.findall(r"^mcr\.microsoft\.com/devcontainers/python:(3\.\d+)-bookworm$", container["image"])
    assert all(f"{python}.0" in ours for python in {*pythons, tag})


@pytest.mark.parametrize("gpu", [False, True])
def test_the_container_takes_the_build_that_its_machine_can_use(container, root, tmp_path, gpu):
    for name in ["make", *["nvidia-smi"] * gpu]:
        (tmp_path / name).write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / name).chmod(0o755)
    command = ["/bin/sh", "-c", container["postCreateCommand"]]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("setup TORCH=\n" if gpu else "setup TORCH=cpu\n", "")
    assert re.search(r"^setup:", (root / "Makefile").read_text(), re.MULTILINE)
