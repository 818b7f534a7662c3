"""The bash script of a node: it is valid, runs what it says, and nothing that stands in it as data becomes code."""

import itertools
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from harness.drawn import assert_explains
from harness.fuzzing import ODD_VALUES

from lab_common import LabError
from nodelaunch import TorchrunJob, choose_nodes, local_nodes, slurm_nodes, ssh_nodes
from nodelaunch.backends.sbatch import SlurmRequest, write_sbatch
from nodelaunch.bundle import Bundle
from nodelaunch.script import Plan, write_script
from nodelaunch.spec import JobSpec

# What each would do, if it were code: make a file `canary`, or remove the file `precious`.
BREAKOUTS = [
    "; touch canary",
    "$(touch canary)",
    "`touch canary`",
    "| touch canary",
    "|| touch canary ||",
    "&& touch canary &&",
    "& touch canary &",
    "\ntouch canary\n",
    "\r\ntouch canary\r\n",
    "'; touch canary; '",
    "\"; touch canary; \"",
    "')\ntouch canary\n#",
    "\")\ntouch canary\n: (\"",
    "}; touch canary; {",
    "\\'; touch canary #",
    "$'\\n'touch canary",
    "${x:-$(touch canary)}",
    "$((a[$(touch canary)]))",
    "a[$(touch canary)]=1",
    "<(touch canary)",
    "> canary",
    ">canary",
    "\nEOF\nrm -f precious\n",
    "; rm -f precious ../precious;",
    "' ; rm -f precious ; '",
    "*", "?", "[a-z]*", "[0]=x", "{1..3}", "{a,b}", "~", "~root", "a=~", "!!", "!-1", "#", "# comment", "^x^y",
    "-n", "-e", "--", "-", "-m", "-c touch", "--help", "-rf", "--rdzv-conf=is_host=0",
    "", " ", "  two  words  ", "\t", "\v\f", "\r", "\n", "\n\n", "\\", "\\\\", "\\\n", "it's", "''", '""', '"', "'",
    "`", "$", "$$", "$HOME", "${HOME}", "$@", "$*", "${rank}",
    "%", "%s%n", "%h", "=", "a=b", "a:b", ":", ",", ";", "&", "|",
    "grüße 日本 ✔ 🚀", "‮abc", "\u2028", "\ufeff", "é", "\x01\x02\x1b[31m", "\x7f", "\x1e{}",
    os.fsdecode(b"\xff\xfe"), os.fsdecode(b"a\x80'b"), os.fsdecode(b"\xc3"),
]  # fmt: skip
# Of `torchrun --help` in torch 2.11, the oldest that pyproject.toml allows.
OLDEST = """
duplicate-stderr-filters duplicate-stdout-filters event-log-handler local-addr local-ranks-filter log-dir logs-specs
master-addr master-port max-restarts monitor-interval nnodes no-python node-rank nproc-per-node numa-binding
rdzv-backend rdzv-conf rdzv-endpoint rdzv-id redirects role run-path signals-to-handle standalone start-method tee
virtual-local-rank
"""
OF_THE_OLDEST_TORCHRUN = {f"--{name}" for name in OLDEST.split()}
STAND_IN = """#!/bin/sh
printf '%s\\0' "$@" > "$LAB_JOB_FOLDER/argv"
pwd -P > "$LAB_JOB_FOLDER/pwd"
exec /usr/bin/env -0 > "$LAB_JOB_FOLDER/environ"
"""
EACH = 'for script; do bash -n "$script" && bash "$script" || echo "failed: $script"; done'


class LyingNumber(int):
    """A number that turns into a command where it is printed."""

    def __str__(self):
        return "29500 $(touch canary)"

    __repr__ = __str__

    def __format__(self, how):
        return str(self)


class LyingText(str):
    """A text that turns into a command where it is printed."""

    def __str__(self):
        return "$(touch canary)"

    def __format__(self, how):
        return str(self)


class Broken:
    """An object that cannot be looked at."""

    def _refuse(self, *_):
        raise ZeroDivisionError("not to be looked at")

    __repr__ = __str__ = __len__ = __iter__ = __index__ = __float__ = __eq__ = __hash__ = __fspath__ = _refuse


