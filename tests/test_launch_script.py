"""The bash script of a node: it is valid, runs what it says, and nothing that stands in it as data becomes code."""

import os
import random
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from harness.fuzzing import ODD_VALUES

from lab_common import LabError
from nodelaunch import TorchrunJob, local_nodes, slurm_nodes, ssh_nodes
from nodelaunch.preflight import Preflight
from nodelaunch.script import place_nodes, write_script
from nodelaunch.spec import JobSpec, Launch
from nodelaunch.transfer import Bundle

# What each would do, if it were code: make a file `canary`, or remove the file `precious`.
BREAKOUTS = [
    "; touch canary", "$(touch canary)", "`touch canary`", "| touch canary", "|| touch canary ||",
    "&& touch canary &&", "& touch canary &", "\ntouch canary\n", "\r\ntouch canary\r\n", "'; touch canary; '",
    "\"; touch canary; \"", "')\ntouch canary\n#", "\")\ntouch canary\n: (\"", "}; touch canary; {",
    "\\'; touch canary #", "$'\\n'touch canary", "${x:-$(touch canary)}", "$((a[$(touch canary)]))",
    "a[$(touch canary)]=1", "<(touch canary)", "> canary", ">canary", "\nEOF\nrm -f precious\n",
    "; rm -f precious ../precious;", "' ; rm -f precious ; '",
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


# What a field may be given that was meant for something else: commands, and values of other types.
ODD = [
    *ODD_VALUES, False, True, 1, 2, 2.0, 0.5, 1e9, -0.0, float("inf"), -(10**400), 80000, 2**63,
    "1", "29500", "29500 $(touch canary)", "1; touch canary", "1\ntouch canary", "²", "٣", "4,2", "nan", "None", "\0",
    np.int64(2), np.float64("nan"), np.True_, np.str_("$(touch canary)"), 1j, object, b"1", b"$(touch canary)",
    Path("; touch canary"), Path("a\0b"), lambda: None, iter("ab"), {"A": None}, {b"A": "1"}, {1: "1"},
    {"A": "$(touch canary)"}, ..., {"A;touch canary": "1"}, {"OMP_NUM_THREADS": "1; touch canary"}, {"touch", "canary"},
    ["a", b"b"], ["a", None], [["$(touch canary)"]], ("$(touch canary)", 1), "~nobody-has-this-name/x",
]  # fmt: skip


def draw_text(draw):
    """One to three of the pieces, in a row, now and then with harmless text between."""
    return draw.choice(["", "", "x", " "]).join(draw.choices(BREAKOUTS, k=draw.choice([1, 1, 2, 3])))


def draw_name(draw):
    """The same as one part of a path: no slash, not too long for a file system."""
    return "w" + draw_text(draw).replace("/", "_")[:50]


def far_nodes(**options):
    """Two hosts of which everything is known, so that nobody has to ask them."""
    nodes = ssh_nodes(["n1", "n2"], **{"folder": "/f", "python": "/p/python", "interface": "eth0", **options})
    return [replace(node, address=f"10.0.0.{number}") for number, node in enumerate(nodes, start=11)]


def write_texts(nodes=None, **options):
    """The scripts of a job's nodes, or the batch script."""
    job = TorchrunJob(**{"script": "/home/me/train.py", "nodes": nodes or far_nodes(), "port": 29400, **options})
    launch = Launch("train-1", "5ec2e7", Path("/tmp/lab/jobs/train-1"))
    places = place_nodes(job.spec, launch, "abc", Preflight())
    return list(job._backend.write(job.spec, launch, places).values())


@pytest.mark.parametrize("nodes", ["hosts", "slurm"])
def test_what_a_job_relies_on_comes_after_its_env(nodes):
    """A job's variables of the same name have no effect, so that its guard, and ``stop``, still find its processes."""
    env = {"LAB_JOB_ID": "odd", "PET_RDZV_ID": "odd", "head": "odd", "LAB_LIMIT": "odd", "code": "odd", "MINE": "1"}
    text = write_texts(slurm_nodes(2) if nodes == "slurm" else None, env=env)[0]
    last = {name: text.rfind(f"{name}=odd") for name in env}
    for name in ("LAB_JOB_ID", "PET_RDZV_ID", "LAB_LIMIT", "code", *(["head"] if nodes == "slurm" else [])):
        assert 0 < last[name] < text.rfind(f"{name}="), name
    assert "export MINE=1" in text


def draw_script(draw, number, folder, python):
    """Writes the script of one of two nodes with hostile names, and returns it with what it was made of."""
    link = folder / "bin" / f"{number}{draw_name(draw)}"
    link.symlink_to(python)
    own = f"{folder}/nodes/{number}{draw_name(draw)}".replace(":", "_")
    nodes, index = far_nodes(folder=own, python=str(link)), draw.randrange(2)
    interface = draw.choice([None, "eth0", f"e{draw_text(draw)}"])
    nodes = [replace(node, name=f"{node.name}{draw_text(draw)}", interface=interface) for node in nodes]
    spec = JobSpec(
        script=folder / f"{draw_name(draw)}.py",
        args=[draw_text(draw) for _ in range(draw.randrange(5))],
        nodes=nodes,
        port=29400,
        rank_order=draw.choice(["address", "nodes"]),
        env={name: draw_text(draw) for name in draw.sample(["A", "_x1", "HOME", "LANG", "LAB_DATA", "FOO_2"], 2)},
    )
    launch = Launch(f"job-{number}", f"{number}", folder)
    place = place_nodes(spec, launch, "abc", Preflight())[index]
    return spec, place, write_script(spec, launch, place).encode(errors="surrogateescape")


def read_words(path):
    return [os.fsdecode(word) for word in path.read_bytes().split(b"\0")[:-1]]


def test_a_thousand_hostile_scripts_run_what_they_say_and_nothing_else(tmp_path):
    draw = random.Random(29)
    for name in ("bin", "scripts"):
        (tmp_path / name).mkdir()
    (tmp_path / "precious").touch()
    python = stand_in(tmp_path)
    drawn = [draw_script(draw, number, tmp_path, python) for number in range(1000)]
    paths = []
    for number, (_, _, text) in enumerate(drawn):
        paths.append(tmp_path / "scripts" / f"{number}.sh")
        paths[-1].write_bytes(text)
    for first in range(0, 1000, 250):
        batch = ["bash", "-c", EACH, "each", *paths[first : first + 250]]
        done = subprocess.run(batch, cwd=tmp_path, capture_output=True, stdin=subprocess.DEVNULL, timeout=300)
        assert (done.stdout, done.stderr) == (b"", b"")

    for (spec, place, _), path in zip(drawn, paths, strict=True):
        job = Path(place.job_folder)
        words, environ = read_words(job / "argv"), read_words(job / "environ")
        end = ["-m", "nodelaunch.node.worker", f"{place.code_folder}/script/{spec.script.name}", *spec.args]
        assert words[:2] == ["-m", "nodelaunch.node.agent"], path
        assert words[-len(end) :] == end, path
        options = words[2 : -len(end)]
        assert all(option.startswith("--") for option in options), path
        assert f"--log-dir={place.job_folder}/logs" in options, path
        assert (job / "pwd").read_bytes() == os.fsencode(f"{place.node.folder}/work\n"), path
        wanted = {
            "PYTHONPATH": place.code_folder,
            "LAB_JOB_FOLDER": place.job_folder,
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
            **({"GLOO_SOCKET_IFNAME": place.interface} if place.interface else {}),
            **({"NCCL_SOCKET_IFNAME": f"={place.interface}"} if place.interface else {}),
            **spec.env,
        }
        assert {f"{name}={value}" for name, value in wanted.items()} <= set(environ), path
        assert any(word.startswith("OMP_NUM_THREADS=") and word[16:].isdigit() for word in environ), path
    assert not [path for path in tmp_path.rglob("*") if path.name == "canary"], "something escaped"
    assert (tmp_path / "precious").exists()
    # Nothing was made but the folders that the scripts name.
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "scripts", "precious", "tools", "nodes"}


