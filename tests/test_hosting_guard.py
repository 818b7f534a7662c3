"""The guard without an engine: the networks that it gets, and the message if there can be no guard."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest
from harness.containers import MACHINE, make_setup
from harness.drawn import assert_explains

from hosting import commands, guard
from hosting.deployment import Deployment
from hosting.engine import Engine
from hosting.settings import Settings
from hosting.status import check_guard
from hosting.teams import Team
from lab_common import LabError

TEAMS = [Team("red"), Team("blue")]
NETWORKS = {
    "Docker": [
        {"Name": "labs-red", "IPAM": {"Config": [{"Subnet": "172.18.0.0/16", "Gateway": "172.18.0.1"}]}},
        {"Name": "labs-blue", "IPAM": {"Config": [{"Subnet": "172.19.0.0/16"}, {"Subnet": "fd01::/64"}]}},
    ],
    "Podman": [
        {"name": "labs-red", "subnets": [{"subnet": "172.18.0.0/16", "gateway": "172.18.0.1"}]},
        {"name": "labs-blue", "subnets": [{"subnet": "172.19.0.0/16"}, {"subnet": "fd01::/64"}]},
    ],
}


@pytest.fixture
def deployment(tmp_path):
    """A class of two teams with an engine that answers what is in files, and notes what it was asked."""
    program = tmp_path / "engine"
    program.write_text(f"""#!/bin/sh
echo "$*" >> {tmp_path}/asked
case "$*" in
  "network inspect "*) cat {tmp_path}/network-$3;;
  *) cat {tmp_path}/$1 2> /dev/null; exit $(cat {tmp_path}/$1-status 2> /dev/null || echo 0);;
esac
""")
    for told in NETWORKS["Docker"]:
        (tmp_path / f"network-{told['Name']}").write_text(json.dumps([told]))
    program.chmod(0o755)
    settings = Settings(guarded=True)
    shares = make_setup(TEAMS).shares
    return Deployment(tmp_path, settings, TEAMS, {}, Engine(str(program), (), tmp_path), MACHINE, shares)


@pytest.mark.parametrize("said", NETWORKS.values(), ids=NETWORKS)
def test_the_guard_is_told_the_teams_networks(deployment, tmp_path, said):
    for told in said:
        (tmp_path / f"network-{told.get('Name') or told['name']}").write_text(json.dumps([told], indent=2))
    (tmp_path / "logs").write_text("guarded\n")
    guard.start_guard(deployment.engine, deployment.settings, TEAMS, image_id="one")
    asked = (tmp_path / "asked").read_text().splitlines()
    (begun,) = (line for line in asked if line.startswith("run "))
    assert begun.endswith(f"{guard.PROGRAM} 172.18.0.0/16 172.19.0.0/16 fd01::/64")
    assert "--network=host" in begun and "--cap-drop=ALL --cap-add=NET_ADMIN" in begun and "--restart=always" in begun
    label = begun.partition("labs.guard=")[2].split()[0]
    (tmp_path / "inspect").write_text(f"true {label}\n")
    guard.start_guard(deployment.engine, deployment.settings, TEAMS, image_id="one")
    assert (tmp_path / "asked").read_text().count("\nrun ") == 1, "one that runs for these networks stays"
    guard.start_guard(deployment.engine, deployment.settings, TEAMS, image_id="another")
    assert (tmp_path / "asked").read_text().count("\nrun ") == 2


def test_a_guard_that_another_replaces_takes_no_rule_of_a_team_that_runs_with_it(deployment, tmp_path):
    (tmp_path / "logs").write_text("guarded\n")
    (tmp_path / "inspect").write_text("true 0123456789abcdef 172.18.0.0/16 172.20.0.0/16\n")
    guard.start_guard(deployment.engine, deployment.settings, TEAMS, image_id="one")
    asked = (tmp_path / "asked").read_text().splitlines()
    ended = [line for line in asked if line.split()[0] in ("stop", "kill", "rm")]
    assert ended == ["kill -s KILL labs-guard", "rm -f labs-guard"], "a guard that is told to end deletes all its rules"
    (begun,) = (line for line in asked if line.startswith("run "))
    assert begun.endswith(" 172.18.0.0/16 172.19.0.0/16 fd01::/64 gone 172.20.0.0/16")


def test_a_network_without_an_address_is_not_left_unguarded(deployment, tmp_path):
    (tmp_path / "network-labs-blue").write_text("[]")
    with pytest.raises(LabError) as caught:
        guard.start_guard(deployment.engine, deployment.settings, TEAMS, image_id="one")
    assert_explains(caught.value, "labs-blue", "metadata")
    assert "run" not in (tmp_path / "asked").read_text().split()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("status", "can"), [(0, True), (guard.REFUSED, False), (125, None), (1, None)])
def test_an_accident_of_the_trial_ends_no_guard(deployment, tmp_path, status, can, before):
    """As when an engine is out of memory, or too slow: engines end with 125 if they start nothing."""
    (tmp_path / "run-status").write_text(f"{status}")
    (tmp_path / "run").write_text("no space left on device")
    settings = replace(deployment.settings, guarded=before)
    if can is None and before:
        with pytest.raises(LabError) as caught:
            guard.can_guard(deployment.engine, settings)
        assert_explains(caught.value, "no space left", "hosting up")
    else:
        assert guard.can_guard(deployment.engine, settings) is bool(can)
    guard.can_guard(deployment.engine, replace(settings, guarded=False))
    names = {line.split("--name=")[1].split()[0] for line in (tmp_path / "asked").read_text().splitlines()}
    assert len(names) == 2 and not names & {"labs-guard"}, "a name of its own: none of before is in the way"


def test_a_guard_that_does_not_start_is_told(deployment, tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "START_SECONDS", 0.5)
    (tmp_path / "logs").write_text("RTNETLINK answers: Operation not permitted\n")
    with pytest.raises(LabError) as caught:
        guard.start_guard(deployment.engine, deployment.settings, TEAMS, image_id="one")
    assert_explains(caught.value, "Operation not permitted", "python3 -m hosting logs labs-guard")


def test_where_there_can_be_no_guard_the_cloud_s_own_setting_is_named(deployment, tmp_path):
    assert any("kept from the teams" in line for line in commands.describe_bounds(deployment))
    without = replace(deployment, settings=replace(deployment.settings, guarded=False))
    (said,) = (line for line in commands.describe_bounds(without) if "metadata" in line)
    assert "NOT kept" in said and "--http-put-response-hop-limit 1" in said
    assert check_guard(without) == []
    (said,) = check_guard(deployment)
    assert "does NOT run" in said and "fix: python3 -m hosting up" in said
    (tmp_path / "inspect").write_text("true\n")
    assert check_guard(deployment) == []


def test_the_guard_s_script_is_read_by_bash_and_refuses_what_it_may_not(root):
    script = root / "hosting" / "image" / "guard.sh"
    assert not subprocess.run(["bash", "-n", script]).returncode
    # Without the right to change the routing, as in an engine without root.
    drop = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", "bash", script, "try"]
    assert subprocess.run(drop, capture_output=True).returncode == guard.REFUSED