# What a field may be given that was meant for something else: commands, and values of other types.
ODD = [
    *ODD_VALUES, False, True, 1, 2, 2.0, 0.5, 1e9, -0.0, float("inf"), -(10**400), 10**5000, 80000, 2**63,
    "1", "29500", "29500 $(touch canary)", "1; touch canary", "1\ntouch canary", "²", "٣", "4,2", "nan", "None", "\0",
    np.int64(2), np.float64("nan"), np.True_, np.array([1, 2]), np.str_("$(touch canary)"), 1j, range(10**30), object,
    b"1", b"$(touch canary)", bytearray(b"1"), memoryview(b"1"), Path("; touch canary"), Path("a\0b"), lambda: None,
    itertools.count(), iter("ab"), {"A": None}, {"A": b"1"}, {b"A": "1"}, {1: "1"}, {"A": "$(touch canary)"}, ...,
    {"A;touch canary": "1"}, {"OMP_NUM_THREADS": "1; touch canary"}, {"OMP_NUM_THREADS": "4,2"}, {"touch", "canary"},
    ["a", b"b"], ["a", None], [["$(touch canary)"]], ("$(touch canary)", 1), ["x" * 200_000], "x" * 5000,
    "~nobody-has-this-name/x", LyingNumber(1), LyingText("a"), {"A": LyingText("a")}, [LyingText("a")], Broken(),
    [Broken()],
]  # fmt: skip


def draw_text(draw):
    """One to three of the pieces, in a row, now and then with harmless text between."""
    return draw.choice(["", "", "x", " "]).join(draw.choices(BREAKOUTS, k=draw.choice([1, 1, 2, 3])))


def draw_name(draw):
    """The same as one part of a path: no slash, not too long for a file system."""
    return "w" + draw_text(draw).replace("/", "_")[:50]


def make_plan(**changes):
    """A plan without anything special."""
    plain = Plan(
        job_id="train-1",
        rendezvous_id="5ec2e7",
        node=0,
        node_name="node0",
        nodes=2,
        nproc_per_node=1,
        python="/usr/bin/python3",
        job_folder="/tmp/lab/jobs/train-1",
        code_folder="/tmp/lab/code/abc",
        work_folder="/tmp/lab/work",
        script="train.py",
        args=("--lr", "0.1"),
        address="10.0.0.11",
        head_address="10.0.0.11",
        port=29400,
        interface="eth0",
        threads=1,
    )
    return replace(plain, **changes)


def draw_plan(draw, number, folder, python):
    link = folder / "bin" / f"{number}{draw_name(draw)}"
    link.symlink_to(python)
    node = draw.randrange(2)
    return make_plan(
        job_id=f"job-{number}",
        rendezvous_id=f"{number}",
        node=node,
        node_name=draw_text(draw),
        python=str(link),
        job_folder=f"{folder}/jobs/{number}{draw_name(draw)}",
        code_folder=f"{folder}/code/{draw_name(draw)}".replace(":", "_"),
        work_folder=f"{folder}/work/{number}{draw_name(draw)}",
        script=f"{draw_name(draw)}.py",
        args=tuple(draw_text(draw) for _ in range(draw.randrange(5))),
        address=f"10.0.0.{11 + node}",
        interface=draw.choice([None, "eth0", draw_text(draw)]),
        threads=draw.choice([1, 2, None]),
        rank_order=draw.choice(["address", "nodes"]),
        env={name: draw_text(draw) for name in draw.sample(["A", "_x1", "HOME", "LANG", "LAB_DATA", "FOO_2"], 2)},
    )


def read_words(path):
    return [os.fsdecode(word) for word in path.read_bytes().split(b"\0")[:-1]]


