"""Exercise 13.3: a TrainJob for Kubernetes and a SkyPilot task, compared with the job that the launcher would start.

The schemas of both projects (``data/schemas``) decide whether the files are valid; a table has the value of each field.
torchrun's own parser reads each node's command. A shell resolves what a command asks it for, with the variables that
Kubeflow Trainer and SkyPilot set and with programs that only note how they were called.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

import jsonschema
import yaml

from course.check.judge import AnyOf, judge
from course.check.verdicts import NotYetError, expect
from course.exercises.torchrun import parse_torchrun
from lab_common import checkout

NODES, PROCESSES, GIBIBYTES, RESTARTS = 2, 4, 32, 3
SCRIPT, ARGUMENTS = "train_preempted.py", ("--epochs=90", "--checkpoint=/shared/run.pt")
GPU = "A100"
TRAINJOB, TASK = "TrainJob", "SkyPilot task"
# What a pod and a SkyPilot node have in their environment; the addresses are those of examples (RFC 5737).
POD, PORT = "shapes-node-0-0.shapes", "29500"
ADDRESSES = ("192.0.2.11", "192.0.2.12")
TOOLS = ("awk", "bash", "cat", "cut", "grep", "head", "sed", "sh", "sort", "tail", "tr")
# A program that is not there does nothing, and `uv run` starts what stands behind it.
HANDLER = 'command_not_found_handle() { [ "$1 $2" != "uv run" ] || { shift 2; "$@"; }; }'
SECONDS = 10
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
GIVEN = "leave the lines that are given as they are, and add yours"
STARTS = f"torchrun starts the processes of a node: torchrun {SCRIPT} …, with each word of a list as an item of its own"


def verify_cloud_files(answer: Callable) -> str:
    """Reads both files, and compares what each node of them would start with the launcher's job."""
    given = [(checkout() / "notebooks" / "scripts" / name).read_text() for name in ("trainjob.yaml", "sky_task.yaml")]
    found = answer(*given)
    good = isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(one, str) for one in found)
    shown = "None" if found is None else f"{type(found).__name__} {str(found)[:60]}"
    hint = "return both texts: return trainjob, task"
    expect(good, "what write_files returns", yours=shown, expected="two texts", hint=hint)
    trainjob, task = (_read(text, name) for text, name in zip(found, (TRAINJOB, TASK), strict=True))
    _expect_valid(trainjob, "kubeflow_trainjob", TRAINJOB)
    _judge_trainjob(trainjob, yaml.safe_load(given[0]))
    _expect_valid({name: one for name, one in task.items() if one is not None}, "skypilot_task", TASK)
    _expect_valid(task.get("resources") or {}, "skypilot_resources", f"{TASK}: resources")
    _judge_task(task)
    ranks = f"{NODES} nodes with {PROCESSES} processes each, {SCRIPT} with its checkpoint, {GIBIBYTES} GiB"
    return f"both are valid and ask for the launcher's job: {ranks}; on spot machines in two places"


def _judge_nodes(nodes: object, case: str) -> None:
    hint = "without it there is one node"
    judge(nodes, right=NODES, case=case, wrong={"it counts nodes, and not processes": NODES * PROCESSES}, hint=hint)


def _read(text: str, name: str) -> dict:
    hint = "indent by spaces: what belongs to a key stands deeper, and what stands beside it as deep"
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        yours = " ".join(str(error).split())[:200]
        raise NotYetError(f"{name}: YAML", yours=yours, expected="YAML", hint=hint) from error
    expect(isinstance(found, dict), name, yours=type(found).__name__, expected="a mapping of keys", hint=hint)
    return found


# What the schemas say


