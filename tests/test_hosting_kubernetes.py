"""The values for Kubernetes: the chart's schema accepts them, and the resulting pods are what a team needs.

Offline, with the chart's own files and without a cluster. The chart is not part of this repository: LAB_Z2JH names the
folder that `helm pull jupyterhub --repo https://hub.jupyter.org/helm-chart/ --untar` makes, or one with its
values.yaml, values.schema.yaml (or .json) and files/hub/jupyterhub_config.py.
"""

import copy
import hashlib
import ipaddress
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness.containers import install

pytestmark = pytest.mark.hosting

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "hosting" / "kubernetes"
TEAMS = {"red": "r" * 48, "team-1": "1" * 48, "instructor": "i" * 48}
LOGINS = {
    ("red", TEAMS["red"]): ["red", False],
    (" Red ", TEAMS["red"] + " "): ["red", False],  # as people type and paste
    ("instructor", TEAMS["instructor"]): ["instructor", True],
    ("red", TEAMS["team-1"]): None,
    ("red", ""): None,
    ("red", hashlib.sha256(TEAMS["red"].encode()).hexdigest()): None,  # what the Secret holds is no token
    ("green", TEAMS["red"]): None,
}

# What the hub's pod does with the values: it runs the chart's own configuration file, whose module z2jh reads them out
# of a mounted Secret. Then asks the spawner for the pod, and the authenticator who is let in.
PROGRAM = """
import asyncio, json, os, sys, types
from pathlib import Path
from traitlets.config import Config
from tornado.httpclient import AsyncHTTPClient

AsyncHTTPClient.configure = lambda *arguments: None  # the chart asks for curl, which nothing here needs
given = json.load(sys.stdin)

def get_config(key, default=None):
    value = given["values"]
    for level in key.split("."):
        if not isinstance(value, dict) or level not in value:
            return default
        value = value[level]
    return value

def set_config_if_not_none(parent, name, key):
    if get_config(key) is not None:
        setattr(parent, name, get_config(key))

z2jh = types.ModuleType("z2jh")
z2jh.get_config, z2jh.set_config_if_not_none = get_config, set_config_if_not_none
z2jh.get_name, z2jh.get_name_env = lambda name: name, lambda name, suffix="": "8081"
z2jh.get_secret_value = lambda key, default="00" * 32: default
sys.modules["z2jh"] = z2jh
path, c = given["config"], Config()
# JupyterHub gives it to every configuration file; the chart's begins with it.
names = {"get_config": lambda: c, "__file__": path, "__name__": "jupyterhub_config"}
exec(compile(Path(path).read_text(), path, "exec"), names)

from jupyterhub.app import JupyterHub
from kubernetes_asyncio.client import ApiClient
from kubespawner import KubeSpawner

class User:
    id, name, url = 1, given["team"], "/user/" + given["team"] + "/"

async def answer():
    spawner, client = KubeSpawner(_mock=True, user=User(), config=c), ApiClient()
    pod = client.sanitize_for_serialization(await spawner.get_pod_manifest())
    claim = client.sanitize_for_serialization(spawner.get_pvc_manifest())
    await client.close()
    authenticator, let_in = JupyterHub(config=c).authenticator_class(config=c), []
    for username, password in given["logins"]:
        user = await authenticator.get_authenticated_user(None, {"username": username, "password": password})
        let_in.append(user and [user["name"], bool(user["admin"])])
    return {
        "pod": pod, "claim": claim, "let_in": let_in, "authenticator": type(authenticator).__name__,
        "delete_pvc": spawner.delete_pvc,
    }

Path(given["answer"]).write_text(json.dumps(asyncio.run(answer())))
"""


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


@pytest.fixture(scope="module")
def chart():
    """The chart's folder."""
    if not os.environ.get("LAB_Z2JH"):
        missing = "LAB_Z2JH does not name a folder with the chart Zero to JupyterHub"
        if os.environ.get("LAB_REQUIRE_CHART") == "1":
            pytest.fail(f"LAB_REQUIRE_CHART=1, but {missing}", pytrace=False)
        pytest.skip(f"NOT TESTED HERE: {missing}")
    return Path(os.environ["LAB_Z2JH"])


@pytest.fixture(scope="module")
def tools(chart, tmp_path_factory):
    """The folder of the checkers and of a Python with KubeSpawner."""
    wanted = ("check-jsonschema", "kubernetes-validate", "jupyterhub-kubespawner")
    return install(tmp_path_factory.mktemp("tools"), *wanted)


