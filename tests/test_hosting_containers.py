"""Two teams in real containers behind the TLS front: what an instructor, a team and a stranger do and see."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import websocket
from harness import lab_pages
from harness.browser import Browser
from harness.containers import BASE, IMAGE, ROOT, Hosted, assert_apart, bring_up, insecure, run
from harness.drawn import make_pack
from harness.jobs import wait_for
from harness.lab_server import BRIEF

from course import frameworks

pytestmark = [pytest.mark.hosting, pytest.mark.drill]
HOME = "/home/learner"
UNCHECKED = {"cert_reqs": ssl.CERT_NONE, "check_hostname": False}
# Seconds; the issue of the tests is that a class is up within minutes, so this is no bound to be close to.
UP_SECONDS = 300
NODES = [f"labtest-{team}-node{node}" for team in ("red", "blue") for node in (0, 1)]
STEPS = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000):
    dist.all_reduce(torch.zeros(1))
    print("step", step, flush=True)
    time.sleep(0.2)
"""
LONG_JOB = """
import nodelaunch as launch
job = launch.TorchrunJob("steps.py", nodes=launch.ssh_nodes(["node0", "node1"]))
job.run()
"""


@pytest.fixture(scope="module")
def hosted(podman, tmp_path_factory) -> Iterator[Hosted]:
    """A class of two teams with two nodes each."""
    with bring_up(podman, tmp_path_factory.mktemp("class")) as found:
        yield found


def test_one_command_brings_the_teams_up_in_minutes(hosted):
    assert hosted.seconds < UP_SECONDS
    assert set(hosted.started()) == {"labtest-front", "labtest-guard", *NODES}
    sheet = (hosted.state / "handout.html").read_text()
    for team in ("red", "blue"):
        assert f"https://localhost:{hosted.port}/{team}/" in sheet and hosted.token(team) in sheet
    assert hosted.token("red") not in (hosted.state / "engine.log").read_text()


def test_a_token_opens_its_own_team_and_no_other(hosted):
    red, blue = hosted.token("red"), hosted.token("blue")
    assert hosted.ask("/red/api/contents", token=red)[0] == hosted.ask("/blue/api/contents", token=blue)[0] == 200
    for token in ("", blue, red[:-1], "' OR 1=1", red.upper()):
        assert hosted.ask("/red/api/contents", token=token)[0] == 403, token
        assert hosted.ask("/red/api/kernels", token=token, method="POST")[0] == 403, token
    status, body = hosted.ask("/red/lab")
    assert status == 302 and red not in body
    assert hosted.ask("/", token=red)[0] == hosted.ask("/green/api", token=red)[0] == 404
    assert hosted.ask("/red/../blue/api/contents", token=red)[0] in (400, 403, 404)
    assert hosted.ask("/red/proxy/blue-node0:8888/blue/api", token=red)[0] == 403, "only what runs in the container"


def test_a_foreign_origin_is_refused(hosted):
    """Another site's page can open sockets and send forms with a learner's cookie; that must not let it in."""
    token, ours, foreign = hosted.token("red"), f"https://localhost:{hosted.port}", "https://evil.example"
    kernel = json.loads(hosted.ask("/red/api/kernels", token=token, method="POST")[1])["id"]
    address = f"wss://localhost:{hosted.port}/red/api/kernels/{kernel}/channels"
    cookie = hosted.log_in("red")

    def connect(origin, **options):
        websocket.create_connection(address, sslopt=UNCHECKED, origin=origin, timeout=20, **options).close()

    connect(ours, cookie=cookie)
    for origin, options in ((ours, {}), (foreign, {}), (foreign, {"cookie": cookie})):
        with pytest.raises(websocket.WebSocketBadStatusException) as refused:
            connect(origin, **options)
        assert refused.value.status_code == 403
    assert hosted.ask("/red/api/kernels", method="POST", Cookie=cookie, Origin=foreign)[0] in (403, 404)
    assert hosted.ask(f"/red/api/kernels/{kernel}", token=token, method="DELETE")[0] == 204


