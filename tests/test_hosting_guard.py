"""The guard without an engine: what `up` finds out, and the message if there can be no guard."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
from harness.containers import make_deployment

from hosting.engine import Engine
from hosting.guard import can_guard, describe_guard
from hosting.settings import Settings
from hosting.teams import Team


@pytest.fixture
def deployment(tmp_path):
    """A class with an engine that answers what is in ``said`` with the status in ``status``."""
    program = tmp_path / "engine"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/said\nexit $(cat {tmp_path}/status)\n")
    program.chmod(0o755)
    (tmp_path / "said").touch()
    made = make_deployment(tmp_path, [Team("red")], Settings(guarded=True))
    return replace(made, engine=Engine(str(program), (), tmp_path))


@pytest.mark.parametrize(("status", "can"), [(0, True), (1, False), (125, False)])
def test_a_trial_says_whether_there_can_be_a_guard(deployment, tmp_path, status, can):
    (tmp_path / "status").write_text(f"{status}")
    assert can_guard(deployment.engine, deployment.settings) is can


def test_where_there_can_be_no_guard_the_cloud_s_own_setting_is_named(deployment, tmp_path):
    (tmp_path / "status").write_text("0")
    said = describe_guard(deployment.engine, replace(deployment.settings, guarded=False))
    assert "NOT kept" in said and "--http-put-response-hop-limit 1" in said
    said = describe_guard(deployment.engine, deployment.settings)
    assert "does NOT run" in said and "fix: python3 -m hosting up" in said
    (tmp_path / "said").write_text("true\n")
    assert "kept from the teams" in describe_guard(deployment.engine, deployment.settings)


def test_the_guard_s_script_refuses_what_it_may_not(root):
    script = root / "hosting" / "image" / "guard.sh"
    # Without the right to change the routing, as in an engine without root.
    drop = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", "bash", script]
    for mode in (["try"], []):
        ended = subprocess.run([*drop, *mode], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 1 and "Operation not permitted" in ended.stderr
