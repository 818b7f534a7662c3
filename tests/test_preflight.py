"""The preflight: real probes on nodes of this machine, judged facts, and two hosts with a network between them."""

import ast
import gc
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from lab_common import LabError
from nodelaunch import DataFolder, TorchrunJob
from nodelaunch import __main__ as launch_main
from nodelaunch.__main__ import main
from nodelaunch.backends.local import LocalNode, local_nodes
from nodelaunch.backends.ssh import ssh_nodes
from nodelaunch.node import probe, receive, sampler
from nodelaunch.preflight import Preflight, check_nodes, routes
from nodelaunch.preflight.client import ask_once
from nodelaunch.preflight.gpus import find_offers, judge_gpus
from nodelaunch.preflight.verdicts import (
    MIB,
    WILL_COPY,
    Verdict,
    Wanted,
    judge_clocks,
    judge_disk,
    judge_facts,
    judge_jobs,
    judge_versions,
)
from nodelaunch.program import list_files, make_command, pack_files

LISTEN = """import socket, time
listener = socket.socket()
listener.bind(("", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
time.sleep(60)"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
VERSIONS = {
    "python": "3.11.7",
    "program": "/usr/bin/python3",
    "torch": "2.14.1+cu130",
    "cuda": "13.0",
    "nccl": "2.30.7",
}
SETTLED = {"versions": VERSIONS, "disk": {"folder": "/f", "free": 2**40, "files": 9, "writable": True, "shm": 2**30}}
SETTLED |= {"gpus": {"gpus": [], "apps": []}, "system": {"host": "h", "machine": "m"}, "own": ["10.0.0.1"]}


@dataclass(frozen=True)
class Odd(LocalNode):
    """A node on this machine with settings of its own, or whose programs are run by others, such as ``sleep 60``."""

    env: dict = field(default_factory=dict)
    before: tuple = ()
    instead: tuple = ()
    cwd: str | None = None

    def popen(self, argv):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = self.instead or (*self.before, *argv)
        return subprocess.Popen(command, **pipes, start_new_session=True, env={**os.environ, **self.env}, cwd=self.cwd)


@pytest.fixture
def pair(tmp_path):
    return local_nodes(2, folder=tmp_path / "nodes")


@pytest.fixture
def start():
    """Starts Python programs, and ends them with the test; returns when one has printed its first line."""
    started = []

    def run(code: str, **env: str) -> tuple[subprocess.Popen, str]:
        process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **env}, stdout=subprocess.PIPE)
        started.append(process)
        return process, process.stdout.readline().decode().strip()

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def look(nodes, **options) -> Preflight:
    """A preflight without jobs that others, and other tests, run on this machine meanwhile."""
    found = check_nodes(nodes, **options)
    own = tuple(v for v in found.verdicts if v.check != "jobs" or "job preflight-" in v.found)
    return replace(found, verdicts=own)


def make_odd(node: LocalNode, **settings) -> Odd:
    """The same node, but odd."""
    return Odd(**{**vars(node), **settings})


def find(found: Preflight, check: str, node: str = "") -> list[Verdict]:
    return [verdict for verdict in found.verdicts if verdict.check == check and node in verdict.node]


def test_a_healthy_pair_is_green_within_two_seconds(pair):
    results = [look(pair) for _ in range(3)]
    for found in results:
        assert found.ok, found
        assert not [verdict for verdict in found.verdicts if verdict.state != "ok"], found
        found.raise_if_red()
    assert min(found.seconds for found in results) <= 2
    found = results[0]
    assert found.addresses == {"node0": "127.0.0.1", "node1": "127.0.0.2"}
    assert found.interfaces == {"node0": "lo", "node1": "lo"}
    assert 30000 <= found.port <= 32767, "none of Slurm's jobs"
    checks = {verdict.check for verdict in found.verdicts}
    assert checks == {"address", "network", "port", "versions", "disk", "GPUs", "clock", "exposure"}
    assert f"node0 on port {found.port}" in str(found)
    assert repr(found) == str(found), "what a cell shows"


@pytest.mark.parametrize(("module", "stdin"), [(probe, b""), (sampler, b""), (receive, bytes(10240))])
def test_what_travels_needs_python_3_9_and_nothing_installed(module, stdin, tmp_path, root):
    python, *rest = make_command(sys.executable, module, "9", "0", str(tmp_path))
    assert max(map(len, rest)) < 100_000, "an argument has 128 KiB at most"
    command = [python, "-I", "-S", "-X", "importtime", *rest]
    done = subprocess.run(command, input=stdin, capture_output=True, cwd=tmp_path)
    assert b"ImportError" not in done.stderr and b"ModuleNotFoundError" not in done.stderr
    ours = set(re.findall(r"(?:lab_common|nodelaunch)[\w.]*$", done.stderr.decode(), re.MULTILINE))
    assert ours >= {"nodelaunch.node", "lab_common"}
    places = [root / name.replace(".", "/") for name in ours]
    files = [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()]
    for path in [*files, Path(module.__file__)]:
        ast.parse(path.read_text(), feature_version=(3, 9))


def test_what_travels_is_the_same_for_the_same_files():
    contents = {name: path.read_bytes() for name, path in list_files().items()}
    assert pack_files(contents) == pack_files(dict(reversed(contents.items())))
    assert {"nodelaunch/node/worker.py", "lab_common/__init__.py"} <= contents.keys()


def test_the_probe_ends_with_its_launcher(pair):
    process = pair[0].popen(make_command(sys.executable, probe))
    process.stdin.write(b'{"do": "clock"}\n')
    process.stdin.flush()
    assert json.loads(process.stdout.readline()[1:])["time"] == pytest.approx(time.time(), abs=1)
    process.stdin.close()
    assert process.wait(2) == 0
    process.stdout.close()
    process.stderr.close()


def test_nothing_that_a_node_prints_or_has_lying_about_disturbs(pair, tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit('not this one')")
    noise = ("sh", "-c", 'echo "{} welcome"; echo "motd" >&2; exec "$@"', "sh")
    found = look([make_odd(pair[0], before=noise), make_odd(pair[1], cwd=str(tmp_path))])
    assert found.ok, found


def test_a_question_that_a_probe_cannot_answer_is_an_error(pair):
    (answer,) = ask_once(pair[:1], {"do": "sing"}).values()
    assert isinstance(answer, LabError)
    assert answer.what == "node0 could not be examined." and answer.cause == "KeyError: 'sing'"
    assert "newer Python" in answer.fix


def test_a_port_that_a_stranger_holds_is_named_with_its_process(pair, start):
    process, port = start(LISTEN)
    found = look(pair, port=int(port))
    (verdict,) = find(found, "port")
    assert verdict.state == "red"
    assert f"port {port} is held by" in verdict.found
    assert f"pid {process.pid}" in verdict.found
    assert "import socket" in verdict.found
    assert "port=None" in verdict.fix
    assert len(found.reds) == 1
    with pytest.raises(LabError) as caught:
        found.raise_if_red()
    assert port in caught.value.what
    assert process.poll() is None


def test_a_port_that_a_leftover_of_ours_holds_comes_with_the_command_that_stops_it(pair, start):
    _, port = start(LISTEN, LAB_JOB_ID="preflight-left")
    (verdict,) = find(look(pair, port=int(port)), "port")
    assert "preflight-left" in verdict.cause
    assert verdict.fix == "python -m nodelaunch stop preflight-left"


def test_a_leftover_is_found_and_stopped_and_nothing_else(pair, start, capsys):
    left, _ = start(STUBBORN, LAB_JOB_ID="preflight-a")
    another, _ = start(STUBBORN, LAB_JOB_ID="preflight-ab")
    stranger, _ = start(STUBBORN)
    found = look(pair)
    assert found.ok, "it holds nothing that this job needs"
    assert {v.fix for v in find(found, "jobs")} == {
        f"python -m nodelaunch stop {job}" for job in ("preflight-a", "preflight-ab")
    }
    assert len(find(found, "jobs")) == 2, "two nodes on one machine report a process once"
    assert f"pid {left.pid}" in str(found)
    assert not find(look(pair, job_id="preflight-a"), "jobs", "preflight-a ")
    assert main(["jobs"]) == 0
    assert f"preflight-a  pid {left.pid}" in capsys.readouterr().out
    started = time.monotonic()
    assert main(["stop", "preflight-a"]) == 0
    assert time.monotonic() - started < 4
    assert "1 process(es) of preflight-a ended" in capsys.readouterr().out
    assert left.wait(1) == -signal.SIGKILL
    assert another.poll() is None
    assert stranger.poll() is None
    assert main(["stop", "preflight-a"]) == 0
    assert "no process of preflight-a runs" in capsys.readouterr().out


def test_a_job_that_somebody_watches_is_a_note(pair, start):
    code = "import time; print('up', flush=True); time.sleep(60)"
    words = f"[sys.executable, '-c', {code!r}, '-m', 'nodelaunch.node.supervisor', '--']"
    code = f"import os, sys; os.execv(sys.executable, {words})"
    start(code, LAB_JOB_ID="preflight-s")
    (verdict,) = find(look(pair), "jobs")
    assert verdict.state == "note"
    assert "job preflight-s still runs here" in verdict.found
    assert "stop" not in verdict.fix, "it is another notebook's, maybe of another checkout"


def test_a_job_that_starts_between_two_nodes_answers_is_no_leftover():
    """Both nodes are one machine: the second list has the supervisor again, and workers that the first had not."""
    supervisor, *workers = (
        {"id": "job-a", "pid": pid, "command": "python", "supervisor": pid == 1} for pid in (1, 2, 3)
    )
    facts = {name: {"system": {"machine": "here"}} for name in ("node0", "node1")}
    lists = {"node0": {"jobs": [supervisor]}, "node1": {"jobs": [supervisor, *workers]}}
    verdicts = judge_jobs(facts, Wanted(), lists)
    assert [verdict.state for verdict in verdicts] == ["note", "note"]
    assert all("another notebook or script" in verdict.cause for verdict in verdicts)
    lists["node1"] = {"jobs": workers}
    assert "leftover" in judge_jobs(facts, Wanted(), lists)[1].cause


@pytest.mark.parametrize(("pid", "state"), [("7", "red"), ("8", "note"), ("[N/A]", "note")])
def test_a_leftover_is_red_only_where_it_holds_what_this_job_needs(pid, state):
    process = {"id": "job-a", "pid": 7, "command": "python", "supervisor": False}
    facts = {"n1": {"system": {"machine": "there"}, "gpus": {"gpus": [], "apps": [[pid, "python", "900"]]}}}
    (verdict,) = judge_jobs(facts, Wanted(), {"n1": {"jobs": [process]}})
    assert verdict.state == state
    assert verdict.fix == "python -m nodelaunch stop job-a n1"


def test_a_polite_leftover_is_asked_first(pair, start):
    polite, _ = start("import time; print('up', flush=True); time.sleep(60)", LAB_JOB_ID="preflight-p")
    (answer,) = ask_once(pair[:1], {"do": "stop_job", "id": "preflight-p"}).values()
    assert answer == {"stopped": [polite.pid], "left": []}
    assert polite.wait(1) == -signal.SIGTERM


def test_another_torch_is_red_with_a_table(pair, tmp_path):
    (tmp_path / "other" / "torch").mkdir(parents=True)
    (tmp_path / "other" / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    text = "__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\n"
    (tmp_path / "other" / "torch" / "version.py").write_text(text)
    found = look([pair[0], make_odd(pair[1], env={"PYTHONPATH": str(tmp_path / "other")})])
    (verdict,) = found.reds
    assert verdict.found.startswith("torch is not the same on all nodes")
    assert re.search(r"\n  node1  Python \S+, torch 2.9.0\+cpu, no CUDA", verdict.found)
    assert re.search(r"\n  node0  Python \S+, torch 2.1", verdict.found)


def test_versions_that_differ():
    def judge(gpus=(), **other):
        both = {"n1": {**SETTLED, "gpus": {"gpus": list(gpus), "apps": []}}, "n2": {"versions": {**VERSIONS, **other}}}
        return [(verdict.state, verdict.found.split()[0]) for verdict in judge_versions(both)]

    assert {state for state, _ in judge()} == {"ok"}
    assert {state for state, _ in judge(python="3.11.9")} == {"ok"}
    assert judge(python="3.12.1") == [("red", "Python")]
    assert judge(nccl="2.27.0") == [("note", "NCCL")], "without a GPU NCCL is not used"
    assert judge(gpus=[["0", "H100", "1", "80000"]], nccl="2.27.0") == [("red", "NCCL")]
    assert judge(torch="2.14.1+cpu", cuda=None) == [("note", "CUDA")]
    assert judge(torch=None, cuda=None, nccl=None)[0] == ("red", "/usr/bin/python3")
    old = judge_versions({name: {"versions": {**VERSIONS, "python": "3.10.12"}} for name in ("n1", "n2")})
    assert [verdict.found for verdict in old if verdict.state == "red"] == [
        "Python 3.10.12: 3.11 or newer is needed"
    ] * 2
    bare = {"n1": {"versions": {**VERSIONS, "torch": None}}}
    assert "red" in {verdict.state for verdict in judge_versions(bare)}
    assert [verdict.state for verdict in judge_versions(bare, torchrun=False)] == ["ok"], (
        "another program may do without"
    )


def write_pack(folder: Path, digest: str, *, arrays: tuple[str, ...] = ("a.npy",)) -> Path:
    pack = folder / "packed" / "shapes10"
    pack.mkdir(parents=True)
    manifest = {"classes": ["x"], "sha256": {"a.npy": digest}, "source": {"words": str(folder)}}
    (pack / "manifest.json").write_text(json.dumps(manifest))
    for name in arrays:
        (pack / name).touch()
    return folder


def test_data_has_to_be_the_same_on_all_nodes(pair, tmp_path):
    one, same = write_pack(tmp_path / "1", "aa"), write_pack(tmp_path / "2", "aa")
    other, cut = write_pack(tmp_path / "3", "bb"), write_pack(tmp_path / "4", "aa", arrays=())

    def check(folder, **options):
        nodes = [replace(pair[0], data=str(one)), replace(pair[1], data=str(folder))]
        data = DataFolder("none", "packed/shapes10", "manifest.json", fix="make digits", **options)
        return find(look(nodes, data=data), "data", "node1")[0]

    assert check(same).state == "ok", "where and when a pack was made does not matter"
    assert check(other).state == "red"
    assert "not that of the other nodes" in check(other).found
    assert "a.npy is missing" in check(cut).found
    missing = check(tmp_path / "none")
    assert missing.state == "red"
    assert missing.fix == "copy_data=True, or on that node: make digits"
    assert check(tmp_path / "none", copy_data=True).state == "ok"


def test_data_that_were_copied_before_have_to_be_the_launchers(pair, tmp_path):
    """Also where all nodes agree: they would train on what the launcher had another day."""
    here, same = write_pack(tmp_path / "here", "new"), write_pack(tmp_path / "same", "new")
    old, cut = write_pack(tmp_path / "old data", "old"), write_pack(tmp_path / "cut", "new", arrays=())

    def check(folder, **options):
        data = DataFolder(here / "packed" / "shapes10", "packed/shapes10", "manifest.json", **options)
        return find(look([replace(node, data=str(folder)) for node in pair], data=data), "data")

    assert [verdict.state for verdict in check(old)] == ["ok", "ok"], "nothing is copied: the nodes have to agree only"
    assert [verdict.state for verdict in check(same, copy_data=True)] == ["ok", "ok"]
    for folder, words in ((old, "not that of the launcher"), (cut, "a.npy is missing")):
        red = check(folder, copy_data=True)
        assert [verdict.state for verdict in red] == ["red", "red"] and words in red[0].found
        command = re.search(r"rm -r -- .*?(?=   )", red[0].fix).group()
        subprocess.run(shlex.split(command), check=True)
        assert {verdict.found for verdict in check(folder, copy_data=True)} == {WILL_COPY}


def test_clocks():
    slow, fine = judge_clocks({"n1": (-3.5, 0.01)}), judge_clocks({"n1": (3.0, 2.5), "n2": (0.0, 0.0)})
    assert (slow[0].state, slow[0].found) == ("note", "the clock is 3.5 s behind the launcher's")
    assert [verdict.state for verdict in fine] == ["ok", "ok"], "a slow answer is no wrong clock"


@pytest.mark.parametrize(
    ("change", "state", "words"),
    [
        ({"shm": 8 * MIB}, "note", "8 MiB of shared memory"),
        ({"shm": 64 * MIB}, "ok", "free"),
        ({"shm": None}, "ok", "free"),
        ({"free": 100 * MIB}, "red", "100 MiB free"),
        ({"files": 0}, "red", "no file can be added"),
        ({"writable": False}, "red", "cannot be written"),
    ],
)
def test_disks_and_shared_memory(change, state, words):
    verdict = judge_disk("n1", {"disk": {**SETTLED["disk"], **change}}, Wanted())[-1]
    assert verdict.state == state
    assert words in verdict.found
    assert "num_workers=0" in verdict.fix or "shm" not in change or state == "ok"


def test_a_full_disk_is_red_before_anything_is_copied(pair, small_disk):
    found = look([pair[0], replace(pair[1], folder=str(small_disk / "not" / "there"))])
    assert [(verdict.node, verdict.check) for verdict in found.reds] == [("node1", "disk")]
    assert not (small_disk / "not").exists(), "a preflight changes nothing"


def test_gpus_are_counted_and_their_users_named(pair, tmp_path):
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(
        '#!/bin/sh\ncase "$1" in *gpu=*) echo "0, NVIDIA H100, 900, 81559";;'
        f' *) echo "{os.getpid()}, python, 700"; echo "77, other, 200";; esac\n'
    )
    smi.chmod(0o755)
    path = {"PATH": f"{smi.parent}:{os.environ['PATH']}"}
    found = look([make_odd(local_nodes(1)[0], env=path)])
    texts = [verdict.found for verdict in find(found, "GPUs")]
    assert texts[0] == f"the launcher's own process (pid {os.getpid()}) holds 700 MiB"
    assert texts[1] == "pid 77 (other) holds 200 MiB"
    assert found.ok
    smi.write_text('#!/bin/sh\necho "Failed to initialize NVML: Driver/library version mismatch"; exit 18\n')
    (verdict,) = find(look([make_odd(pair[1], env=path)]), "gpus")
    assert "Driver/library version mismatch" in verdict.cause


def test_a_gpu_that_others_fill():
    facts = {"n1": {**SETTLED, "gpus": {"gpus": [["0", "H100", "70000", "81559"]], "apps": []}}}
    offers = find_offers({"n1": local_nodes(1)[0]}, facts, Wanted())
    (verdict,) = judge_gpus(offers, facts, Wanted())
    assert "70000 of 81559 MiB in use" in verdict.found


def test_a_node_that_could_find_nothing_out_costs_nobody_a_verdict():
    facts, wanted = {"n1": {}, "n2": SETTLED}, Wanted(bundle="ab", data=DataFolder("x", "x", "y"))
    offers = find_offers(dict.fromkeys(facts, local_nodes(1)[0]), facts, wanted)
    verdicts = judge_facts(facts, wanted, judge_gpus(offers, facts, wanted))
    gaps = [verdict.check for verdict in verdicts if verdict.node == "n1"]
    assert gaps == ["versions", "disk", "gpus", "code", "data"]
    assert {verdict.state for verdict in verdicts} <= {"ok", "note"}
    network = routes.Network({"n1": None, "n2": None}, {"n1": {}, "n2": SETTLED}, False)
    assert routes.judge_names(network, {})[0].state == "note"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (("sleep", "60"), "did not answer within"),
        (("sh", "-c", "echo no luck >&2; exit 3"), "A program could not be run on node1."),
        (("sh", "-c", "exec 0<&- 1>&-; sleep 60"), "A program could not be run on node1."),
        (("/nonexistent/program",), "A program could not be run on node1."),
    ],
)
def test_a_node_that_does_not_answer_is_red_in_time_and_the_others_are_judged(pair, program, words):
    third = replace(local_nodes(3)[2], folder=pair[0].folder)
    started = time.monotonic()
    found = look([pair[0], make_odd(pair[1], instead=program), third])
    assert time.monotonic() - started <= 10
    (verdict,) = found.reds
    assert (verdict.node, verdict.check) == ("node1", "node")
    assert words in verdict.found
    assert verdict.fix
    judged = {verdict.check for verdict in found.verdicts if "node2" in verdict.node}
    assert judged >= {"address", "network", "disk", "versions", "clock"}
    assert "node1" not in found.addresses
    assert not [p for p in Path("/proc").glob("[0-9]*/stat") if _is_child_sleep(p)]


def _is_child_sleep(stat: Path) -> bool:
    try:
        name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
    except OSError:
        return False
    return name == "sleep" and rest.split()[1] == str(os.getpid()) and rest.split()[0] != "Z"


def test_a_node_that_hangs_while_it_is_started_does_not_hold_the_others_up(pair):
    class Slow(Odd):
        def popen(self, argv):
            time.sleep(4)
            return super().popen(argv)

    found = look([pair[0], Slow(**vars(pair[1]))], timeout=3)
    assert found.seconds < 4
    assert [verdict.node for verdict in found.reds] == ["node1"]
    time.sleep(4 - found.seconds + 1)  # its program comes too late, and is ended at once
    assert (
        subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "nodelaunch.node.probe"], capture_output=True).stdout
        == b""
    )


HOSTILE = "<script>alert('n')</script>&\x1b[31m\nroot"


def test_a_hostile_name_is_only_text():
    verdict = Verdict(HOSTILE, "names", "red", f"{HOSTILE} is odd", HOSTILE, f"rm {HOSTILE}")
    found = Preflight((verdict, replace(verdict, state="ok")), seconds=0.1)
    page = found._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#x27;n&#x27;)" in page
    assert "\x1b" not in page + str(found)
    with pytest.raises(LabError) as caught:
        found.raise_if_red()
    assert "\x1b" not in str(caught.value)


def test_the_table_shows_red_first_and_wraps(pair):
    green = Verdict("n1", "disk", "ok", "much room")
    red = Verdict("n2", "disk", "red", "word " * 60 + "\n  n1  3.11\n  n2  3.12", "cause", "python -m x " + "y" * 150)
    found = Preflight((green, replace(green, node="n3"), red, red), seconds=0.1)
    page, text = found._repr_html_(), str(found)
    assert page.index("word word") < page.index("much room")
    assert page.index("python -m x") < page.index("much room")
    assert text.startswith("[red]")
    assert text.splitlines()[-2].split() == ["[ok]", "n1,", "n3", "disk", "much", "room"]
    assert all(len(line) <= 118 for line in text.splitlines() if "yyy" not in line)
    assert "y" * 150 in text, "a command is not broken"
    assert re.search(r"\n +n1  3.11\n +n2  3.12\n", text)
    assert text.endswith("Preflight: 2 red; 0.1 s.")
    with pytest.raises(LabError) as caught:
        found.raise_if_red()
    assert len(caught.value.what) <= 120
    assert caught.value.what.endswith("(+ 1 more)")
    assert "n1  3.11; n2  3.12" in caught.value.where


def make_network(**changes) -> routes.Network:
    """Two hosts that both have docker0, and reach each other by eth0."""
    facts, reached, listening = {}, {}, {}
    for number, name in enumerate(("n1", "n2"), start=1):
        interfaces = {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "eth0": [f"10.0.0.{number}"]}
        facts[name] = {"interfaces": interfaces, "system": {"host": name}, "own": [f"10.0.0.{number}"]}
        listening[name] = {"any": {"172.17.0.1": 40000, f"10.0.0.{number}": 40001}, "port": {}}
    listening["n1"] |= {"port": {"172.17.0.1": 29500, "10.0.0.1": 29500}, "chosen": 29500, "busy": None}
    for source, target, address in (("n1", "n2", "10.0.0.2"), ("n2", "n1", "10.0.0.1")):
        reached[source] = {routes.name_target(target, address, kind): "ok" for kind in ("any", "port")}
        reached[source] |= {routes.name_target(target, "172.17.0.1", kind): "stranger" for kind in ("any", "port")}
    node = LocalNode(name="n1", folder="/f")
    base = {"facts": facts, "one_machine": False, "listening": listening, "reached": reached}
    return routes.Network(**{"nodes": {"n1": node, "n2": replace(node, name="n2")}, **base, **changes})


def choose(network: routes.Network) -> dict:
    return {name: routes.choose_address(network, name) for name in network.facts}


def test_docker0_is_not_mistaken_for_the_other_host():
    network = make_network()
    assert choose(network) == {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    assert choose(make_network(reached={})) == choose(network), "also where nobody reaches anybody"
    assert routes.find_interface(network, "n1", "10.0.0.1") == "eth0"
    (verdict,) = routes.judge_routes(network, choose(network), seconds=2)
    assert verdict.state == "ok"
    assert "n1 on port 29500" in verdict.found


@pytest.mark.parametrize(
    ("options", "chosen", "state", "words"),
    [
        ({}, "10.0.0.1", "ok", "10.0.0.1 on eth0"),
        ({}, "203.0.113.7", "red", "203.0.113.7 is on no interface"),
        ({}, None, "red", "no address that another machine could reach"),
        ({"interface": "eth9"}, "10.0.0.1", "red", "interface eth9 is not there; there are: lo 127.0.0.1"),
        ({"interface": "docker0"}, "10.0.0.1", "red", "10.0.0.1 is on eth0, not on docker0"),
    ],
)
def test_an_address_and_an_interface_have_to_fit(options, chosen, state, words):
    network = make_network()
    network.nodes["n1"] = replace(network.nodes["n1"], **options)
    verdict = routes.judge_address(network, "n1", chosen)
    assert verdict.state == state and words in verdict.found and bool(verdict.fix) == (state == "red")


def test_of_two_networks_the_one_that_works_is_chosen():
    network = make_network()
    network.facts["n2"]["interfaces"] = {"eth0": ["192.168.7.7"], "eth1": ["10.0.0.2"]}
    assert choose(network)["n2"] == "10.0.0.2"
    assert routes.judge_address(network, "n2", "10.0.0.2").found == "10.0.0.2 on eth1"


def test_only_who_knows_the_token_is_the_node(start):
    port = probe.open_listener("127.0.0.1", 0, "secret")
    assert probe.reach("127.0.0.1", port, "secret", 1.0) == "ok"
    assert probe.reach("127.0.0.1", port, "another", 1.0) == "stranger"
    _, silent = start(LISTEN)
    assert probe.reach("127.0.0.1", int(silent), "secret", 0.3) == "stranger"


@pytest.fixture
def claims(monkeypatch):
    """A probe's claims in this process, released afterwards."""
    monkeypatch.setattr(probe, "CLAIMS", made := [])
    yield made
    for holder in made:
        holder.close()