@functools.cache
def _find_validator(schema: str) -> jsonschema.protocols.Validator:
    known = json.loads((checkout() / "data" / "schemas" / f"{schema}.json").read_text())
    if schema.startswith("kubeflow"):
        _close(known)

    def ignore_case(validator: object, names: list[str], found: object, schema: dict) -> object:
        if isinstance(found, str) and found.lower() not in names:
            yield jsonschema.ValidationError(f"{found!r} is not one of {', '.join(names)}")

    # SkyPilot extends Draft 7 by this keyword; Kubernetes' schemas have nothing that differs between the drafts.
    kind = jsonschema.validators.extend(jsonschema.Draft7Validator, {"case_insensitive_enum": ignore_case})
    return kind(known)


def _close(schema: object) -> None:
    """Makes a schema refuse unknown fields, as ``kubectl apply`` does; the schema leaves that to Kubernetes."""
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict) and "type" in schema:
            schema.setdefault("additionalProperties", False)
        for one in schema.values():
            _close(one)
    elif isinstance(schema, list):
        for one in schema:
            _close(one)


def _expect_valid(found: object, schema: str, name: str) -> None:
    error = jsonschema.exceptions.best_match(_find_validator(schema).iter_errors(found))
    if error is None:
        return
    path, expected = ".".join(map(str, error.absolute_path)) or "the file", str(error.validator_value)[:120]
    hint = f"look at this field: a number has no quotes, and a list is [torchrun, …]. {error.message}"[:200]
    if error.validator == "additionalProperties":
        known = error.schema.get("properties", {})
        expected = "one of " + ", ".join(key for key in known if not key.startswith("_"))[:200]
        hint = "a field is misspelt, or stands at the wrong depth"
    elif error.validator == "pattern" and "KMGTPE" in expected:
        expected, hint = "a quantity, such as 8Gi", "Kubernetes writes 1 GiB as 1Gi: no B at the end, and no space"
    yours = f"{path}: {error.message}"[:200]
    raise NotYetError(f"{name}: its schema refuses it", yours=yours, expected=expected, hint=hint)


# The fields of a TrainJob


def _judge_trainjob(job: dict, given: dict) -> None:
    spec = job.get("spec") or {}
    trainer = spec.get("trainer") or {}
    resources = trainer.get("resourcesPerNode") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    added = {name: one for name, one in trainer.items() if name not in given["spec"]["trainer"]}
    kept = job | {"spec": spec | {"trainer": {name: one for name, one in trainer.items() if name not in added}}}
    judge(kept, right=given, case=f"{TRAINJOB}: the lines that are given", hint=GIVEN)
    _judge_nodes(trainer.get("numNodes"), f"{TRAINJOB}: spec.trainer.numNodes")
    own = {one["name"]: str(one.get("value", "")) for one in trainer.get("env") or ()}
    hint = "Kubeflow Trainer sets the PET_ variables itself, and refuses a job that does: leave them out"
    set_here = [name for name in own if name.startswith("PET_")]
    judge(set_here, right=[], case=f"{TRAINJOB}: env", hint=hint)
    judge(
        str(limits.get("nvidia.com/gpu")),
        right=str(PROCESSES),
        case=f"{TRAINJOB}: nvidia.com/gpu of a node",
        wrong={"resourcesPerNode is for one node, and not for the job": str(NODES * PROCESSES)},
        hint=f"resourcesPerNode.limits: a GPU for each process, nvidia.com/gpu: {PROCESSES}, among the limits",
    )
    memory, most = requests.get("memory", limits.get("memory")), limits.get("memory")
    judge(
        _as_bytes(memory),
        right=GIBIBYTES * 2**30,
        case=f"{TRAINJOB}: memory of a node, {memory}",
        wrong={
            f"a node has {PROCESSES} processes of so much each": GIBIBYTES // PROCESSES * 2**30,
            "resourcesPerNode is for one node, and not for the job": NODES * GIBIBYTES * 2**30,
            "G is 10^9 bytes, Gi is 2^30: write Gi": GIBIBYTES * 10**9,
        },
        hint=f"resourcesPerNode: {GIBIBYTES // PROCESSES} GiB for each of {PROCESSES} processes, {GIBIBYTES}Gi",
    )
    refused = most is not None and _as_bytes(most) < _as_bytes(memory)
    hint = "a limit below the request is refused by Kubernetes"
    expect(not refused, f"{TRAINJOB}: limits.memory", yours=most, expected=f"{GIBIBYTES}Gi", hint=hint)
    _judge_pods(trainer, own)