def test_a_thousand_hostile_scripts_run_what_they_say_and_nothing_else(tmp_path):
    draw = random.Random(29)
    for name in ("bin", "scripts"):
        (tmp_path / name).mkdir()
    (tmp_path / "precious").touch()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "precious").touch()
    python = stand_in(tmp_path)
    plans = [draw_plan(draw, number, tmp_path, python) for number in range(1000)]
    paths = []
    for number, plan in enumerate(plans):
        paths.append(tmp_path / "scripts" / f"{number}.sh")
        paths[-1].write_bytes(write_script(plan).encode(errors="surrogateescape"))
    for first in range(0, 1000, 250):
        batch = ["bash", "-c", EACH, "each", *paths[first : first + 250]]
        done = subprocess.run(batch, cwd=tmp_path, capture_output=True, stdin=subprocess.DEVNULL, timeout=300)
        assert (done.stdout, done.stderr) == (b"", b"")

    for plan, path in zip(plans, paths, strict=True):
        job = Path(plan.job_folder)
        words, environ = read_words(job / "argv"), read_words(job / "environ")
        end = ["-m", "nodelaunch.node.worker", f"{plan.code_folder}/script/{plan.script}", *plan.args]
        assert words[:2] == ["-m", "nodelaunch.node.agent"], path
        assert words[-len(end) :] == end, path
        options = words[2 : -len(end)]
        assert all(option.startswith("--") for option in options), path
        assert f"--log-dir={plan.job_folder}/logs" in options, path
        assert {option.partition("=")[0] for option in options} <= OF_THE_OLDEST_TORCHRUN, path
        assert (job / "pwd").read_bytes() == os.fsencode(plan.work_folder) + b"\n", path
        wanted = {
            "PYTHONPATH": plan.code_folder,
            "LAB_JOB_ID": plan.job_id,
            "LAB_JOB_FOLDER": plan.job_folder,
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
            **({"GLOO_SOCKET_IFNAME": plan.interface} if plan.interface else {}),
            **({"NCCL_SOCKET_IFNAME": f"={plan.interface}"} if plan.interface else {}),
            **plan.env,
        }
        assert {f"{name}={value}" for name, value in wanted.items()} <= set(environ), path
        assert any(word.startswith("OMP_NUM_THREADS=") and word[16:].isdigit() for word in environ), path
    assert not [path for path in tmp_path.rglob("*") if path.name == "canary"], "something escaped"
    assert (tmp_path / "precious").exists()
    assert (tmp_path / "work" / "precious").exists()
    # Nothing was made but the folders that the scripts name.
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"bin", "scripts", "precious", "work", "tools", "jobs"}


@pytest.fixture
def ground(tmp_path, monkeypatch):
    """A folder to run scripts in, with a file that must stay; no script reads the package anew."""
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("SLURM_NODEID", "SLURM_NNODES", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr("nodelaunch.job.collect_files", lambda *_: Bundle({}, "abc"))
    monkeypatch.setattr("nodelaunch.plans.find_gpus", dict)
    (tmp_path / "train.py").touch()
    stand_in(tmp_path)
    for name, text in {"srun": 'while [ "$1" != bash ]; do shift; done; exec "$@"', "scontrol": STUB}.items():
        (tmp_path / "tools" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "tools" / name).chmod(0o755)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "precious").touch()
    monkeypatch.chdir(tmp_path / "here")  # where relative paths count from
    return tmp_path


STUB = "[ $2 = node ] && echo NodeName=$3 NodeAddr=127.0.0.1 X=1 || printf 'n1\\nn2\\n'"


def stand_in(folder):
    """A program in torchrun's place, which notes what it was given."""
    (folder / "tools").mkdir()
    path = folder / "tools" / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return str(path)


def write_job(ground, nodes=None, **options):
    """The scripts of a job."""
    python = str(ground / "tools" / "python")
    script = None if "module" in options else ground / "train.py"
    given = {"script": script, "nodes": [replace(local_nodes(1)[0], python=python)], "port": 29500}
    job = TorchrunJob(**{**given, **({} if nodes is None else {"nodes": nodes}), **options})
    return [path.read_bytes() for path in job.write()]


def write_local(ground, **options):
    node = replace(local_nodes(1)[0], python=str(ground / "tools" / "python"))
    return write_job(ground, [replace(node, **options)])


def write_ssh(ground, names="host", **options):
    own = {"folder": f"{ground}/far", "python": str(ground / "tools" / "python")}
    nodes = ssh_nodes(names, **{**own, "interface": "lo", **options})
    given = {**own, **options}
    if not all(isinstance(given[name], str) and given[name].startswith("/") for name in own):
        return []  # the host would have to be asked
    return write_job(ground, [replace(node, address="127.0.0.1") for node in nodes])


def write_slurm(ground, count=2, **options):
    python = str(ground / "tools" / "python")
    texts = write_job(ground, slurm_nodes(count, **{"python": python, "folder": ground / "shared", **options}))
    return texts if "python" not in options or options["python"] else []  # else this Python would run the job


