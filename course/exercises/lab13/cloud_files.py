"""Exercise 13.3: a TrainJob for Kubernetes and a SkyPilot task, compared with the job that the launcher would start.

The schemas of both projects (``data/schemas``) decide whether the files are valid. Then the command really runs, as on
a node: in an empty folder, with the variables that Kubeflow Trainer and SkyPilot set and with a ``torchrun`` that only
notes how it was called. torchrun's own parser then interprets that call.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import jsonschema
import yaml

from course.check.verdicts import NotYetError, expect
from lab_common import checkout

NODES, PROCESSES, GIBIBYTES, RESTARTS = 2, 4, 32, 3
SCRIPT, ARGUMENTS = "train_preempted.py", ("--epochs=90", "--checkpoint=/shared/run.pt")
IMAGE, GPU = "registry.example/labs:1", "A100"
NAMES = ("TrainJob", "SkyPilot task")
# What the lab gives; the learner's lines are added to the end.
TRAINJOB = f"""\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: shapes
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    image: {IMAGE}
"""
TASK = f"""\
name: shapes
workdir: .
file_mounts:
  /shared: {{source: s3://your-bucket, mode: MOUNT}}
setup: pip install -r requirements.lock
resources:
  accelerators: {GPU}:{PROCESSES}
"""
# What a pod and a SkyPilot node have in their environment; the addresses are those of examples (RFC 5737).
POD = "shapes-node-0-0.shapes"
PORT = "29500"
ADDRESSES = ("192.0.2.11", "192.0.2.12")
RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
TOOLS = ("awk", "basename", "cat", "cut", "date", "dirname", "env", "grep", "head", "hostname", "id", "mkdir", "nproc",
         "paste", "sed", "seq", "sh", "bash", "sort", "tail", "tr", "uname", "wc")  # fmt: skip
BACKENDS = ("static", "c10d")
NOTED = ("torchrun", "python", "python3", "accelerate", "mpirun")
NOTHING = ("pip", "pip3", "conda", "nvidia-smi", "sleep", "ip")
SECONDS, MOST = 10, 2**16
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
RECOVERY = ("EAGER_NEXT_REGION", "FAILOVER")


@dataclass(frozen=True)
class Call:
    """A noted call of torchrun on a node, as torchrun's parser reads it.

    Attributes:
        options: Its options by name.
        script: The training script.
        arguments: The script's arguments.
    """

    options: Mapping[str, object]
    script: str
    arguments: tuple[str, ...]


def verify_cloud_files(answer: Callable) -> str:
    """Reads both files, and compares what each node of them would start with the launcher's job."""
    found = answer(TRAINJOB, TASK)
    good = isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(one, str) for one in found)
    shown = "None" if found is None else f"{type(found).__name__} {str(found)[:60]}"
    hint = "return both texts: return trainjob, task"
    expect(good, "what write_files returns", yours=shown, expected="two texts", hint=hint)
    trainjob, task = (_read(text, name) for text, name in zip(found, NAMES, strict=True))
    _expect_valid(trainjob, "kubeflow_trainjob", NAMES[0], "spec.trainer")
    _expect_trainjob(trainjob)
    _expect_valid({name: one for name, one in task.items() if one is not None}, "skypilot_task", NAMES[1], "the task")
    _expect_valid(task.get("resources") or {}, "skypilot_resources", NAMES[1], "resources")
    _expect_task(task)
    ranks = f"{NODES} nodes with {PROCESSES} processes each, {SCRIPT} with its checkpoint, {GIBIBYTES} GiB"
    return f"both are valid and ask for the launcher's job: {ranks}; on spot machines in two places"


class _Loader(yaml.SafeLoader):
    """A loader that refuses duplicate keys, which both projects' own tools may accept."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """Returns the mapping of a node, whose keys must differ."""
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for (key, _), name in zip(node.value, names, strict=False):
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} comes twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _read(text: str, name: str) -> dict:
    hint = "indent by spaces: what belongs to a key stands deeper, and what stands beside it as deep"
    try:
        found = yaml.load(text[:MOST], _Loader)  # a SafeLoader: it makes no objects of Python's
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        lines = text.splitlines()
        where = f"line {mark.line + 1}, {lines[mark.line].strip()!r}: " if mark and mark.line < len(lines) else ""
        if "comes twice" in problem:
            hint = "add your lines to the mapping that is there: a key that comes again would replace the first"
        raise NotYetError(f"{name}: YAML", yours=(where + problem)[:160], expected="YAML", hint=hint) from error
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


def _expect_valid(found: object, schema: str, name: str, place: str) -> None:
    error = jsonschema.exceptions.best_match(_find_validator(schema).iter_errors(found))
    if error is None:
        return
    path = ".".join(map(str, error.absolute_path)) or ("the file" if place != "resources" else place)
    expected, hint = str(error.validator_value)[:120], "look at the field's type: a number, a text, a list or a mapping"
    if error.validator == "additionalProperties" and isinstance(error.schema.get("properties"), dict):
        known = error.schema["properties"]
        unknown = [key for key in error.instance if key not in known]
        expected = "one of " + ", ".join(key for key in known if not key.startswith("_"))[:200]
        hint = f"a field is misspelt, or stands at the wrong depth: {', '.join(map(str, unknown))}"
        yours = f"{path}: {', '.join(map(str, unknown))}"
    else:
        yours = f"{path}: {error.message}"[:200]
        if error.validator == "pattern" and "KMGTPE" in str(error.validator_value):
            expected, hint = "a quantity, such as 8Gi", "Kubernetes writes 1 GiB as 1Gi: no B at the end, and no space"
        elif error.validator == "type" and isinstance(error.instance, str) and error.validator_value == "integer":
            hint = "a number has no quotes in YAML"
        elif error.validator == "type" and error.validator_value == "array":
            hint = "a list of words: [torchrun, …], or a line with - for each"
        elif error.validator == "type" and error.validator_value == "string":
            hint = "a text is needed here: put it in quotes"
        elif error.validator == "required":
            hint = f"the schema needs it: {error.message}"
    raise NotYetError(f"{name}: its schema refuses it", yours=yours, expected=expected, hint=hint)


# What a node starts


def _run_node(argv: Sequence[str], env: Mapping[str, str], name: str) -> list[list[str]]:
    """Runs a command as a node does, with programs that only note how they were called; returns those calls."""
    with tempfile.TemporaryDirectory(prefix="lab13-") as folder:
        programs, work, calls = (Path(folder, part) for part in ("bin", "work", "calls"))
        programs.mkdir()
        (work / "scripts").mkdir(parents=True)  # where the lab has the script
        (work / ".bash_profile").write_text(f"PATH={programs}\n")  # which a login shell makes anew before
        for tool in TOOLS:
            found = next((path for place in ("/usr/bin", "/bin") if (path := Path(place, tool)).exists()), None)
            if found:
                (programs / tool).symlink_to(found)
        note = f'printf "%s\\0" "${{0##*/}}" "$@" >> "{calls}"; printf "\\n\\0" >> "{calls}"'
        lines = dict.fromkeys(NOTED, note) | dict.fromkeys(NOTHING, ":")
        lines["uv"] = 'test "$1" != run || { shift; exec "$@"; }'  # `uv run` starts what stands behind it
        for program, line in lines.items():
            (programs / program).write_text(f"#!{programs}/bash\n{line}\nexit 0\n")
            (programs / program).chmod(0o755)
        env = {"PATH": str(programs), "HOME": str(work), "LC_ALL": "C", **env}
        argv = [Path(argv[0]).name, *argv[1:]]
        case, expected = f"{name}: the command", f"torchrun {SCRIPT} …"
        try:
            ended = subprocess.run(
                argv, cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
            )
        except FileNotFoundError as error:
            hint = f"the first word is the program to start: torchrun, with {SCRIPT} and its arguments"
            raise NotYetError(case, yours=f"no program {argv[0][:60]!r}", expected=expected, hint=hint) from error
        except subprocess.TimeoutExpired as error:
            hint = "it waits for something: start torchrun at once"
            raise NotYetError(case, yours=f"it runs for {SECONDS} s", expected=expected, hint=hint) from error
        noted = calls.read_text() if calls.exists() else ""
    found = [call.split("\0")[:-1] for call in noted.split("\n\0") if call]
    if not any(call[0] == "torchrun" or "torch.distributed" in " ".join(call[1:3]) for call in found):
        said = (ended.stderr.strip().splitlines() or [""])[-1]
        yours = " ".join(found[-1])[:120] if found else said[:120] or "nothing is started"
        hint = f"torchrun starts the processes of a node: torchrun {SCRIPT} …"
        if "No such file" in said:
            hint = "the check has no files of yours: leave out what reads one, such as a line with source"
        if found:
            hint = "one process on each node, which knows of no other: let torchrun start them, with their ranks"
        raise NotYetError(case, yours=yours, expected=expected, hint=hint)
    return found


def _read_call(calls: Sequence[Sequence[str]], env: Mapping[str, str], name: str) -> Call:
    """Parses the last call with torchrun's own parser, which reads missing options from the environment."""
    from torch.distributed.run import get_args_parser

    words = [call for call in calls if call[0] == "torchrun" or "torch.distributed" in " ".join(call[1:3])][-1]
    words = words[1:] if words[0] == "torchrun" else words[3:]
    own = {key: one for key, one in os.environ.items() if not key.startswith("PET_")}
    said = io.StringIO()
    with mock.patch.dict(os.environ, {**own, **env}, clear=True), contextlib.redirect_stderr(said):
        try:
            read = get_args_parser().parse_args(list(words))
        except SystemExit as error:
            last = (said.getvalue().strip().splitlines() or ["it shows its help"])[-1]
            hint = "write torchrun's options as its help has them, then the script and its arguments"
            if "training_script" in last:
                hint = "a line of bash ends the command: put \\ at the end of a line that goes on, or one long line"
            case = f"{name}: torchrun {' '.join(words)[:80]}"
            raise NotYetError(case, yours=last[:160], expected=f"torchrun [options] {SCRIPT} …", hint=hint) from error
    return Call(vars(read), read.training_script, tuple(read.training_script_args))


def _expect_script(call: Call, name: str) -> None:
    """Expects the node to run the launcher's script with its arguments."""
    for option in ("module", "no_python"):
        said, hint = f"--{option.replace('_', '-')}", "the launcher's job is a script that torchrun starts with Python"
        expect(not call.options[option], f"{name}: torchrun", yours=said, expected=f"without {said}", hint=hint)
    expect(
        Path(call.script).name == SCRIPT,
        f"{name}: the script that torchrun starts",
        yours=call.script,
        expected=SCRIPT,
        hint="after torchrun's options comes the script: an option that stands behind it is the script's",
    )
    yours, expected = _split(call.arguments), _split(ARGUMENTS)
    hint = "the script has the same arguments as in the launcher's job, all after its name"
    if any(word.lstrip("-").replace("_", "-") in ("nnodes", "nproc-per-node", "node-rank") for word in yours):
        hint = "what stands behind the script is given to the script: torchrun's options come before it"
    elif "--checkpoint" not in yours:
        hint = "without a checkpoint all work is lost with a node"
    elif (place := yours[yours.index("--checkpoint") + 1 :][:1]) and place != ["/shared/run.pt"]:
        hint = "a node's own disk is lost with the node: the checkpoint has to lie in /shared"
    right = sorted(zip(yours[::2], yours[1::2], strict=False)) == sorted(
        zip(expected[::2], expected[1::2], strict=True)
    )
    right = right and len(yours) == len(expected)
    case = f"{name}: the arguments of {SCRIPT}"
    expect(right, case, yours=" ".join(call.arguments) or "none", expected=" ".join(ARGUMENTS), hint=hint)


def _split(arguments: Sequence[str]) -> list[str]:
    return [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]


def _expect_nodes(call: Call, name: str, *, node: int, head: str, field: str) -> None:
    """Expects the node to take its place among the others."""
    options = call.options
    asked = "1 (--standalone)" if options["standalone"] else str(options["nnodes"])
    hint = f"{field}: a torchrun that knows of one node trains alone, and the other one trains the same once more"
    if ":" in asked and asked != "1:1":
        hint = "a range goes on with fewer nodes: the launcher's job has exactly two"
    right = not options["standalone"] and asked in (str(NODES), f"{NODES}:{NODES}")
    expect(right, f"{name}: nodes that torchrun waits for", yours=asked, expected=NODES, hint=hint)
    if options["rdzv_endpoint"] or options["rdzv_backend"] != "static":
        place = str(options["rdzv_endpoint"]).rsplit(":", 1)[0]
        case, hint = f"{name}: --rdzv-endpoint of node {node}", "all nodes name the same one: the first node's address"
        expect(place == head, case, yours=place or "none", expected=head, hint=hint)
        if options["rdzv_backend"] != "static":
            return  # they are numbered where they meet
    rank = str(options["node_rank"])
    hint = "each node has a number of its own, from 0: SkyPilot puts it into $SKYPILOT_NODE_RANK"
    expect(rank == str(node), f"{name}: --node-rank of node {node}", yours=rank, expected=node, hint=hint)
    if options["rdzv_endpoint"]:
        return
    yours = str(options["master_addr"])
    if yours in ("127.0.0.1", "localhost"):
        hint = "without --master-addr each node waits for itself: give the first address of $SKYPILOT_NODE_IPS"
    elif len(yours.split()) > 1:
        hint = "$SKYPILOT_NODE_IPS has a line for each node: take the first, with head -n1"
    elif yours == ADDRESSES[-1]:
        hint = "the node of rank 0 is the first in $SKYPILOT_NODE_IPS: head -n1, and not tail"
    else:
        hint = "all nodes name the same one, the node of rank 0: the first line of $SKYPILOT_NODE_IPS"
    case = f"{name}: --master-addr of node {node}"
    expect(yours == head, case, yours=" ".join(yours.split()) or "an empty text", expected=head, hint=hint)


def _expect_same(calls: Sequence[Call], name: str) -> None:
    """Expects all nodes to meet at one address, in the same way."""
    backend = calls[0].options["rdzv_backend"]
    hint = "write c10d, or leave --rdzv-backend out"
    expect(backend in BACKENDS, f"{name}: --rdzv-backend", yours=backend, expected=" or ".join(BACKENDS), hint=hint)
    for option in ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_port"):
        given = [str(call.options[option]) for call in calls]
        flag = f"--{option.replace('_', '-')}"
        hint = f"the nodes meet only with the same {flag} on each: use no variable that differs there"
        expect(len(set(given)) == 1, f"{name}: {flag}", yours=" and ".join(given), expected="one", hint=hint)


def _expect_processes(asked: str, name: str, field: str, *, cpus: bool = False) -> None:
    hint = f"{field}: a process for each GPU of the node"
    if asked == str(NODES * PROCESSES):
        hint = f"{field}: these are the processes of all nodes together; a node has {PROCESSES}"
    elif cpus:
        hint = "without numProcPerNode and without a GPU among the limits, Kubeflow counts the node's CPUs"
    right = asked in (str(PROCESSES), "gpu", "auto") and not cpus
    expect(right, f"{name}: processes per node", yours=asked, expected=PROCESSES, hint=hint)


# What a TrainJob asks for


def _expect_trainjob(job: dict) -> None:
    name, spec = NAMES[0], job.get("spec") or {}
    trainer = spec.get("trainer") or {}
    hint = "Kubeflow starts no pod of a job that is suspended: leave the line out"
    expect(not spec.get("suspend"), f"{name}: spec.suspend", yours="true", expected="not given", hint=hint)
    kept = {
        "apiVersion": (job.get("apiVersion"), "trainer.kubeflow.org/v1alpha1"),
        "kind": (job.get("kind"), "TrainJob"),
        "spec.runtimeRef.name": (spec["runtimeRef"]["name"], "torch-distributed"),
        "spec.trainer.image": (trainer.get("image"), IMAGE),
    }
    for field, (yours, expected) in kept.items():
        hint = "leave the lines that are given as they are, and add yours"
        expect(yours == expected, f"{name}: {field}", yours=yours, expected=expected, hint=hint)
    nodes = trainer.get("numNodes")
    hint = "numNodes: without it the runtime's number holds, which is 1"
    if nodes == NODES * PROCESSES:
        hint = "numNodes counts nodes, and not processes"
    shown = "not given" if nodes is None else nodes
    expect(nodes == NODES, f"{name}: spec.trainer.numNodes", yours=shown, expected=NODES, hint=hint)
    for one in trainer.get("env") or ():
        hint = "Kubeflow Trainer sets it itself, and refuses a job that does: leave it out"
        expect(one["name"] not in RESERVED, f"{name}: env", yours=one["name"], expected="none of its own", hint=hint)
    _expect_requests(trainer.get("resourcesPerNode") or {})
    _expect_pods(trainer)


def _expect_pods(trainer: dict) -> None:
    """Expects each pod to start the launcher's processes."""
    name, limits = NAMES[0], (trainer.get("resourcesPerNode") or {}).get("limits") or {}
    words = [*(trainer.get("command") or ()), *(trainer.get("args") or ())]
    hint = "the image does not know what to start: command: [torchrun, …]"
    expect(bool(trainer.get("command")), f"{name}: command", yours="none", expected=f"torchrun {SCRIPT} …", hint=hint)
    asked = str(trainer.get("numProcPerNode") or "auto")
    own = {one["name"]: str(one.get("value", "")) for one in trainer.get("env") or ()}
    calls = []
    for node in range(NODES):
        values = (str(NODES), asked, str(node), POD, PORT)
        env = own | dict(zip(RESERVED, values, strict=True))
        argv = [_replace(word, env) for word in words]
        if Path(argv[0]).name not in ("bash", "sh"):
            dollar = next((word for word in argv if re.search(r"\$\{?[A-Z]", word)), None)
            hint = "no shell reads the command: leave the option out, as Kubeflow sets the PET_ variables for torchrun"
            expect(dollar is None, f"{name}: command", yours=dollar, expected="no variable of a shell", hint=hint)
        if len(argv) == 1 and " " in argv[0]:
            hint = f"each word is an item of its own, as no shell splits them: [torchrun, {SCRIPT}, …]"
            expect(False, f"{name}: command", yours=f"one word {argv[0][:60]!r}", expected="a list of words", hint=hint)
        call = _read_call(_run_node(argv, env, name), env, name)
        _expect_nodes(call, name, node=node, head=POD, field="numNodes is there; leave --nnodes out of the command")
        processes = str(call.options["nproc_per_node"])
        cpus = processes == "auto" and "nvidia.com/gpu" not in limits
        _expect_processes(processes, name, "numProcPerNode", cpus=cpus)
        _expect_script(call, name)
        calls.append(call)
    _expect_same(calls, name)


def _replace(word: str, env: Mapping[str, str]) -> str:
    """Replaces $(NAME) in a command as Kubernetes does; a $NAME would need a shell, and none runs."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), word)


def _expect_requests(resources: dict) -> None:
    """Expects a node with the GPUs and the memory of its processes."""
    name, limits, requests = NAMES[0], resources.get("limits") or {}, resources.get("requests") or {}
    case, gpus = f"{name}: nvidia.com/gpu of a node", limits.get("nvidia.com/gpu")
    hint = f"resourcesPerNode.limits: a GPU for each process, nvidia.com/gpu: {PROCESSES}"
    if gpus is None and "nvidia.com/gpu" in requests:
        hint = "Kubernetes wants GPUs among the limits; the requests follow by themselves"
    elif str(gpus) == str(NODES * PROCESSES):
        hint = "resourcesPerNode is for one node, and not for the job"
    shown = "none among the limits" if gpus is None else gpus
    expect(str(gpus) == str(PROCESSES), case, yours=shown, expected=PROCESSES, hint=hint)
    asked = requests.get("memory", limits.get("memory"))
    case, expected = f"{name}: memory of a node", f"{GIBIBYTES}Gi"
    hint = f"resourcesPerNode: {GIBIBYTES // PROCESSES} GiB for each of {PROCESSES} processes, memory: {expected}"
    expect(asked is not None, case, yours="not given", expected=expected, hint=hint)
    size = _as_bytes(asked)
    if size * PROCESSES == GIBIBYTES * 2**30:
        hint = f"a node has {PROCESSES} processes of so much each"
    elif size == NODES * GIBIBYTES * 2**30:
        hint = "resourcesPerNode is for one node, and not for the job"
    elif str(asked).endswith("G"):
        hint = "G is 10^9 bytes, Gi is 2^30: write Gi"
    elif str(asked).endswith("m"):
        hint = "m is a thousandth, here of a byte: write Gi"
    elif size == GIBIBYTES:
        hint = "a number alone counts bytes: write Gi behind it"
    expect(size == GIBIBYTES * 2**30, case, yours=asked, expected=expected, hint=hint)
    most = _as_bytes(limits.get("memory", asked))
    hint = "a limit below the request is refused by Kubernetes"
    expect(most >= size, f"{name}: limits.memory", yours=limits.get("memory"), expected=expected, hint=hint)


def _as_bytes(quantity: int | str) -> float:
    number, unit = re.fullmatch(r"([+-]?[\d.]+)(.*)", str(quantity)).groups()
    return float(number) * UNITS[unit] if unit in UNITS else float(number) / 1000


# What a SkyPilot task asks for


def _expect_task(task: dict) -> None:
    name, resources, nodes = NAMES[1], task.get("resources") or {}, task.get("num_nodes")
    hint = "num_nodes: without it there is one node"
    if nodes == NODES * PROCESSES:
        hint = "num_nodes counts nodes, and not processes"
    shown = "not given" if nodes is None else nodes
    expect(nodes == NODES, f"{name}: num_nodes", yours=shown, expected=NODES, hint=hint)
    hint = "leave the lines that are given as they are, and add yours"
    mounts = task.get("file_mounts") or {}
    expect("/shared" in mounts, f"{name}: file_mounts", yours=list(mounts), expected="/shared", hint=hint)
    _expect_candidates(resources)
    _expect_run(task.get("run"))


def _expect_candidates(resources: dict) -> None:
    """Expects SkyPilot to choose only spot machines with the GPUs and memory, in one of two places."""
    name, lists = NAMES[1], [one for one in ("any_of", "ordered") if resources.get(one)]
    some = "a list of places, such as [{infra: aws/us-east-1}, {infra: gcp/us-central1}]"
    hint = f"any_of: {some}"
    both = "SkyPilot takes one of the two: any_of for the cheapest, ordered for your own order"
    expect(len(lists) < 2, f"{name}: resources", yours="any_of and ordered", expected="one of them", hint=both)
    base = {key: one for key, one in resources.items() if key not in ("any_of", "ordered")}
    candidates = [base | one for one in (resources[lists[0]] if lists else [{}])]
    for number, one in enumerate(candidates):
        case = f"{name}: candidate {number + 1} of {len(candidates)}" if lists else f"{name}: resources"
        gpus = one.get("accelerators")
        count = _count_gpus(gpus)
        hint = "accelerators are for one node: leave the line that is given as it is"
        expect(count == PROCESSES, f"{case}: accelerators", yours=gpus, expected=f"{GPU}:{PROCESSES}", hint=hint)
        spot = one.get("use_spot")
        hint = "use_spot: true, beside accelerators, so that it holds for every place"
        shown = "not given, which is on demand" if spot is None else str(spot).lower()
        expect(spot is True, f"{case}: use_spot", yours=shown, expected="true", hint=hint)
        _expect_memory(one.get("memory"), case)
        _expect_recovery(one.get("job_recovery"), case)
    places = [_name_place(one) for one in candidates]
    hint = "each candidate has a place of its own: infra: cloud/region" if lists else f"any_of, below resources: {some}"
    expect(
        len(set(places)) > 1 and None not in places,
        f"{name}: places where machines are looked for",
        yours=", ".join(place or "anywhere" for place in places) if lists else "no any_of",
        expected="two different ones",
        hint=hint,
    )


def _count_gpus(found: object) -> float | None:
    """Returns the number of GPUs of the lab's kind; None for another kind."""
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if isinstance(found, str):
        kind, _, count = found.strip("{} ").partition(":")
        found = {kind.strip(): float(count) if re.fullmatch(r"\s*[\d.]+\s*", count) else 1}
    if isinstance(found, dict) and list(found) == [GPU]:
        return 1 if found[GPU] is None else found[GPU]
    return None


def _name_place(one: dict) -> str | None:
    found = one.get("infra") or "/".join(one[key] for key in ("cloud", "region", "zone") if one.get(key))
    return "/".join(found.lower().split("/")[:2]) if found and found != "*" else None  # a zone is no other region


def _expect_memory(memory: object, case: str) -> None:
    expected = f"{GIBIBYTES}+"
    hint = f"memory: {expected}, at least so many GiB on each node"
    shown = "not given" if memory is None else memory
    found = re.fullmatch(r"([\d.]+)(gb|gib)?(\+?)", str(memory).strip().lower())
    if found and float(found[1]) == GIBIBYTES and not found[3]:
        hint = "a number alone asks for machines with exactly so much, which have other GPUs or none: add +"
    elif found and float(found[1]) * PROCESSES == GIBIBYTES:
        hint = f"a node has {PROCESSES} processes of so much each"
    elif str(memory).endswith("i"):
        hint = "SkyPilot counts in GiB without a unit"
    right = bool(found) and float(found[1]) == GIBIBYTES and found[3] == "+"
    expect(right, f"{case}: memory", yours=shown, expected=expected, hint=hint)


def _expect_recovery(recovery: object, case: str) -> None:
    found = recovery if isinstance(recovery, dict) else {"strategy": recovery}
    strategy = found.get("strategy")
    if strategy is not None:
        hint = "leave the strategy out: the default looks in another region first"
        right = strategy.upper() in RECOVERY
        expect(right, f"{case}: job_recovery", yours=strategy, expected=" or ".join(RECOVERY), hint=hint)
    times = found.get("max_restarts_on_errors")
    hint = "a lost machine is always replaced; an error of the script is not: max_restarts_on_errors"
    shown = "not given, which is 0" if times is None else times
    case = f"{case}: job_recovery.max_restarts_on_errors"
    expect(times == RESTARTS, case, yours=shown, expected=RESTARTS, hint=hint)


def _expect_run(run: str | None) -> None:
    """Expects each node to start the launcher's processes."""
    name = NAMES[1]
    hint = "run: | and below it the lines that each node runs"
    expect(bool(run), f"{name}: run", yours="nothing", expected=f"torchrun … {SCRIPT} …", hint=hint)
    calls = []
    for node in range(NODES):
        env = {
            "SKYPILOT_NUM_NODES": str(NODES),
            "SKYPILOT_NODE_RANK": str(node),
            "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES),
            "SKYPILOT_NUM_GPUS_PER_NODE": str(PROCESSES),
        }
        call = _read_call(_run_node(["bash", "-c", run], env, name), {}, name)
        _expect_nodes(call, name, node=node, head=ADDRESSES[0], field="--nnodes")
        _expect_processes(str(call.options["nproc_per_node"]), name, "--nproc-per-node")
        _expect_script(call, name)
        calls.append(call)
    _expect_same(calls, name)