@pytest.mark.parametrize("first", [32768, 20010, 1500])
def test_the_rendezvous_port_is_none_that_the_system_gives_to_outgoing_connections(first, claims, monkeypatch):
    monkeypatch.setattr(probe, "read", lambda path: f"{first}\t60999\n")
    found = {probe.find_free_port() for _ in range(20)}
    assert all(1024 < port < first for port in found) and len(found) > 10


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED HERE: only Linux has abstract names")
def test_two_preflights_at_once_choose_two_ports(claims, monkeypatch):
    monkeypatch.setattr(probe, "FREE_PORTS", (19000, 19001))
    assert {probe.find_free_port(), probe.find_free_port()} == {19000, 19001}
    assert probe.find_free_port() in (19000, 19001), "where all are claimed, one that is free is tried"


def is_claimed(port):
    if (holder := probe.claim(port, "job")) is not None:
        holder.close()
    return holder is None


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED HERE: only Linux has abstract names")
def test_a_port_is_claimed_from_the_preflight_to_the_end_of_the_job(runs, tmp_path):
    (script := tmp_path / "wait.py").write_text("import time; time.sleep(1)")
    job = TorchrunJob(script, nodes=local_nodes(2), program=["python"])
    port = job.preflight().port
    assert is_claimed(port)
    running = job.start(show=False)
    gc.collect()
    assert is_claimed(port), "the preflight is gone, and torchrun may not listen yet"
    running.wait()
    end = time.monotonic() + 5
    while is_claimed(port) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert not is_claimed(port)