def write_request(ground, **options):
    folders = {name: f"{ground}/{name}" for name in ("job_folder", "code_folder", "work_folder")}
    plan = make_plan(python=str(ground / "tools" / "python"), **folders)
    return [write_sbatch(plan, SlurmRequest(**{"count": 2, **options})).encode()]


def write_plan(ground, **options):
    own = {name: f"{ground}/{name}" for name in ("job_folder", "code_folder", "work_folder")}
    plan = make_plan(**{"python": str(ground / "tools" / "python"), **own, **options})
    return [write_script(plan).encode(errors="surrogateescape")]


SSH = ("names", "python", "folder", "interface", "data", "config")
SLURM = ("count", "partition", "folder", "time_limit", "python", "interface", "extra")
OWNERS: dict[str, tuple[Callable, list[str]]] = {
    "TorchrunJob": (write_job, [field.name for field in fields(JobSpec)]),
    "LocalNode": (write_local, ["name", "folder", "address", "interface", "python", "data", "index", "together"]),
    "local_nodes": (lambda ground, **options: [] * len(local_nodes(**{"count": 1, **options})), ["count", "folder"]),
    "ssh_nodes": (write_ssh, list(SSH)),
    "slurm_nodes": (write_slurm, list(SLURM)),
    "SlurmRequest": (write_request, [field.name for field in fields(SlurmRequest)]),
    "Plan": (write_plan, [field.name for field in fields(Plan)]),
}


@pytest.mark.parametrize("owner", OWNERS)
def test_every_field_takes_no_odd_value_or_does_no_harm_with_it(ground, owner):
    """Every field with every odd value: a LabError, or a script in which it is data."""
    make, names = OWNERS[owner]
    texts, refused = {}, 0
    for first, name in enumerate(names or OWNERS["TorchrunJob"][1]):
        for number, value in enumerate([*ODD, *BREAKOUTS[first % 4 :: 4]]):  # each is in the test above, too
            try:
                for text in make(ground, **{name: value}):
                    texts[name, number] = text
            except LabError as error:
                refused += 1
                check_refusal(error)
    assert refused > 10 * len(names or OWNERS["TorchrunJob"][1])
    run_all(ground, texts)


@pytest.mark.parametrize("name", ["LAB_NODES", "LAB_SSH_CONFIG", "LAB_NODES_DATA", "OMP_NUM_THREADS", "LAB_SCALE"])
def test_every_variable_takes_no_odd_value_or_does_no_harm_with_it(ground, monkeypatch, name):
    odd = [text for text in (*ODD, *BREAKOUTS) if isinstance(text, str) and "\0" not in text and text != "\ud800"]
    odd += ["local:", "local: ", "slurm:", "local:²", "local:٣", "local:1_0", "slurm:" + "9" * 5000, "a,,b", "a\nb"]
    texts = {}
    for number, value in enumerate(odd):
        monkeypatch.setenv(name, value)
        monkeypatch.setenv("LAB_NODES", value if name == "LAB_NODES" else "a,b")
        try:
            nodes = [node for node in choose_nodes() if not hasattr(node, "connections")]
            if len(nodes) == len(choose_nodes()):
                assert value in ("", " ", "\t", "\r", "\n", "\n\n", "\v\f", "\u2028"), value
            for text in write_job(ground):
                texts[name, number] = text
        except LabError as error:
            check_refusal(error)
    run_all(ground, texts)


def check_refusal(error):
    assert error.what and error.where and error.fix, str(error)
    assert len(error.what) <= 120 and "\n" not in error.what, error.what
    assert len(str(error)) < 1500, str(error)[:2000]
    assert all(c.isprintable() or c == "\n" for c in str(error)), str(error)


def run_all(ground, texts):
    """Runs the scripts and asserts that none of them did what stands in them as data."""
    paths = []
    for (name, number), text in texts.items():
        paths.append(ground / f"{name}-{number}.sh")
        paths[-1].write_bytes(text)
    env = {**os.environ, "PATH": f"{ground}/tools:{os.environ['PATH']}"}
    command = ["bash", "-c", 'for script; do bash "$script" < /dev/null; done', "each", *paths]
    here = ground / "here"
    subprocess.run(command, cwd=here, env=env, capture_output=True, timeout=300, check=False)
    assert not [path for path in ground.rglob("*") if path.name == "canary"], "something escaped"
    assert (here / "precious").exists()