def _as_bytes(quantity: int | str | None) -> float:
    number, unit = re.fullmatch(r"([+-]?[\d.]*)(.*)", str(quantity)).groups()
    return float(number or 0) * UNITS.get(unit, 1)


def _judge_pods(trainer: dict, own: Mapping[str, str]) -> None:
    """Judges what each pod starts."""
    words = [*(trainer.get("command") or ()), *(trainer.get("args") or ())]
    asked = str(trainer.get("numProcPerNode") or "auto")
    calls = []
    for node in range(NODES):
        env = dict(own)
        env |= {"PET_NNODES": str(NODES), "PET_NPROC_PER_NODE": asked, "PET_NODE_RANK": str(node)}
        env |= {"PET_MASTER_ADDR": POD, "PET_MASTER_PORT": PORT}
        argv = [_replace(word, env) for word in words]
        if [Path(word).name for word in argv[:1]] in (["bash"], ["sh"]) and len(argv) > 2:
            argv = _run_shell(argv[2], env, TRAINJOB)
        else:
            hint = "no shell reads the command: leave the option out, as Kubeflow sets the PET_ variables for torchrun"
            dollar = [word for word in argv if re.search(r"\$\{?[A-Z]", word)]
            judge(dollar, right=[], case=f"{TRAINJOB}: variables of a shell in the command", hint=hint)
        calls.append(_read_call(argv, env, TRAINJOB))
        _judge_call(calls[-1], TRAINJOB, node, POD)
    _judge_meeting(calls, TRAINJOB)


