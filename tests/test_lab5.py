"""Lab 5 on two hosts: a learner's way through it in a browser, with nodes that SSH reaches; the preflight by itself."""

import os
import re
import shutil
import subprocess
import sys

import nbformat
from harness.jobs import list_processes
from harness.lab_pages import find_faults, find_stubs, go_the_learner_s_way
from harness.lab_server import BRIEF, start_lab

NAME = "05_ddp_two_nodes.ipynb"
# What has to be in the output of a cell; each a regular expression.
SAID = {
    "imports": ["scale small, 2 nodes: n1, n2"],
    "four-numbers": [f"rank {rank} had {rank + 1} and has 10" for rank in range(4)],
    "ddp-script": ["✔ 5.1"],
    "two-commands": ["✔ 5.2"],
    "preflight": [r"n1, n2 +network +each reaches each", r"10\.77\.\d+\.12 on eth0", "Preflight: all is well"],
    "node-script": ["--local-addr=10[.]77[.]", "GLOO_SOCKET_IFNAME=eth0", "/node/home/distributed-training-labs/"],
    "train": [
        r"rank 0 on n1 \(10\.77\.\d+\.11",
        r"rank 1 on n2 \(10\.77\.\d+\.12",
        r"\[rank 0\] epoch 5: loss \S+, accuracy \S+ on \d+ images",
        "✔ in an epoch no image came twice",
    ],
    "proof": [
        *(f"✔ {what} of 2 nodes equal those of one process" for what in ("gradients", "weights", "losses")),
        "✔ all ranks hold the same weights, bit for bit",
    ],
    "measure": ["^measured now"],
    "overlap-figure": ["^3 buckets of 9, 26, 9 MB"],
    "scaling-table": [
        r"^the median error of the predictions is \d+ %",
        r"^sending keeps the cores \d+ to \d+ % busy",
        "^cifar",
    ],
    "what-if": ["233 MB"],
    "plan": ["Goyal"],
    "wrong-interface": [
        *("interface eth9 is not there", "eth0 10[.]77[.]", "where: n1", "fix: interface="),
        *("on n2, start by hand: bash /node/home/", "Not all nodes joined in time; missing: n2"),
    ],
    "dead-rank": [
        *("^Rank 1 on n2 was killed by signal 9", "^  rank 0 failed as a consequence: ", "^  log: /.*log$"),
        *(r"^Rank 1 on n2 was in time\.sleep\(3600\)", *(rf"rank {rank} stood at: failing.py" for rank in (0, 1))),
    ],
    "crash": [
        "started anew after: rank 1 on n2: killed by signal 9",
        "resumed after step 10 of 30",
        "✔ the images since then are",
        "✔ the weights at the end are",
    ],
    "lost-node": [
        r"\[rank 1\] this node is lost",
        r"\[rank 0\] epoch 3",
        "✔ one node took every image of the second epoch once",
    ],
    "find-forgotten": ["✔ 5.3"],
    "accumulate": ["✔ 5.4"],
    "calibration": ["There is no guess of yours"],  # this learner makes none
}


def test_a_learner_meets_each_stub_solves_it_and_runs_the_lab_on_two_hosts_and_again(
    hosts, cinic_folder, chromium, root, tmp_path, monkeypatch, keep
):
    for name, value in {"LAB_NODES": "n1,n2", "LAB_SSH_CONFIG": str(hosts.ssh_config)}.items():
        monkeypatch.setenv(name, value)
    homes = [hosts.disk(node) / "home" / "distributed-training-labs" for node in ("n1", "n2")]
    original = root / "notebooks" / NAME
    try:
        with start_lab(tmp_path, cinic_folder) as lab:
            page = lab.open(NAME)
            assert go_the_learner_s_way(page, original, lab.folder) == find_stubs(original)
            faults = find_faults(page, lab.folder / NAME)
            keep(page, original.stem)
            assert not faults, "\n".join(["", *faults])
            page.close()
            lab.end_kernels()
            expect_said(lab.folder / NAME)
            expect_jobs(lab.runs, homes)
            if not BRIEF:
                lab.run_again(NAME)
    finally:
        for home in homes:
            shutil.rmtree(home, ignore_errors=True)


def expect_said(path):
    """Asserts that each cell of the notebook printed what it must."""
    notebook = nbformat.read(path, as_version=4)
    outputs = {cell.id: read_output(cell) for cell in notebook.cells if cell.cell_type == "code"}
    for cell, words in SAID.items():
        for word in words:
            assert re.search(word, outputs[cell], re.MULTILINE), f"{word!r} is not in cell {cell}:\n{outputs[cell]}"


def expect_jobs(runs, homes):
    """Asserts that the lab ran nothing on the launcher's machine, and left nothing on any."""
    ids = {path.name for path in (runs / "jobs").iterdir()}
    for number, home in enumerate(homes):
        there = {path.name for path in (home / "jobs").iterdir()}
        # Those that were meant for this node, and no others: some of the lab's jobs run on the first one alone, and
        # a check runs its own on this machine.
        scripts = {job_id: runs / "jobs" / job_id / f"node{number}.sh" for job_id in ids}
        title = f'"n{1 + number}"'
        wanted = {job_id for job_id, path in scripts.items() if path.is_file() and title in path.read_text()[:200]}
        assert there == wanted
        assert len(there) == (11, 10)[number]  # of which one runs on n1 alone
        assert (home / "data" / "packed" / "cinic10" / "manifest.json").is_file()
    assert [list(list_processes(job_id)) for job_id in ids] == [[]] * len(ids)


def read_output(cell) -> str:
    """Returns a cell's output as text."""
    parts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def look(hosts, folder, *argv):
    command = [sys.executable, "-m", "nodelaunch", "preflight", *argv, "--config", str(hosts.ssh_config)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, env={**os.environ})


def test_the_preflight_works_in_a_terminal_as_the_readme_says(hosts, root, tmp_path):
    assert "python -m nodelaunch preflight" in (root / "notebooks" / NAME).read_text()
    good = look(hosts, tmp_path, "n1", "n2")
    assert (good.returncode, good.stderr) == (0, "")
    lines = good.stdout.splitlines()
    states = [re.match(r"\[(ok|note|red)\] +(n1|n2|n1, n2) +\w+ +\S", line) for line in lines[:-1] if line[0] == "["]
    assert len(states) >= 8 and all(states), good.stdout
    assert {state[1] for state in states} <= {"ok", "note"}
    assert re.fullmatch(r"Preflight: (all is well|\d+ to note); \d+\.\d s\.", lines[-1])
    assert f"{hosts.address('n2')} on eth0" in good.stdout

    hosts.drop("n1", "n2")
    bad = look(hosts, tmp_path, "n1", "n2")
    assert (bad.returncode, bad.stderr) == (1, "")
    assert bad.stdout.startswith("[red]"), "what has to be mended stands first"
    assert re.search(r"^ +fix: ", bad.stdout, re.MULTILINE), bad.stdout
    assert re.match(r"Preflight: \d+ red", bad.stdout.splitlines()[-1])

    wrong = look(hosts, tmp_path, "n1", "n2", "--interface", "eth9")
    assert wrong.returncode == 1 and "interface eth9 is not there" in wrong.stdout

    twice = look(hosts, tmp_path, "n1", "n1")
    assert twice.returncode == 1 and "its own host" in twice.stderr and not twice.stdout
