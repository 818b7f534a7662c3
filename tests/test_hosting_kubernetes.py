"""The values for Kubernetes: the chart's schema accepts them, and they say what a team's pod needs.

The chart is not part of this repository: LAB_Z2JH names the folder that `helm pull jupyterhub
--repo https://hub.jupyter.org/helm-chart/ --untar` makes, or one with its values.yaml and its schema.
"""

import asyncio
import copy
import hashlib
import ipaddress
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml
from harness.containers import install

pytestmark = pytest.mark.hosting

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "hosting" / "kubernetes"
TEAMS = {"red": "r" * 48, "team-1": "1" * 48, "instructor": "i" * 48}
LOGINS = {
    ("red", TEAMS["red"]): "red",
    (" Red ", TEAMS["red"] + " "): "red",  # as people type and paste
    ("instructor", TEAMS["instructor"]): "instructor",
    ("red", TEAMS["team-1"]): None,
    ("red", ""): None,
    ("red", hashlib.sha256(TEAMS["red"].encode()).hexdigest()): None,  # what the Secret holds is no token
    ("green", TEAMS["red"]): None,
    ("green", ""): None,
}


def merge(below: dict, above: dict) -> dict:
    """Merges values into the chart's own as Helm does: dictionaries are merged, everything else is replaced."""
    merged = copy.deepcopy(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else copy.deepcopy(value)
    return merged


@pytest.fixture(scope="module")
def ours():
    return yaml.safe_load((FOLDER / "values.yaml").read_text())


@pytest.fixture(scope="module")
def readme():
    return (FOLDER / "README.md").read_text()


def test_the_chart_takes_the_values_also_behind_an_ingress(ours, readme, tmp_path):
    if not os.environ.get("LAB_Z2JH"):
        missing = "LAB_Z2JH does not name a folder with the chart Zero to JupyterHub"
        if os.environ.get("LAB_REQUIRE_CHART") == "1":
            pytest.fail(f"LAB_REQUIRE_CHART=1, but {missing}", pytrace=False)
        pytest.skip(f"NOT TESTED HERE: {missing}")
    chart = Path(os.environ["LAB_Z2JH"])
    (schema, *_) = (path for path in sorted(chart.glob("values.schema.*")) if path.suffix in (".yaml", ".json"))
    check = install(tmp_path / "tools", "check-jsonschema") / "check-jsonschema"
    (block,) = re.findall(r"```yaml\n(.*?)```", readme, flags=re.DOTALL)
    ingress = yaml.safe_load(block)
    assert ingress["ingress"]["tls"] and ingress["proxy"]["service"]["type"] == "ClusterIP"
    for values in (ours, {key: value for key, value in ours.items() if key != "proxy"} | ingress):
        path = tmp_path / "merged.json"
        path.write_text(json.dumps(merge(yaml.safe_load((chart / "values.yaml").read_text()), values)))
        done = subprocess.run([check, "--schemafile", schema, path], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_team_s_pod_has_gpus_shared_memory_and_a_volume_and_runs_as_the_image_s_user(ours):
    pod = ours["singleuser"]
    assert pod["storage"]["homeMountPath"] == "/home/learner/work" and pod["storage"]["capacity"] == "20Gi"
    (shm,), (mount,) = pod["storage"]["extraVolumes"], pod["storage"]["extraVolumeMounts"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"} and mount["mountPath"] == "/dev/shm"
    assert pod["memory"]["limit"] == pod["memory"]["guarantee"] == "64G"
    extra = pod["extraResource"]
    assert extra["limits"]["nvidia.com/gpu"] == extra["guarantees"]["nvidia.com/gpu"] == "2"
    (uid,) = re.findall(r"useradd .*--uid (\d+) .*learner", (ROOT / "hosting" / "Dockerfile").read_text())
    spawner = ours["hub"]["config"]["KubeSpawner"]
    assert pod["uid"] == pod["fsGid"] == spawner["gid"] == int(uid) and spawner["delete_pvc"] is False
    # Arguments of the image's own entry point, which starts any program that it is given.
    assert pod["cmd"] == ["/srv/labs/hosting/image/start.sh", "hub"] and pod["defaultUrl"] == "/lab/tree/labs"


def test_a_team_is_let_in_by_its_own_token_only(ours, tmp_path, monkeypatch):
    auth = types.ModuleType("jupyterhub.auth")
    auth.Authenticator = object
    monkeypatch.setitem(sys.modules, "jupyterhub.auth", auth)
    hashes = {name: {"sha256": hashlib.sha256(token.encode()).hexdigest()} for name, token in TEAMS.items()}
    (tmp_path / "teams.json").write_text(json.dumps(hashes))
    c = types.SimpleNamespace(JupyterHub=types.SimpleNamespace())
    exec(ours["hub"]["extraConfig"]["teams"].replace("/srv/teams", str(tmp_path)), {"c": c})
    authenticator = c.JupyterHub.authenticator_class()
    for (username, password), name in LOGINS.items():
        data = {"username": username, "password": password}
        assert asyncio.run(authenticator.authenticate(None, data)) == name, (username, password)
    config = ours["hub"]["config"]
    assert config["JupyterHub"]["authenticator_class"] == "null", "lets nobody in if the other one is missing"
    assert config["Authenticator"] == {"allow_all": True, "admin_users": ["instructor"]}


def test_the_documented_commands_make_what_the_hub_reads(readme, ours, tmp_path):
    folder = tmp_path / "class"
    folder.mkdir()
    (block,) = (text for text in re.findall(r"```sh\n(.*?)```", readme, flags=re.DOTALL) if "END" in text)
    script = re.sub(r"^   ", "", block, flags=re.MULTILINE).partition("kubectl")[0]
    script = script.replace("python3 - ", f"'{sys.executable}' - ")
    subprocess.run(
        ["bash", "-e"], input=script, text=True, check=True, cwd=folder, env=os.environ | {"PYTHONPATH": ROOT}
    )
    state = folder / "hosting" / "state"
    hashes = json.loads((state / "hashes.json").read_text())
    tokens = dict(line.split("=") for line in (state / "tokens.env").read_text().split())
    assert set(hashes) == {"red", "blue", "instructor"} and state.stat().st_mode & 0o077 == 0
    assert hashes["red"]["sha256"] == hashlib.sha256(tokens["TOKEN_RED"].encode()).hexdigest()
    (mount,) = ours["hub"]["extraVolumeMounts"]
    assert f"{mount['mountPath']}/teams.json" in ours["hub"]["extraConfig"]["teams"] and "subPath" not in mount
    assert "--from-file=teams.json=hosting/state/hashes.json" in block
    (volume,) = ours["hub"]["extraVolumes"]
    assert f"create secret generic {volume['secret']['secretName']} " in block and volume["name"] == mount["name"]


ADDRESSES = {
    "1.1.1.1": "all",
    "10.0.0.1": "nothing",
    "100.64.0.10": "names",
    "169.254.169.254": "names",
    "168.63.129.16": "nothing",
    "192.0.0.192": "nothing",
}


@pytest.mark.parametrize("address, reached", ADDRESSES.items(), ids=ADDRESSES)
def test_a_team_s_pod_reaches_the_internet_and_no_private_address(ours, address, reached):
    policy = ours["singleuser"]["networkPolicy"]
    assert policy["enabled"] and not policy["ingress"] and not any(policy["egressAllowRules"].values())
    found, address = "nothing", ipaddress.ip_address(address)
    for rule in policy["egress"]:
        for block in (to["ipBlock"] for to in rule["to"]):
            less = map(ipaddress.ip_network, block.get("except", []))
            if address in ipaddress.ip_network(block["cidr"]) and not any(address in network for network in less):
                found = "names" if {port["port"] for port in rule.get("ports", [])} == {53} else "all"
    assert found == reached