def test_the_rendezvous_port_can_be_taken_at_once_afterwards(pair):
    found = look(pair)
    with socket.socket() as listener:  # without SO_REUSEADDR: no connection may be left on it
        listener.bind(("", found.port))


@pytest.mark.parametrize(
    ("address", "state", "words"),
    [
        ("8.8.8.8", "note", "PUBLIC"),
        *((address, "ok", "no password") for address in ("10.0.0.1", "192.168.1.1", "100.64.0.1")),
        ("127.0.0.1", "ok", "no other machine"),
    ],
)
def test_it_says_what_is_open_to_whom_on_every_node(address, state, words):
    verdicts = routes.judge_exposure(make_network(), {"n1": address, "n2": address})
    assert [verdict.node for verdict in verdicts] == ["n1", "n2"]
    for verdict in verdicts:
        assert verdict.state == state and words in verdict.found
        assert bool(verdict.fix) == (state == "note")


def test_an_interface_with_a_public_address_beside_a_private_one_is_public():
    network = make_network()
    network.facts["n2"]["interfaces"]["eth0"].append("8.8.8.8")
    states = {verdict.node: verdict.state for verdict in routes.judge_exposure(network, choose(network))}
    assert states == {"n1": "ok", "n2": "note"}


def test_the_command_line(capsys, start, monkeypatch):
    monkeypatch.setattr(launch_main, "check_nodes", look)
    assert main(["preflight", "--local", "2"]) == 0
    assert "Preflight: all is well" in capsys.readouterr().out
    _, port = start(LISTEN)
    assert main(["preflight", "--local", "2", "--port", port]) == 1
    assert "[red]" in capsys.readouterr().out
    assert main(["preflight", "--local", "2", "--interface", "eth9"]) == 1
    assert "interface eth9 is not there" in capsys.readouterr().out
    assert main(["preflight", "n1", "--local", "2"]) == 1
    assert "do not go together" in capsys.readouterr().err