@pytest.fixture
def check_values(chart, tools, tmp_path):
    """Validates values, merged into the chart's own, against its schema."""
    schema = next((path for path in sorted(chart.glob("values.schema.*")) if path.suffix in (".yaml", ".json")), None)
    assert schema, f"LAB_Z2JH={chart} has no values.schema.yaml"
    defaults = yaml.safe_load((chart / "values.yaml").read_text())

    def run(values):
        path = tmp_path / "merged.json"
        path.write_text(json.dumps(merge(defaults, values)))
        command = [tools / "check-jsonschema", "--schemafile", str(schema), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def start(chart, tools, tmp_path_factory):
    """Runs the chart's configuration and the spawner on values; ``logins`` are pairs of name and token."""
    defaults = yaml.safe_load((chart / "values.yaml").read_text())

    def run(values, *, team="red", logins=(), teams=TEAMS):
        tmp_path = tmp_path_factory.mktemp("hub")
        hashes = {name: {"sha256": hashlib.sha256(token.encode()).hexdigest()} for name, token in teams.items()}
        (tmp_path / "teams.json").write_text(json.dumps(hashes))
        merged = json.loads(json.dumps(merge(defaults, values)).replace("/srv/teams/", f"{tmp_path}/"))
        given = {
            "values": merged,
            "config": str(chart / "files/hub/jupyterhub_config.py"),
            "team": team,
            "logins": list(logins),
            "answer": str(tmp_path / "answer.json"),
        }
        # The spawner wants to know a cluster, which it is never asked to reach.
        (tmp_path / "kubeconfig").write_text(
            "{current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}], users: [{name: a, user: {}}],"
            " clusters: [{name: a, cluster: {server: 'http://127.0.0.1:9'}}]}"
        )
        done = subprocess.run(
            [tools / "python", "-c", PROGRAM],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=180,
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "kubeconfig")},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / "answer.json").read_text())

    return run


@pytest.fixture(scope="module")
def answer(ours, start):
    """The configuration made from the values for team red, and the result of each login."""
    return start(ours, logins=LOGINS)


def find_container(pod):
    (container,) = pod["spec"]["containers"]
    return container


def find_mount(pod, path):
    """Returns the volume that is mounted at a path."""
    (mount,) = (mount for mount in find_container(pod)["volumeMounts"] if mount["mountPath"] == path)
    (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == mount["name"])
    return volume


def test_the_chart_takes_the_values(ours, check_values):
    check_values(ours)


def test_the_chart_takes_the_values_behind_an_ingress(ours, readme, check_values):
    (block,) = re.findall(r"```yaml\n(.*?)```", readme, flags=re.DOTALL)
    ingress = yaml.safe_load(block)
    check_values({key: value for key, value in ours.items() if key != "proxy"} | ingress)
    assert ingress["ingress"]["tls"] and ingress["proxy"]["service"]["type"] == "ClusterIP"


def test_kubernetes_takes_the_pod_and_its_claim(answer, tools, tmp_path):
    for name in ("pod", "claim"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(answer[name]))
        done = subprocess.run([tools / "kubernetes-validate", "--strict", str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_team_s_pod_has_gpus_shared_memory_and_a_volume_and_runs_as_the_image_s_user(answer, ours, start):
    pod = answer["pod"]
    container = find_container(pod)
    assert find_mount(pod, "/dev/shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    resources = container["resources"]
    assert int(resources["limits"]["memory"]) >= 2 * 16 * 1024**3
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "2"
    claims = set()
    for made in (answer, start(ours, team="team-1")):
        claims.add(find_mount(made["pod"], "/home/learner/work")["persistentVolumeClaim"]["claimName"])
        assert made["claim"]["metadata"]["name"] in claims
    assert len(claims) == 2 and answer["delete_pvc"] is False, "the user can go, the work stays"
    (uid,) = re.findall(r"useradd .*--uid (\d+) .*learner", (ROOT / "hosting" / "Dockerfile").read_text())
    mine = container["securityContext"]
    assert mine["runAsUser"] == mine["runAsGroup"] == pod["spec"]["securityContext"]["fsGroup"] == int(uid)
    assert mine["allowPrivilegeEscalation"] is False and pod["spec"]["automountServiceAccountToken"] is False
    # Arguments of the image's own entry point, which starts any program that it is given.
    assert "command" not in container
    assert container["args"] == ["/srv/labs/hosting/image/start.sh", "hub"]


def test_a_team_is_let_in_by_its_own_token_only(answer):
    assert answer["authenticator"] == "TeamAuthenticator"
    assert answer["let_in"] == list(LOGINS.values())


def test_nobody_administers_a_hub_without_an_instructor(ours, start):
    teams = {"red": TEAMS["red"]}
    logins = [("instructor", ""), ("instructor", TEAMS["instructor"]), ("red", TEAMS["red"])]
    assert start(ours, logins=logins, teams=teams)["let_in"] == [None, None, ["red", False]]


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


def test_teams_are_kept_apart_and_from_the_cluster(ours, chart):
    merged = merge(yaml.safe_load((chart / "values.yaml").read_text()), ours)
    policy = merged["singleuser"]["networkPolicy"]
    assert policy["enabled"] and not policy["ingress"] and not policy["allowedIngressPorts"]
    names = {"dnsPortsCloudMetadataServer", "dnsPortsKubeSystemNamespace", "dnsPortsPrivateIPs"}
    assert {name for name, allowed in policy["egressAllowRules"].items() if allowed} == names
    # This label opens a team's pod to others; of the pods, the chart gives it to the proxy.
    assert "hub.jupyter.org/network-access-singleuser" not in merged["singleuser"]["extraLabels"]


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
    found, address = "nothing", ipaddress.ip_address(address)
    for rule in ours["singleuser"]["networkPolicy"]["egress"]:
        for block in (to["ipBlock"] for to in rule["to"]):
            less = map(ipaddress.ip_network, block.get("except", []))
            if address in ipaddress.ip_network(block["cidr"]) and not any(address in network for network in less):
                found = "names" if {port["port"] for port in rule.get("ports", [])} == {53} else "all"
    assert found == reached