def _replace(word: str, env: Mapping[str, str]) -> str:
    """Replaces $(NAME) in a command as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda name: env.get(name[1], name[0]), word)


# The fields of a SkyPilot task


def _judge_task(task: dict) -> None:
    resources = task.get("resources") or {}
    _judge_nodes(task.get("num_nodes"), f"{TASK}: num_nodes")
    judge("/shared" in (task.get("file_mounts") or {}), right=True, case=f"{TASK}: /shared", hint=GIVEN)
    lists = [one for one in ("any_of", "ordered") if resources.get(one)]
    judge(
        lists,
        right=AnyOf((["any_of"], ["ordered"])),
        case=f"{TASK}: resources, places",
        wrong={"SkyPilot takes one of the two: any_of for the cheapest, ordered for your order": ["any_of", "ordered"]},
        hint="any_of, below resources: a list of places, such as [{infra: aws/us-east-1}, {infra: gcp/us-central1}]",
    )
    base = {key: one for key, one in resources.items() if key != lists[0]}
    candidates = [base | one for one in resources[lists[0]]]
    for number, one in enumerate(candidates):
        _judge_candidate(one, f"{TASK}: candidate {number + 1} of {len(candidates)}")
    places = [_name_place(one) for one in candidates]
    several = len(set(places)) > 1 and "anywhere" not in places
    hint = "each candidate has a place of its own: infra: cloud/region"
    expect(several, f"{TASK}: places", yours=", ".join(places), expected="two different ones", hint=hint)
    _judge_run(task.get("run"))


def _judge_candidate(one: dict, case: str) -> None:
    """Judges what SkyPilot looks for in one place."""
    count = float(PROCESSES)
    judge(
        one.get("accelerators"),
        right=AnyOf((f"{GPU}:{PROCESSES}", {GPU: count}, [f"{GPU}:{PROCESSES}"])),
        case=f"{case}: accelerators",
        hint=f"accelerators are for one node: {GIVEN}",
    )
    hint = "use_spot: true, beside accelerators, so that it holds for every place"
    judge(one.get("use_spot"), right=True, case=f"{case}: use_spot", hint=hint)
    judge(
        re.sub("(gb|gib)", "", str(one.get("memory")).lower()),
        right=f"{GIBIBYTES}+",
        case=f"{case}: memory",
        wrong={
            "a number alone asks for machines with exactly so much, mostly without GPUs: add +": str(GIBIBYTES),
            f"a node has {PROCESSES} processes of so much each": f"{GIBIBYTES // PROCESSES}+",
        },
        hint=f"memory: {GIBIBYTES}+, at least so many GiB on each node; no unit behind it",
    )
    found = one.get("job_recovery") or {}
    found = {"strategy": found} if isinstance(found, str) else found
    strategy = str(found.get("strategy") or "FAILOVER").upper()
    judge(
        (strategy, found.get("max_restarts_on_errors")),
        right=AnyOf((("FAILOVER", RESTARTS), ("EAGER_NEXT_REGION", RESTARTS))),
        case=f"{case}: job_recovery",
        hint="a lost machine is always replaced; an error of the script is not: max_restarts_on_errors alone",
    )


def _name_place(one: dict) -> str:
    found = one.get("infra") or "/".join(one[key] for key in ("cloud", "region", "zone") if one.get(key))
    return "/".join(found.lower().split("/")[:2]) if found and found != "*" else "anywhere"  # a zone is no other region


def _judge_run(run: str | None) -> None:
    """Judges what each node starts."""
    hint = "run: | and below it the lines that each node runs"
    expect(bool(run), f"{TASK}: run", yours="nothing", expected=f"torchrun … {SCRIPT} …", hint=hint)
    calls = []
    for node in range(NODES):
        env = {
            "SKYPILOT_NUM_NODES": str(NODES),
            "SKYPILOT_NODE_RANK": str(node),
            "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES),
            "SKYPILOT_NUM_GPUS_PER_NODE": str(PROCESSES),
        }
        calls.append(_read_call(_run_shell(run, env, TASK), {}, TASK))
        _judge_call(calls[-1], TASK, node, ADDRESSES[0])
    _judge_meeting(calls, TASK)


# The command of a node


def _run_shell(text: str, env: Mapping[str, str], name: str) -> list[str]:
    """Runs the lines of a shell as a node does; returns the words of the last torchrun that they call."""
    with tempfile.TemporaryDirectory(prefix="lab13-") as folder:
        programs, work, words = (Path(folder, part) for part in ("programs", "work", "words"))
        programs.mkdir()
        (work / "scripts").mkdir(parents=True)  # where the lab has the script
        (work / "handler").write_text(HANDLER)
        for tool in TOOLS:
            if found := shutil.which(tool):
                (programs / tool).symlink_to(found)
        for program in ("torchrun", "python", "python3"):
            note = f'#!{programs}/sh\nprintf "%s\\0" {program} "$@" > "{words}"\n'
            (programs / program).write_text(note)
            (programs / program).chmod(0o755)
        env = {"PATH": str(programs), "HOME": str(work), "BASH_ENV": str(work / "handler"), **env}
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        try:
            ended = subprocess.run([programs / "bash", "-c", text], cwd=work, env=env, timeout=SECONDS, **options)
            said = ended.stderr.decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            said = f"it runs for {SECONDS} s: start torchrun at once"
        if words.exists():
            return words.read_text().split("\0")[:-1]
    yours = said.splitlines()[-1][:160] if said else "nothing is started"
    hint = f"{STARTS}. The check has no files of yours, such as one that is read by source"
    raise NotYetError(f"{name}: the command", yours=yours, expected=f"torchrun {SCRIPT} …", hint=hint)


def _read_call(argv: Sequence[str], env: Mapping[str, str], name: str) -> dict[str, object]:
    """Parses a command with torchrun's own parser, which reads missing options from the environment."""
    words = list(argv[1:] if argv[:1] == ["torchrun"] else argv[3:])
    launched = argv[:1] == ["torchrun"] or argv[1:3] == ["-m", "torch.distributed.run"]
    yours, expected = " ".join(argv)[:160] or "none", f"torchrun [options] {SCRIPT} …"
    expect(launched, f"{name}: the command", yours=yours, expected=expected, hint=STARTS)
    own = {key: one for key, one in os.environ.items() if not key.startswith("PET_")}
    hint = "write torchrun's options as its help has them, then the script and its arguments. "
    hint += "A line of bash ends the command: put \\ at the end of a line that goes on"
    with mock.patch.dict(os.environ, {**own, **env}, clear=True):
        return vars(parse_torchrun(words, case=f"{name}: {yours[:80]}", expected=expected, hint=hint))