def test_python_m_works_anywhere(tmp_path, root):
    command = [sys.executable, "-m", "nodelaunch", "jobs"]
    child = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert (child.returncode, child.stderr) == (0, "")


@pytest.fixture
def remote(hosts, tmp_path):
    """n1 and n2 over SSH."""
    return ssh_nodes(["n1", "n2"], config=hosts.ssh_config, python=sys.executable, folder="/node/labs")


def time_check(nodes, **options) -> Preflight:
    started = time.monotonic()
    found = look(nodes, **options)
    assert found.seconds <= time.monotonic() - started <= 10
    return found


@pytest.mark.drill
def test_two_hosts_are_green_in_two_seconds(remote, hosts):
    found = min((time_check(remote) for _ in range(3)), key=lambda found: found.seconds)
    assert found.ok, found
    assert found.seconds <= 2
    assert found.addresses == {node: hosts.address(node) for node in ("n1", "n2")}
    assert found.interfaces == {"n1": "eth0", "n2": "eth0"}


@pytest.mark.drill
def test_the_own_name_on_the_loopback_is_a_note(remote, hosts):
    hosts.set_hosts("n1", "127.0.0.1 localhost\n127.0.1.1 n1\n")
    found = time_check(remote)
    assert found.ok, found
    (verdict,) = find(found, "names", "n1")
    assert verdict.state == "note"
    assert "its own name n1 stands for 127.0.1.1 (/etc/hosts)" in verdict.found
    assert "--local-addr" in verdict.cause
    assert f'"{hosts.address("n1")} n1"' in verdict.fix
    assert found.addresses["n1"] == hosts.address("n1")