def stand_in(folder):
    """A program in torchrun's place, which notes what it was given."""
    (folder / "tools").mkdir()
    path = folder / "tools" / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return str(path)


def write_job(folder, node, **options):
    """The script of a job with this option, or with a node that has it."""
    node = replace(local_nodes(1)[0], python=str(folder / "tools" / "python"), **node)
    (path,) = TorchrunJob(**{"script": folder / "train.py", "nodes": [node], "port": 29500, **options}).write()
    return path.read_bytes()


OWNERS = {
    "TorchrunJob": [field.name for field in fields(JobSpec)],
    "LocalNode": ["name", "folder", "interface", "data"],
}


@pytest.mark.parametrize("owner", OWNERS)
def test_every_field_takes_no_odd_value_or_does_no_harm_with_it(owner, tmp_path, monkeypatch):
    """Every field with every odd value: a LabError, or a script in which it is data."""
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("nodelaunch.job.collect_files", lambda *_: Bundle({}, "abc"))  # it is not read again each time
    monkeypatch.setattr("nodelaunch.script.find_gpus", dict)
    (tmp_path / "train.py").touch()
    stand_in(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "precious").touch()
    monkeypatch.chdir(tmp_path / "here")  # where relative paths count from
    paths, refused = [], 0
    for first, name in enumerate(OWNERS[owner]):
        for number, value in enumerate([*ODD, *BREAKOUTS[first % 4 :: 4]]):  # each is in the test above, too
            node, options = ({}, {name: value}) if owner == "TorchrunJob" else ({name: value}, {})
            try:
                text = write_job(tmp_path, node, **options)
            except LabError as error:
                refused += 1
                assert error.what and error.where and error.fix, str(error)
                assert len(error.what) <= 120 and "\n" not in error.what, error.what
                assert all(c.isprintable() or c == "\n" for c in str(error)), str(error)
            else:
                paths.append(tmp_path / f"{name}-{number}.sh")
                paths[-1].write_bytes(text)
    assert refused > 10 * len(OWNERS[owner]) and paths
    command = ["bash", "-c", 'for script; do bash "$script" < /dev/null; done', "each", *paths]
    subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert not [path for path in tmp_path.rglob("*") if path.name == "canary"], "something escaped"
    assert (tmp_path / "here" / "precious").exists()


def test_the_cores_are_shared(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for processes, share in {1: 8, 2: 4, 3: 3}.items():
        lines = write_texts(nproc_per_node=processes)[0].splitlines()
        (line,) = [line for line in lines if line.startswith("export OMP_NUM_THREADS")]
        command = ["bash", "-c", f'nproc() {{ echo 8; }}\n{line}\necho "$OMP_NUM_THREADS"']
        assert int(subprocess.run(command, capture_output=True, text=True).stdout) == share
