"""The bash script of a node: it is valid, runs what it says, and nothing that stands in it as data becomes code."""

import os
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from drawn import assert_explains

from lab_utils import LabError
from lab_utils.launch.script import Plan, write_script

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
STAND_IN = """#!/bin/sh
printf '%s\\0' "$@" > "$LAB_JOB_FOLDER/argv"
pwd -P > "$LAB_JOB_FOLDER/pwd"
exec /usr/bin/env -0 > "$LAB_JOB_FOLDER/environ"
"""
EACH = 'for script; do bash -n "$script" && bash "$script" || echo "failed: $script"; done'


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
    stand_in = tmp_path / "stand-in"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    plans = [draw_plan(draw, number, tmp_path, stand_in) for number in range(1000)]
    paths = []
    for number, plan in enumerate(plans):
        paths.append(tmp_path / "scripts" / f"{number}.sh")
        paths[-1].write_bytes(write_script(plan).encode(errors="surrogateescape"))
    for first in range(0, 1000, 250):
        batch = ["bash", "-c", EACH, "each", *paths[first : first + 250]]
        done = subprocess.run(batch, cwd=tmp_path, capture_output=True, stdin=subprocess.DEVNULL, timeout=120)
        assert (done.stdout, done.stderr) == (b"", b"")

    for plan, path in zip(plans, paths, strict=True):
        job = Path(plan.job_folder)
        words, environ = read_words(job / "argv"), read_words(job / "environ")
        end = ["-m", "lab_utils.launch.worker", f"{plan.code_folder}/script/{plan.script}", *plan.args]
        assert words[:2] == ["-m", "lab_utils.launch.agent"], path
        assert words[-len(end) :] == end, path
        options = words[2 : -len(end)]
        assert all(option.startswith("--") for option in options), path
        assert f"--log-dir={plan.job_folder}/logs" in options, path
        assert "--log-line-prefix-template=[rank ${rank}] " in options, path
        assert (job / "pwd").read_bytes() == os.fsencode(plan.work_folder) + b"\n", path
        wanted = {
            "PYTHONPATH": f"{plan.code_folder}:{plan.code_folder}/script",
            "LAB_JOB_ID": plan.job_id,
            "LAB_JOB_FOLDER": plan.job_folder,
            **({"GLOO_SOCKET_IFNAME": plan.interface, "NCCL_SOCKET_IFNAME": plan.interface} if plan.interface else {}),
            **plan.env,
        }
        assert {f"{name}={value}" for name, value in wanted.items()} <= set(environ), path
        assert any(word.startswith("OMP_NUM_THREADS=") and word[16:].isdigit() for word in environ), path
    assert not [path for path in tmp_path.rglob("*") if path.name == "canary"], "something escaped"
    assert (tmp_path / "precious").exists()
    assert (tmp_path / "work" / "precious").exists()
    # Nothing was made but the folders that the scripts name.
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"bin", "scripts", "precious", "work", "stand-in", "jobs"}


def test_every_variable_arrives_or_is_refused(tmp_path):
    stand_in = tmp_path / "stand-in"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    # All that bash knows, in upper and lower case, and what the script itself uses.
    listed = subprocess.run(["bash", "-c", "compgen -v"], capture_output=True, text=True, check=True).stdout.split()
    text = write_script(make_plan())
    own = {line.partition("=")[0] for line in text.splitlines() if line.partition("=")[0].isidentifier()}
    assert {"code", "job", "work", "options", "arguments"} <= own
    refused, value = set(), "/bin:a[$(touch canary)]"  # bash computes what it assigns to some of its own variables
    names = sorted({*listed, *own, "PYTHONPATH", "LAB_NODE", "RANDOM", "SECONDS", "LAB_DATA", "NCCL_DEBUG", "PATH"})
    for number, name in enumerate(names):
        job = tmp_path / f"job {number}"
        where = {"job_folder": str(job), "work_folder": str(tmp_path / "work"), "code_folder": str(tmp_path / "code")}
        try:
            text = write_script(make_plan(python=str(stand_in), env={name: value}, **where))
        except LabError as error:
            assert_explains(error, name)
            refused.add(name)
            continue
        done = subprocess.run(["bash", "-c", text], capture_output=True, cwd=tmp_path, timeout=20)
        assert (done.returncode, done.stderr) == (0, b""), name
        assert f"{name}={value}" in read_words(job / "environ"), name
        assert f"{where['code_folder']}/script/train.py" in read_words(job / "argv"), name
    assert not [path for path in tmp_path.rglob("*") if path.name == "canary"]
    assert refused >= {"code", "job", "work", "UID", "LAB_NODE", "PYTHONPATH"}
    assert not refused & {"LAB_DATA", "NCCL_DEBUG", "PATH", "HOME"}


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
    assert "export OMP_NUM_THREADS=$(( ($(nproc) + 3) / 4 ))" in lines


def test_the_cores_are_shared(tmp_path):
    for processes in (1, 2, 3):
        line = next(
            line
            for line in write_script(make_plan(threads=None, nproc_per_node=processes)).splitlines()
            if "nproc)" in line
        )
        done = subprocess.run(
            ["bash", "-c", f'nproc() {{ echo 8; }}\n{line}\necho "$OMP_NUM_THREADS"'], capture_output=True, text=True
        )
        assert int(done.stdout) == {1: 8, 2: 4, 3: 3}[processes]