@pytest.mark.drill
def test_a_shared_memory_that_is_too_small_is_noted_before_the_start(remote, hosts):
    hosts.run_on("n1", ["mount", "-o", "remount,size=8m", "/dev/shm"])
    try:
        found = time_check(remote)
    finally:
        hosts.run_on("n1", ["mount", "-o", "remount,size=50%", "/dev/shm"])
    assert found.ok, "a job without workers can run"
    (verdict,) = find(found, "memory")
    assert (verdict.node, verdict.state) == ("n1", "note")
    assert "8 MiB of shared memory" in verdict.found and "num_workers=0" in verdict.fix


@pytest.mark.drill
def test_a_firewall_in_one_direction_is_named(remote, hosts):
    hosts.drop("n1", "n2", new=True)
    found = time_check(remote)
    (verdict,) = found.reds
    assert (verdict.node, verdict.check) == ("n1 → n2", "network")
    assert f"n1 does not reach n2 at {hosts.address('n2')}, any port: no answer" in verdict.found
    assert "n2 reaches n1." in verdict.found
    assert f"from {hosts.address('n1')} on n2" in verdict.fix


@pytest.mark.drill
def test_a_closed_rendezvous_port_and_open_others(remote, hosts):
    hosts.drop("n2", "n1", 29517)
    (verdict,) = time_check(remote, port=29517).reds
    assert verdict.node == "n2 → n1"
    assert "port 29517: no answer" in verdict.found and "is open. n1 reaches n2." in verdict.found
    assert f"all TCP from {hosts.address('n2')} on n1" in verdict.fix