def test_a_team_can_neither_see_nor_reach_another(hosted):
    podman = hosted.podman
    assert_apart(hosted, "red", "blue", others=["blue-node0", "blue-node1"])
    read = "cat /proc/*/environ /proc/*/cmdline /srv/token | tr '\\0' '\\n'"
    everything = podman.ask("labtest-red-node0", "sh", "-c", read)
    assert hosted.token("red") in everything and hosted.token("blue") not in everything
    cmdlines = podman.ask("labtest-red-node0", "sh", "-c", "cat /proc/*/cmdline | tr '\\0' ' '")
    assert "jupyter-lab" in cmdlines and hosted.token("red") not in cmdlines


def test_no_private_key_is_in_the_image_and_each_container_has_its_own(hosted):
    podman = hosted.podman
    places = "/etc /home /root /srv/keys /srv/labs/hosting"
    find = f"grep -rlE 'BEGIN ([A-Z]+ )?PRIVATE KEY' {places}; find /etc -name munge.key"
    assert podman.call("run", "--rm", "--user=0", "--entrypoint=sh", IMAGE, "-c", find).stdout.strip() == ""
    keys = [podman.ask(node, "cat", f"{HOME}/.ssh/host.pub") for node in NODES]
    assert len(set(keys)) == 4
    shared = podman.ask("labtest-red-node0", "sh", "-c", "ls /srv/keys; cat /srv/keys/*")
    assert shared.split()[:4] == ["node0.host", "node0.user", "node1.host", "node1.user"]
    assert "PRIVATE" not in shared


def test_a_team_that_comes_later_disturbs_nobody(hosted):
    before = hosted.started()
    hosted.teams.write_text("team,gpus\nred,\nblue,\ngreen,\n")
    try:
        hosted.host("up")
        assert hosted.ask("/green/api/contents", token=hosted.token("green"))[0] == 200
        assert {name: when for name, when in hosted.started().items() if name in NODES} == {
            name: when for name, when in before.items() if name in NODES
        }
    finally:
        hosted.teams.write_text("team,gpus\nred,\nblue,\n")
        hosted.host("up")
    assert not any("green" in name for name in hosted.started())
    assert hosted.ask("/green/api")[0] == 404


def test_the_two_nodes_of_a_team_reach_each_other_from_the_first_cell(hosted):
    preflight = ["python", "-m", "nodelaunch", "preflight", "node0", "node1"]
    said = hosted.podman.ask("labtest-red-node0", *preflight)
    assert re.search(r"Preflight: (all is well|\d+ to note)", said), said
    assert "[red]" not in said