def _judge_call(call: Mapping[str, object], name: str, node: int, head: str) -> None:
    """Judges a node's place among the others, and the script that it runs."""
    judge(
        "--standalone" if call["standalone"] else str(call["nnodes"]),
        right=AnyOf((str(NODES), f"{NODES}:{NODES}")),
        case=f"{name}: nodes that torchrun waits for",
        wrong={"a range goes on with fewer nodes: the launcher's job has exactly two": f"1:{NODES}"},
        hint="a torchrun that knows of one node trains alone, and the other one trains the same once more: --nnodes. "
        "(In a TrainJob numNodes is there: leave the options out of the command)",
    )
    judge(
        call["nproc_per_node"],
        right=AnyOf((str(PROCESSES), "gpu", "auto")),
        case=f"{name}: processes on each node",
        wrong={f"these are the processes of all nodes together; a node has {PROCESSES}": str(NODES * PROCESSES)},
        hint="a process for each GPU of the node: numProcPerNode of a TrainJob, --nproc-per-node of torchrun",
    )
    backend, endpoint = call["rdzv_backend"], str(call["rdzv_endpoint"])
    if backend == "static" and not endpoint:  # c10d numbers the nodes where they meet
        hint = "each node has a number of its own, from 0: SkyPilot puts it into $SKYPILOT_NODE_RANK"
        judge(str(call["node_rank"]), right=str(node), case=f"{name}: --node-rank of node {node}", hint=hint)
    judge(
        (endpoint.rsplit(":", 1)[0] if endpoint or backend != "static" else str(call["master_addr"])) or "none",
        right=head,
        case=f"{name}: the address where node {node} meets the others",
        wrong={
            "without --master-addr each node waits for itself": AnyOf(("127.0.0.1", "localhost")),
            "$SKYPILOT_NODE_IPS has a line for each node: take the first, with head -n1": "\n".join(ADDRESSES),
            "the node of rank 0 is the first in $SKYPILOT_NODE_IPS: head -n1, and not tail": ADDRESSES[-1],
        },
        hint="all nodes name the first node's address: the first line of $SKYPILOT_NODE_IPS",
    )
    script = "a module" if call["module"] else "no Python" if call["no_python"] else Path(call["training_script"]).name
    hint = "the launcher's job is a script, which stands behind torchrun's options"
    judge(script, right=SCRIPT, case=f"{name}: what torchrun starts", hint=hint)
    words = [part for word in call["training_script_args"] for part in word.split("=", 1)]
    expected = [part for word in ARGUMENTS for part in word.split("=", 1)]
    hint = f"the arguments of the launcher's job, all after {SCRIPT}, and torchrun's options before it. "
    hint += "A node's own disk is lost with the node: the checkpoint lies in /shared"
    right = AnyOf((expected, [*expected[2:], *expected[:2]]))
    judge(words, right=right, case=f"{name}: the arguments of {SCRIPT}", hint=hint)


def _judge_meeting(calls: Sequence[Mapping[str, object]], name: str) -> None:
    """Judges whether all nodes meet at one address, in the same way."""
    hint = "write c10d, or leave --rdzv-backend out"
    judge(calls[0]["rdzv_backend"], right=AnyOf(("static", "c10d")), case=f"{name}: --rdzv-backend", hint=hint)
    options = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_port")
    first, second = ({f"--{one.replace('_', '-')}": call[one] for one in options} for call in calls)
    hint = "the nodes meet only with the same value on each: no variable, and no number at random, that differs there"
    judge(second, right=first, case=f"{name}: the meeting of node 1, beside that of node 0", hint=hint)