@pytest.mark.drill
@pytest.mark.parametrize(("how", "words"), [("tcp-reset", "refused"), ("icmp-admin-prohibited", "No route to host")])
def test_a_firewall_that_refuses_says_so(remote, hosts, how, words):
    rule = ["INPUT", "-s", hosts.address("n1"), "-p", "tcp", "-j", "REJECT", "--reject-with", how]
    hosts.run_on("n2", ["iptables", "-w", "-I", *rule])
    try:
        (verdict,) = [verdict for verdict in time_check(remote).reds if verdict.node == "n1 → n2"]
    finally:
        hosts.run_on("n2", ["iptables", "-w", "-D", *rule])
    assert f"any port: {words}" in verdict.found and "firewall" in verdict.cause


@pytest.mark.drill
def test_a_host_that_is_off_and_one_without_a_name(remote, hosts, monkeypatch):
    assert time_check(remote).ok
    hosts.crash("n2")
    found = time_check(remote)
    assert [verdict.node for verdict in found.reds] == ["n2"]
    assert find(found, "address", "n1")[0].state == "ok"
    # Inside n0, for ssh's own words.
    monkeypatch.setenv("PATH", f"{hosts.tools}:{os.environ['PATH']}")
    unknown = ssh_nodes(["n1", "n7"], config=hosts.inner_config, python=sys.executable, folder="/node/labs")
    (verdict,) = time_check(unknown).reds
    assert verdict.node == "n7"
    assert "n7 is not known on this machine" in verdict.found
    assert "/etc/hosts" in verdict.found
    assert "IP address" in verdict.fix