def test_a_job_on_both_nodes_takes_no_more_threads_than_they_have_cpus(hosted):
    """With two threads each, two ranks that waited for each other on two busy CPUs were eleven times slower."""
    ask = "for node in node0 node1; do ssh $node nproc; done; nproc"
    threads = [int(number) for number in hosted.podman.ask("labtest-red-node0", "sh", "-c", ask).split()]
    assert threads == [max(1, os.cpu_count() // 2)] * 3


def test_both_nodes_of_a_team_have_the_frameworks_of_the_labs(hosted):
    """Lightning and Ray; the others are not in the image, and a message says whom to ask."""
    find = "import sys; from course import frameworks; print(frameworks.find_python(sys.argv[1]))"
    have = {"lightning", "ray"}
    for node in ("node0", "node1"):
        for name in have:
            python = hosted.podman.ask(f"labtest-red-{node}", "python", "-c", find, name)
            said = hosted.podman.ask(f"labtest-red-{node}", python, "-c", f"import {name}, torch; print('both')")
            assert said.strip() == "both"
        for name in frameworks.read_table().keys() - have:
            refused = hosted.podman.call("exec", f"labtest-red-{node}", "python", "-c", find, name, check=False)
            assert (
                f"fix: ask your instructor for an image with {frameworks.read_table()[name]['title']}" in refused.stderr
            )


def test_a_team_starts_a_slurm_of_its_own_and_ends_it(hosted):
    """As lab 13 needs it; both nodes of that Slurm are in one container."""
    ask, team = hosted.podman.ask, "labtest-red-node0"
    pocket, own = ("python", "-m", "course.pocket_slurm"), "SLURM_CONF=/tmp/lab-slurm-10001/slurm.conf"
    try:
        ask(team, "env", "-C", "/srv/labs", *pocket, "up")
        said = ask(team, "env", own, "srun", "--nodes=2", "sh", "-c", 'echo "$SLURMD_NODENAME of $(id -un)"')
        assert sorted(said.split("\n")[:2]) == ["c1 of learner", "c2 of learner"]
    finally:
        ask(team, "env", "-C", "/srv/labs", *pocket, "down")
    assert "slurm" not in ask(team, "ps", "-eo", "comm=")


def start_long_job(hosted):
    """Starts a job on both nodes of team red from a shell, as a cell would; returns when it runs."""
    podman, where = hosted.podman, f"{HOME}/work"
    for name, text in {"steps.py": STEPS, "long_job.py": LONG_JOB}.items():
        podman.ask("labtest-red-node0", "sh", "-c", f"cat > {where}/{name} <<'EOF'\n{text}\nEOF")
    run = f"cd {where} && python long_job.py > long.log 2>&1; echo ended $? >> long.log"
    podman.call("exec", "-d", "labtest-red-node0", "sh", "-c", run)
    return wait_for_log(hosted, r"rank 1\] step 5\b", 120)


def wait_for_log(hosted, pattern, seconds):
    end = time.monotonic() + seconds
    while True:
        log = hosted.podman.ask("labtest-red-node0", "cat", f"{HOME}/work/long.log", check=False)
        if re.search(pattern, log, re.MULTILINE):
            return log
        assert time.monotonic() < end, log[-2000:]
        time.sleep(0.5)


def test_a_node_that_is_killed_in_mid_job_is_named_and_comes_back(hosted):
    start_long_job(hosted)
    begun = time.monotonic()
    hosted.podman.call("kill", "labtest-red-node1")
    log = wait_for_log(hosted, "^ended", 60)
    assert time.monotonic() - begun < 45
    assert "The connection to node1 was lost." in log and "ended 1" in log
    jobs = hosted.podman.ask("labtest-red-node0", "python", "-m", "nodelaunch", "jobs")
    assert "steps" not in jobs, "nothing of it is left on the other node"
    hosted.host("up")
    test_the_two_nodes_of_a_team_reach_each_other_from_the_first_cell(hosted)


def test_tensorboard_is_behind_the_same_token(hosted):
    token = hosted.token("red")
    status, body = hosted.ask("/red/tensorboard/", token=token)
    assert status == 200 and "TensorBoard" in body
    for wrong in ("", hosted.token("blue")):
        status, body = hosted.ask("/red/tensorboard/", token=wrong)
        assert status in (302, 403) and "<title>TensorBoard" not in body


def write_work(hosted, text):
    hosted.podman.ask("labtest-red-node0", "sh", "-c", f"echo {text} > {HOME}/work/labs/ours.txt")


def read_work(hosted):
    return hosted.podman.ask("labtest-red-node0", "cat", f"{HOME}/work/labs/ours.txt")


def test_work_survives_down_and_up_a_kill_and_a_new_image(hosted):
    write_work(hosted, "kept")
    hosted.host("down")
    assert not hosted.started()
    hosted.host("up")
    assert read_work(hosted) == "kept"
    hosted.podman.call("kill", "labtest-red-node0")
    hosted.host("up")
    assert read_work(hosted) == "kept"
    old = hosted.podman.inspect("labtest-red-node0")["Image"]
    file = hosted.podman.folder / "Dockerfile.newer"
    file.write_text(f"FROM {IMAGE}\nLABEL version=newer\n")
    hosted.podman.call("build", "-t", "localhost/labs-test-labs:newer", "-f", file, hosted.podman.folder)
    try:
        hosted.host("up", "--image", "localhost/labs-test-labs:newer")
        assert hosted.podman.inspect("labtest-red-node0")["Image"] != old
        assert read_work(hosted) == "kept"
    finally:
        hosted.host("up", "--image", IMAGE)
        hosted.podman.call("rmi", "localhost/labs-test-labs:newer")
    assert read_work(hosted) == "kept"


def test_after_a_power_cut_the_machine_brings_the_teams_back(hosted):
    """Simulates a reboot: all containers end at once, and podman-restart.service starts them."""
    write_work(hosted, "kept")
    hosted.podman.call("kill", *hosted.started())
    unit = Path("/lib/systemd/system/podman-restart.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S+ \$LOGGING (.*)$", unit, re.M)
    assert command == "start --all --filter restart-policy=always"
    hosted.podman.call(*command.split(), "--filter", "name=^labtest-")
    wait_for(lambda: answers(hosted, "red"), 60.0)
    assert read_work(hosted) == "kept"
    assert set(hosted.started()) == {"labtest-front", "labtest-guard", *NODES}
    reach = ["ssh", "-o", "BatchMode=yes", "node1", "true"]
    wait_for(lambda: not hosted.podman.call("exec", "labtest-red-node0", *reach, check=False).returncode, 60.0)
    test_the_two_nodes_of_a_team_reach_each_other_from_the_first_cell(hosted)


def answers(hosted, team):
    """Returns True if a team's JupyterLab answers through the front, which may not listen yet."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return hosted.ask(f"/{team}/api/contents", token=hosted.token(team))[0] == 200


def test_the_guide_s_backup_has_a_team_s_work(hosted, tmp_path):
    write_work(hosted, "saved")
    guide = (Path(__file__).resolve().parents[1] / "hosting" / "README.md").read_text()
    (line,) = re.findall(r"`docker (run --rm -v labs-red-work.*?)`", guide)
    command = line.replace("labs-red-work", "labtest-red-work").replace('"$PWD"', str(tmp_path))
    hosted.podman.call(*command.replace("debian:bookworm-slim", BASE).split())
    with tarfile.open(tmp_path / "red.tgz") as kept:
        assert kept.extractfile("./labs/ours.txt").read() == b"saved\n"


READ = """
from lab_utils import data
import nodelaunch as launch
d = data.load()
needs = launch.DataFolder(**d.for_nodes, copy_data=True)
job = launch.TorchrunJob("/srv/labs/notebooks/scripts/four_numbers.py", nodes=launch.choose_nodes(), data=needs)
print(d.summary, *(verdict.found for verdict in job.preflight().verdicts if verdict.check == "data"), sep="; ")
"""


def test_data_of_the_class_are_read_by_both_nodes_and_changed_by_nobody(hosted, tmp_path):
    write_work(hosted, "kept")
    hosted.host("up", "--data", make_pack(tmp_path / "data", "cinic10"))
    try:
        summary, *data = hosted.podman.ask("labtest-red-node0", "python", "-c", READ).split("; ")
        assert summary.startswith("cinic10: 20 train")
        assert len(data) == 2 and all("the same on the nodes" in found for found in data), data
        for node in (0, 1):
            refused = hosted.podman.call("exec", f"labtest-red-node{node}", "touch", "/srv/data/ours", check=False)
            assert refused.returncode and "Read-only" in refused.stderr
    finally:
        hosted.host("up", "--data", "")
    assert read_work(hosted) == "kept"


def test_a_certificate_of_one_s_own_and_none_at_all(hosted, tmp_path):
    """Either change recreates only the front."""
    nodes = {name: when for name, when in hosted.started().items() if name in NODES}
    made = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=class -addext subjectAltName=DNS:localhost"
    run("openssl", *made.split(), "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem")
    try:
        hosted.host("up", "--tls", tmp_path)
        context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        with socket.create_connection(("localhost", hosted.port)) as plain:
            context.wrap_socket(plain, server_hostname="localhost").close()
        assert answers(hosted, "red")
        hosted.host("up", "--tls", "none")
        path = f"http://localhost:{hosted.port}/red/api/contents?token={hosted.token('red')}"
        with urllib.request.urlopen(path, timeout=30) as page:
            assert page.status == 200
    finally:
        hosted.host("up", "--tls", "internal")
    assert {name: when for name, when in hosted.started().items() if name in NODES} == nodes


def test_with_host_names_of_their_own_no_team_s_page_has_another_s_origin(hosted):
    token, port = hosted.token("red"), hosted.port
    nodes = {name: when for name, when in hosted.started().items() if name in NODES}
    try:
        hosted.host("up", "--subdomains")
        assert hosted.ask("/red/api/contents", token=token, Host=f"red.localhost:{port}")[0] == 200
        for host in (f"blue.localhost:{port}", f"localhost:{port}"):
            assert hosted.ask("/red/api/contents", token=token, Host=host)[0] == 404
        assert f"https://red.localhost:{port}/red/" in (hosted.state / "handout.html").read_text()
        assert re.search(r"^red +running running +yes", hosted.host("status").stdout, re.M)
        context = insecure()
        plain = socket.create_connection(("localhost", port))
        with context.wrap_socket(plain, server_hostname="red.localhost") as link:
            assert b"red.localhost" in link.getpeercert(binary_form=True)
    finally:
        hosted.host("up", "--no-subdomains")
    assert {name: when for name, when in hosted.started().items() if name in NODES} == nodes


def test_a_new_token_shuts_the_old_one_out_and_the_other_team_does_not_notice(hosted):
    old, others = hosted.token("red"), hosted.token("blue")
    blue = {name: when for name, when in hosted.started().items() if "blue" in name or "front" in name}
    hosted.host("rotate", "red")
    wait_for(lambda: answers(hosted, "red"), 60.0)
    assert hosted.token("red") != old and hosted.token("blue") == others
    assert hosted.ask("/red/api/contents", token=old)[0] == 403
    assert hosted.token("red") in (hosted.state / "handout.html").read_text()
    assert {name: when for name, when in hosted.started().items() if name in blue} == blue
    refused = hosted.host("rotate", "green", check=False)
    assert refused.returncode == 1 and "one of: red, blue" in refused.stderr


def test_reset_gives_fresh_labs_and_keeps_the_old(hosted):
    write_work(hosted, "mine")
    said = hosted.host("reset", "red").stdout
    kept = re.search(r"/home/learner/work/labs-\w+", said)[0]
    assert hosted.podman.ask("labtest-red-node0", "cat", f"{kept}/ours.txt") == "mine"
    fresh = hosted.podman.ask("labtest-red-node0", "ls", f"{HOME}/work/labs")
    assert "00_start_here.ipynb" in fresh and "ours.txt" not in fresh


def test_status_and_collect_say_how_the_teams_stand(hosted, tmp_path):
    said = hosted.host("status").stdout
    for team in ("red", "blue"):
        assert re.search(rf"^{team} +running running +yes +\d+ MB", said, re.M), said
    hosted.podman.call("stop", "-t", "1", "labtest-blue-node1")
    assert re.search(r"^blue +running exited +yes", hosted.host("status").stdout, re.M)
    hosted.host("up")
    write_work(hosted, "handed in")
    hosted.host("collect", "--into", os.path.relpath(tmp_path / "in", ROOT))
    for team in ("red", "blue"):
        assert (
            f"<title>Distributed Training Labs: {team}</title>" in (tmp_path / "in" / team / "report.html").read_text()
        )
    assert (tmp_path / "in" / "red" / "work" / "labs" / "ours.txt").read_text() == "handed in\n"


# What a team leaves behind for whoever collects its work. %s is a file of the instructor's.
TRAP = """
cd /home/learner && mkdir -p course work/labs/deep && touch course/__init__.py
cat > course/report.py <<'EOF'
import pathlib
ran, report = pathlib.Path("/home/learner/work/ran"), pathlib.Path("/home/learner/work/report.html")
if ran.exists():  # by now the link has been collected
    report.unlink()
    report.write_text("the team's key")
ran.write_text("the team's code")
EOF
mkdir -p $(dirname %s) && echo "the team's key" > %s
cp -r course work/labs/; cp -r course work/
echo 'raise SystemExit("a shadow")' > work/labs/json.py
ln -sfn %s work/report.html
ln -sfn %s work/labs/notes.txt
ln -sfn / work/labs/root
mkfifo work/labs/pipe
truncate -s 3G work/labs/sparse.bin
touch "work/labs/$(printf '\033[2Jx\nred')" "work/labs/$(printf '\377odd')"
"""


def test_collect_writes_nothing_where_a_team_points(hosted, tmp_path):
    """The team replaces its report by a link to the instructor's file, and our program by one that keeps the link."""
    victim, into = tmp_path / "authorized_keys", tmp_path / "in"
    victim.write_text("the instructor's")
    hosted.podman.ask("labtest-red-node0", "sh", "-c", TRAP.replace("%s", str(victim)))
    try:
        said = hosted.host("collect", "--into", into).stdout
    finally:
        hosted.podman.ask("labtest-red-node0", "sh", "-c", f"rm -rf {HOME}/course {HOME}/work/labs/sparse.bin")
    assert victim.read_text() == "the instructor's"
    assert "the team's code" not in hosted.podman.ask("labtest-red-node0", "cat", "work/ran", check=False)
    red = into / "red"
    assert "<title>Distributed Training Labs: red</title>" in (red / "report.html").read_text()
    collected = [path for path in into.rglob("*") if not path.is_dir() or path.is_symlink()]
    assert all(path.is_file() and not path.is_symlink() for path in collected)
    assert max(path.stat().st_size for path in collected) < 2**30
    left_out = (red / "left-out.txt").read_text()
    for name in ("report.html", "labs/notes.txt", "labs/root", "labs/pipe", "labs/sparse.bin"):
        assert name in left_out, left_out
    assert all("\33" not in text for text in (left_out, said, *map(str, collected)))
    assert (red / "work" / "labs" / "00_start_here.ipynb").is_file()
    assert not (red / "work" / "labs" / "root").exists()
    hosted.host("collect", "--into", into)
    assert len([*into.glob("red*/left-out.txt")]) == 2, "what was collected before is kept"


@pytest.fixture(scope="module")
def prepared(hosted):
    """Makes team red's JupyterLab expose its application to the tests, and its kernels measure in two rounds."""
    config = json.dumps({"LabApp": {"expose_app_in_browser": True}})
    startup = f"{HOME}/.ipython/profile_default/startup"
    rounds = "import os; os.environ['LAB_ROUNDS'] = '2'"
    hosted.podman.ask("labtest-red-node0", "mkdir", "-p", f"{HOME}/.jupyter", startup)
    for path, text in ((f"{HOME}/.jupyter/jupyter_lab_config.json", config), (f"{startup}/rounds.py", rounds)):
        hosted.podman.ask("labtest-red-node0", "sh", "-c", 'echo "$1" > "$0"', path, text)
    hosted.host("restart", "red")
    hosted.host("up")
    return hosted


@pytest.fixture
def page(prepared, chromium, tmp_path):
    """A browser that has logged in as team red; its kernels are ended afterwards."""
    token = prepared.token("red")
    with Browser(tmp_path / "profile", flags=["--ignore-certificate-errors"]) as browser:
        yield browser.open(f"https://localhost:{prepared.port}/red/lab?token={token}")
    for kernel in json.loads(prepared.ask("/red/api/kernels", token=token)[1]):
        prepared.ask(f"/red/api/kernels/{kernel['id']}", token=token, method="DELETE")


@pytest.mark.parametrize("lab", ["00_start_here", "05_ddp_two_nodes"])
def test_a_team_runs_a_lab_in_its_browser(hosted, page, tmp_path, lab):
    """The labs with their solutions: lab 5 on node0 and node1, as LAB_NODES says in a team's container.

    With LAB_BRIEF=1, lab 5 stops after the proof that two nodes train as one: tests/test_lab5.py runs all of it.
    """
    team, name = "labtest-red-node0", f"{lab}.ipynb"
    hosted.podman.ask(team, "sh", "-c", f"rm -rf {HOME}/work/solved && cp -r /srv/labs/notebooks {HOME}/work/solved")
    lab_pages.open_notebook(page, f"solved/{name}")
    assert "news" not in page.evaluate("document.body.innerText").lower()
    ids = [cell.id for cell in nbformat.read(ROOT / "notebooks" / name, as_version=4).cells]
    end = ids.index("proof") + 1 if BRIEF and "proof" in ids else len(ids)
    if end < len(ids):
        page.evaluate(f"labs.panel.content.activeCellIndex = {end}")
        lab_pages.run_all(page, "notebook:run-all-above")
    else:
        lab_pages.run_all(page)
    page.screenshot(Path(os.environ.get("LAB_ARTEFACTS") or tmp_path) / f"team-{lab}.png")
    hosted.podman.call("cp", f"{team}:{HOME}/work/solved/{name}", tmp_path / name)
    faults = lab_pages.find_faults(page, tmp_path / name)
    assert [fault for fault in faults if fault.partition(":")[0] in ids[:end]] == []
    text = json.dumps(nbformat.read(tmp_path / name, as_version=4))
    if lab.startswith("05"):
        assert "2 nodes: node0, node1" in text and "rank 1 on node1" in text
    page.close()
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)
