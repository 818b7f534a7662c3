"""How a machine is divided among the teams, and the limits that the engine gets."""

from __future__ import annotations

import json

import pytest
from harness.containers import MACHINE, make_deployment

from hosting.compose import make_compose
from hosting.engine import CONTROLLERS, Engine, Machine
from hosting.limits import SHARES, describe_limits, divide, keep_shares, limit
from hosting.settings import Settings
from hosting.teams import Team

GIB = 1 << 30


def make_teams(count):
    return [Team(f"t{number}") for number in range(count)]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("count", [1, 3, 30])
@pytest.mark.parametrize("machine", [Machine(4 * GIB, (0,)), Machine(24 * GIB, (2, 3)), MACHINE])
def test_all_teams_together_have_no_more_than_the_machine(machine, count, nodes):
    shares = divide(machine, make_teams(count), Settings(nodes=nodes))
    everything = [share for team in shares.values() for share in team]
    assert len(shares) == count and len(everything) == count * nodes
    assert sum(share.memory for share in everything) <= machine.memory * 0.9, "something is left for the machine"
    assert sum(share.memory for share in everything) > machine.memory * 0.4, "and most of it is given out"
    assert len({team for team in shares.values()}) == (count if everything[0].cpuset else 1), "equal shares"
    for share in everything:
        assert 64 << 20 <= share.shm <= max(64 << 20, share.memory // 2) and share.shm <= 16 * GIB
        assert share.processes == 4096 and 0 < share.cpus <= len(machine.cpus)
    if count <= len(machine.cpus):
        own = [set(team[0].cpuset.split(",")) for team in shares.values()]
        assert sum(map(len, own)) == len(set.union(*own)) <= len(machine.cpus), "no CPU has two teams"
        assert set.union(*own) <= set(map(str, machine.cpus))
        assert all(len({share.cpuset for share in team}) == 1 for team in shares.values()), "both nodes have the same"
    else:
        assert sum(team[0].cpus for team in shares.values()) <= len(machine.cpus) + 0.01 * count


def test_every_container_is_told_its_limits(tmp_path):
    teams = make_teams(2)
    deployment = make_deployment(tmp_path, teams)
    services = make_compose(deployment, "")["services"]
    for team in teams:
        for number in (0, 1):
            made, share = services[f"{team.name}-node{number}"], deployment.shares[team.name][number]
            assert made["mem_limit"] == made["memswap_limit"] == f"{share.memory}b" and share.memory > 8 * GIB
            assert made["shm_size"] == f"{share.shm}b" and made["pids_limit"] == 4096
            assert made["cpuset"] in ("0,1,2,3", "4,5,6,7") and "OMP_NUM_THREADS" not in made["environment"]
            assert made["environment"]["LAB_NODE_THREADS"] == "2", "half of the four CPUs that both nodes have"
            assert made["logging"] == {"driver": "json-file", "options": {"max-size": "10m"}}
            assert made["environment"]["MEM_LIMIT"] == str(share.memory)
    front = services["front"]
    assert front["mem_limit"] and front["pids_limit"] and front["logging"]["options"]["max-size"]


def test_what_is_told_goes_before_what_is_decided(tmp_path):
    teams = make_teams(2)
    told = Settings(memory=6 * GIB, cpus=1.5, shm=GIB, nodes=1)
    (share,) = divide(MACHINE, teams, told)["t0"]
    assert (share.memory, share.shm, share.cpus, share.cpuset) == (6 * GIB, GIB, 1.5, "")
    made = make_compose(make_deployment(tmp_path, teams, told), "")["services"]["t0-node0"]
    assert made["cpus"] == 1.5 and "cpuset" not in made
    assert made["environment"]["OMP_NUM_THREADS"] == "1" and "LAB_NODE_THREADS" not in made["environment"]
    assert [nodes[0].cpuset for nodes in divide(MACHINE, teams, Settings(cpus=3)).values()] == ["0,1,2", "3,4,5"]
    assert [nodes[0].cpuset for nodes in divide(MACHINE, teams, Settings(cpus=8)).values()] == ["", ""]
    much = divide(MACHINE, teams, Settings(memory=40 * GIB))
    assert any("more than the machine's 64.0 GB" in line for line in describe_limits(much, MACHINE))


def test_a_team_that_comes_later_changes_no_other_s_limits(tmp_path):
    two, three = make_teams(2), make_teams(3)
    first = keep_shares(tmp_path, MACHINE, two, Settings(), save=True)
    assert keep_shares(tmp_path, MACHINE, three, Settings(), save=False) | first == keep_shares(
        tmp_path, MACHINE, three, Settings(), save=True
    )
    later = keep_shares(tmp_path, MACHINE, three, Settings(), save=False)
    assert {name: later[name] for name in first} == first
    assert sum(share.memory for share in later["t2"]) < sum(share.memory for share in first["t0"])
    assert not later["t2"][0].cpuset, "all CPUs are somebody's: it shares them"
    assert any("are more than the machine's" in line for line in describe_limits(later, MACHINE))
    assert keep_shares(tmp_path, MACHINE, two, Settings(memory=4 * GIB), save=False) != first, "told otherwise"
    other = Machine(64 * GIB, (0, 1))
    assert keep_shares(tmp_path, other, two, Settings(), save=False)["t1"][0].cpuset == "1", "another machine"
    (tmp_path / SHARES).unlink()
    even = keep_shares(tmp_path, MACHINE, three, Settings(), save=True)
    assert len({nodes[0].memory for nodes in even.values()}) == 1
    assert not any("are more than" in line for line in describe_limits(even, MACHINE))


HOST = {"memTotal": 8 * GIB, "cpus": 4096}
INFOS = {
    "Docker": ({"MemTotal": 8 * GIB, "NCPU": 4096, "MemoryLimit": True, "CPUSet": False}, CONTROLLERS - {"cpuset"}),
    "Docker without root": (
        {"MemTotal": 8 * GIB, "NCPU": 4096, "CpuCfsQuota": False, "CPUSet": False, "PidsLimit": True},
        {"memory", "swap", "pids"},
    ),
    "Podman": ({"host": HOST | {"cgroupControllers": ["cpuset", "cpu", "io", "memory", "pids"]}}, CONTROLLERS),
    "Podman without root": ({"host": HOST | {"cgroupControllers": ["memory", "pids"]}}, {"memory", "swap", "pids"}),
}


@pytest.mark.parametrize("told, limits", INFOS.values(), ids=INFOS)
def test_the_engine_says_what_it_has_and_what_it_can_limit(tmp_path, told, limits):
    program = tmp_path / "engine"
    program.write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\n")
    program.chmod(0o755)
    machine = Engine(str(program), (), tmp_path).measure()
    assert machine.memory == 8 * GIB and machine.cpus == tuple(range(4096)) and machine.limits == limits
    shares = divide(machine, make_teams(2), Settings())
    made = limit(shares["t0"][0], machine)
    assert ("memswap_limit" in made) == ("swap" in limits)
    assert ("mem_limit" in made) == ("memory" in limits) and ("pids_limit" in made) == ("pids" in limits)
    assert ("cpuset" in made) == ("cpuset" in limits)
    assert ("cpus" in made) == ("cpu" in limits and "cpuset" not in limits)
    said = "\n".join(describe_limits(shares, machine))
    assert ("NOT limited, because the engine cannot here" in said) == (not limits >= {"cpu", "memory", "swap", "pids"})
    assert ("of its own" in said) == ("cpuset" in limits), "only what the engine keeps"
    assert "disk: NOT limited" in said