@pytest.mark.drill
def test_a_leftover_on_another_host_is_stopped_there_alone(remote, hosts, survivors, capsys):
    env = ["env", "LAB_JOB_ID=preflight-far", "sleep", "60"]
    far = [remote[0].popen(env), remote[1].popen(env)]
    config = ["--config", str(hosts.ssh_config), "--python", sys.executable, "--folder", "/node/labs"]
    while len(survivors("preflight-far")) < 2:
        time.sleep(0.05)
    (seen,) = ask_once(local_nodes(1), {"do": "jobs", "id": "preflight-far"}).values()
    assert seen == {"jobs": []}, "what runs in a container is not its host's"
    fixes = [verdict.fix for verdict in find(time_check(remote), "jobs")]
    assert fixes == [f"python -m nodelaunch stop preflight-far {node}" for node in ("n1", "n2")]
    assert main(["stop", "preflight-far", "n1", *config]) == 0
    assert len(survivors("preflight-far")) == 1
    assert main(["stop", "preflight-far", "n1", "n2", *config]) == 0
    assert "n1: no process of preflight-far runs\nn2: 1 process(es) of preflight-far ended" in capsys.readouterr().out
    assert survivors("preflight-far") == []
    for process in far:
        process.communicate(timeout=10)


@pytest.mark.drill
def test_the_interface_that_works_is_offered_for_a_wrong_one(remote, hosts):
    found = time_check([replace(node, interface="eth9") for node in remote])
    assert [verdict.fix for verdict in found.reds] == ['interface="eth0"'] * 2
    assert f"eth0 {hosts.address('n1')}" in found.reds[0].found


@pytest.mark.drill
def test_a_bridge_that_both_hosts_have_is_passed_over(remote, hosts):
    for node in ("n1", "n2"):
        hosts.run_on(node, ["ip", "link", "add", "docker0", "type", "bridge"])
        hosts.run_on(node, ["ip", "addr", "add", "172.17.0.1/16", "dev", "docker0"])
        hosts.run_on(node, ["ip", "link", "set", "docker0", "up"])
    try:
        found = time_check(remote)
        given = time_check([replace(node, interface="docker0") for node in remote])
    finally:
        for node in ("n1", "n2"):
            hosts.run_on(node, ["ip", "link", "del", "docker0"])
    assert found.ok, found
    assert found.interfaces == {"n1": "eth0", "n2": "eth0"}
    assert {verdict.check for verdict in given.reds} == {"network"}
    assert "a bridge such as docker0" in given.reds[0].cause
    assert "leave interface= and address= away" in given.reds[0].fix
