"""Checks of files that only run with GPUs and Docker, by Docker's own Compose."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from harness.containers import find_docker_compose, make_deployment

from hosting import hub
from hosting.compose import write_files
from hosting.settings import Settings
from hosting.teams import Team

pytestmark = pytest.mark.hosting
TEAMS = [Team("red", ("0", "1")), Team("blue-2")]


@pytest.fixture(scope="module")
def compose(tmp_path_factory):
    """Returns how Docker's own Compose reads files; this needs no engine."""
    if not shutil.which("docker") and (os.geteuid() or not shutil.which("apt-get")):
        pytest.skip("NOT TESTED HERE: docker compose is not installed, and cannot be fetched")
    command = find_docker_compose(tmp_path_factory.mktemp("compose"))

    def run(files, *arguments):
        given = [part for file in files for part in ("-f", file)]
        env = {"PATH": os.environ["PATH"], "HOME": str(files[0].parent)}
        ended = subprocess.run([*command, *given, "config", *arguments], env=env, capture_output=True, text=True)
        return ended.returncode, ended.stdout + ended.stderr

    return run


def test_docker_s_compose_takes_the_file_and_the_limits(compose, tmp_path):
    deployment = make_deployment(tmp_path, TEAMS, Settings(project="course", guarded=True))
    status, said = compose(write_files(deployment), "--format=json")
    assert status == 0, said
    made = json.loads(said)
    assert set(made["services"]) == {"front", "guard", *(f"{team.name}-node{n}" for team in TEAMS for n in (0, 1))}
    red = made["services"]["red-node0"]
    (device,) = red["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["0", "1"] and "count" not in device
    assert red["environment"]["LAB_NODES"] == "node0,node1"
    (token,) = (volume for volume in red["volumes"] if volume["target"] == "/srv/token")
    assert (token["type"], token["source"], token["read_only"]) == ("bind", str(tmp_path / "tokens/red"), True)
    share = deployment.shares["red"][0]
    assert int(red["mem_limit"]) == int(red["memswap_limit"]) == share.memory and int(red["shm_size"]) == share.shm
    assert red["pids_limit"] == share.processes and red["cpuset"] == share.cpuset == "0,1,2,3"
    assert made["services"]["guard"]["network_mode"] == "host"


def test_docker_s_compose_takes_the_hub_s_files(compose, tmp_path):
    deployment = make_deployment(tmp_path, TEAMS, Settings(nodes=1, hub=True))
    status, said = compose(hub.write_files(deployment), "--format=json")
    assert status == 0, said
    services = json.loads(said)["services"]
    assert [name for name, service in services.items() if "engine.sock" in json.dumps(service)] == ["hub"]
    assert services["hub"]["image"] == "localhost/labs-hub:latest" and services["front"]["ports"]