def test_every_variable_arrives_or_is_refused(tmp_path):
    python = stand_in(tmp_path)
    # All that bash knows, in upper and lower case, and what the script itself uses.
    listed = subprocess.run(["bash", "-c", "compgen -v"], capture_output=True, text=True, check=True).stdout.split()
    text = write_script(make_plan())
    own = {line.partition("=")[0] for line in text.splitlines() if line.partition("=")[0].isidentifier()}
    assert {"code", "job", "work", "options", "arguments"} <= own
    refused, hostile = set(), "/bin:a[$(touch canary)]"  # bash computes what it assigns to some of its own variables
    names = sorted(
        {
            *listed,
            *own,
            "PYTHONPATH",
            "PYTHONSAFEPATH",
            "LAB_NODE",
            "RANDOM",
            "SECONDS",
            "LAB_DATA",
            "NCCL_DEBUG",
            "PATH",
        }
    )
    for number, name in enumerate(names):
        job = tmp_path / f"job {number}"
        where = {"job_folder": str(job), "work_folder": str(tmp_path / "work"), "code_folder": str(tmp_path / "code")}
        try:
            text = write_script(make_plan(python=python, env={name: hostile}, **where))
        except LabError as error:
            assert_explains(error, name)
            refused.add(name)
            continue
        done = subprocess.run(["bash", "-c", text], capture_output=True, cwd=tmp_path, timeout=20)
        assert (done.returncode, done.stderr) == (0, b""), name
        value = f"{where['code_folder']}:{hostile}" if name == "PYTHONPATH" else hostile
        assert f"{name}={value}" in read_words(job / "environ"), name
        assert f"{where['code_folder']}/script/train.py" in read_words(job / "argv"), name
    assert not [path for path in tmp_path.rglob("*") if path.name == "canary"]
    assert refused >= {"code", "job", "work", "UID", "LAB_NODE", "PYTHONSAFEPATH"}
    assert not refused & {"LAB_DATA", "NCCL_DEBUG", "PATH", "PYTHONPATH", "HOME"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"args": ("a\0b",)}, ["NUL", "a\\u0000b"]),
        ({"script": "a\0.py"}, ["NUL"]),
        ({"work_folder": "/a\0"}, ["NUL"]),
        ({"env": {"A": "\0"}}, ["NUL"]),
        ({"interface": "eth\0"}, ["NUL"]),
        ({"args": ("\ud800",)}, ["half a character"]),
        ({"address": "10.0.0"}, ["10.0.0", "IPv4"]),
        ({"address": "10.0.0.1; touch canary"}, ["IPv4"]),
        ({"head_address": "$(touch canary)"}, ["IPv4"]),
        ({"head_address": "node-with-a-name"}, ["IPv4"]),
        ({"address": "::1"}, ["IPv4"]),
        ({"env": {"A=$(touch canary)": "x"}}, ["variable"]),
        ({"env": {"1A": "x"}}, ["1A"]),
        ({"env": {"": "x"}}, ["variable"]),
        ({"env": {"A\n": "x"}}, ["variable"]),
        ({"env": {"job": "x"}}, ["job"]),
        ({"code_folder": "/home/me/a:b"}, ["':'", "PYTHONPATH"]),
        ({"job_id": "a\ntouch canary"}, ["No job"]),
        ({"job_id": ""}, ["No job"]),
        ({"args": ("x" * 500 + "\0",)}, ["NUL"]),
        ({"env": {"é" * 300: "x"}}, ["variable"]),
    ],
)
def test_what_cannot_be_in_a_script_is_refused(changes, words):
    with pytest.raises(LabError) as caught:
        write_script(make_plan(**changes))
    error = caught.value
    assert error.fix
    assert len(error.what) <= 120
    for word in words:
        assert word in str(error)
    assert str(error).isprintable() or set(str(error)) - {"\n"} == {c for c in str(error) if c.isprintable()}


def read_options(plan):
    """The options of torchrun as the script has them, without the comments."""
    lines = write_script(plan).partition("options=(\n")[2].partition("\n)")[0].splitlines()
    return [line.partition("  # ")[0].strip() for line in lines]


@pytest.mark.parametrize("node", [0, 1])
def test_the_meeting_by_address(node):
    options = read_options(make_plan(node=node, address=f"10.0.0.{11 + node}", join_timeout=7.5))
    assert options[:5] == [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.0.0.11:29400",
        # Whole seconds, and exactly one host, whatever the hosts are called; no question waits for ever.
        f"--rdzv-conf=is_host={int(node == 0)},join_timeout=8,read_timeout=30",
    ]
    assert f"--local-addr=10.0.0.{11 + node}" in options
    assert "--max-restarts=0" in options


@pytest.mark.parametrize("node", [0, 1])
def test_the_meeting_in_the_order_of_the_nodes(node):
    plan = make_plan(node=node, address=f"10.0.0.{11 + node}", rank_order="nodes", join_timeout=2e6)
    options = read_options(plan)
    assert options[2:7] == [
        "--rdzv-backend=static",
        f"--node-rank={node}",
        "--master-addr=10.0.0.11",
        "--master-port=29400",
        "--rdzv-conf=timeout=2000000",
    ]
    assert f"--local-addr=10.0.0.{11 + node}" in options
    assert "--max-restarts=0" in options
    assert not [option for option in options if "is_host" in option or "rdzv-endpoint" in option]


@pytest.mark.parametrize("project", [True, False])
def test_a_module_stands_behind_its_option(project):
    plan = make_plan(module="package.train", script="", project=project, args=("-m", "--lr", "a b"))
    request = SlurmRequest(2)
    torchrun, end = "-m nodelaunch.node.worker -m package.train", '"${arguments[@]}"\n'
    for text in (write_script(plan), write_sbatch(plan, request)):
        assert f"  {torchrun} {end}" in text and "runs the module unchanged" in text
        assert ('nodelaunch.node.place "$code" "$work"' in text) == project
    other = replace(plan, program=("accelerate", "launch"))
    for text in (write_script(other), write_sbatch(other, request)):
        assert f"  accelerate launch -m package.train {end}" in text
    run = pytest.importorskip("torch.distributed.run")
    arguments = run.get_args_parser().parse_args([*torchrun.split(), *plan.args])
    assert (arguments.module, arguments.training_script) == (True, "nodelaunch.node.worker")
    assert arguments.training_script_args == ["-m", "package.train", "-m", "--lr", "a b"]


def test_torchrun_itself_takes_the_options():
    run = pytest.importorskip("torch.distributed.run")
    for order in ("address", "nodes"):
        plan = make_plan(node=1, address="10.0.0.12", rank_order=order, join_timeout=7.5)
        options = [option.strip("'") for option in read_options(plan) if "$" not in option]
        arguments = run.get_args_parser().parse_args([*options, "train.py"])
        config, _, _ = run.config_from_args(arguments)
        timeouts = [int(value) for name, value in config.rdzv_configs.items() if name.endswith("timeout")]
        assert 8 in timeouts, config.rdzv_configs
        assert (config.min_nodes, config.max_nodes, config.local_addr) == (2, 2, "10.0.0.12")


def test_it_is_short_and_every_step_has_its_comment():
    text = write_script(make_plan(node_name="gpu box", env={"LAB_DATA": "/data"}, threads=None, nproc_per_node=4))
    lines = text.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert 'Node 0 of 2, "gpu box", of job train-1' in lines[1]
    assert any("by hand" in line for line in lines[:4])
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120
    options = text.partition("options=(\n")[2].partition("\n)")[0].splitlines()
    assert all("  # " in line for line in options)
    # Each paragraph begins with a comment, but for the three that carry the arguments and the learner's variables.
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    assert sum(part.lstrip().startswith("#") for part in paragraphs) >= 4, paragraphs
    assert "export OMP_NUM_THREADS=$(( ($(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN) + 3) / 4 ))" in lines


def test_the_cores_are_shared(tmp_path):
    for processes in (1, 2, 3):
        line = next(
            line
            for line in write_script(make_plan(threads=None, nproc_per_node=processes)).splitlines()
            if "$(nproc" in line
        )
        done = subprocess.run(
            ["bash", "-c", f'nproc() {{ echo 8; }}\n{line}\necho "$OMP_NUM_THREADS"'], capture_output=True, text=True
        )
        assert int(done.stdout) == {1: 8, 2: 4, 3: 3}[processes]
