"""Runs around a training script on every rank: compares the nodes, keeps the script's error, shows where it hangs.

``torchrun … -m nodelaunch.node.worker train.py --lr 0.1`` runs ``train.py`` as ``torchrun … train.py --lr 0.1`` does.
The rest is for the node's supervisor, which passes on what the rank prints (``open_output``), the lines of
``events.jsonl``, and the files of ``stacks/`` and ``results/``.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import os
import platform
import re
import runpy
import signal
import socket
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from nodelaunch.node.errors import failed_as_consequence, find_full_disk, shorten_gloo
from nodelaunch.node.groups import Groups
from nodelaunch.node.processes import PR_SET_PDEATHSIG, set_process
from nodelaunch.node.report import STACKS, Events, leave, open_output, write_out
from nodelaunch.node.stores import guard_stores
from nodelaunch.node.watch import HangWatch, list_threads

MEETING = timedelta(seconds=30)
DEVICES = (
    "a node has no GPU, or its driver is too old for its torch: nccl there and gloo here would wait for each other",
    "env={'CUDA_VISIBLE_DEVICES': ''} hides the GPUs on all nodes, which then use the CPU",
)
STARTED = ("a script was changed or started by hand with other arguments", "start all nodes with job.run()")


class MismatchError(RuntimeError):
    """The nodes of a job do not run the same thing; with the likely cause and the fix."""

    def __init__(self, differences: list[str]) -> None:
        super().__init__("; ".join(differences))
        only_devices = all(text.startswith("device: ") for text in differences)
        self.cause, self.fix = DEVICES if only_devices else STARTED


def main() -> None:
    """Runs the training script that stands first among the arguments, as Python does."""
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, str(Path(script).parent))
    os.environ.pop("PYTHONSAFEPATH", None)  # the programs that it starts look there, too
    rank, folder = int(os.environ["RANK"]), Path(os.environ["LAB_JOB_FOLDER"])
    # A project is the current folder; a script without one lies beside its files.
    root = Path.cwd() if Path.cwd() in Path(script).parents else Path(script).parents[1]
    set_process(PR_SET_PDEATHSIG, signal.SIGKILL)  # torchrun, which started it, may end by SIGKILL, too
    events = Events(folder, rank)
    if output := open_output(folder, rank):  # else torchrun shows it
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    stacks = folder / STACKS
    stacks.mkdir(parents=True, exist_ok=True)
    # Open to the end of the process: a crash of its last moments is written there, too.
    file = (stacks / f"rank{rank}.txt").open("w")
    # torchrun ends a worker with SIGTERM: where it stood then is what tells which rank waited for which.
    faulthandler.register(signal.SIGTERM, file=file, all_threads=True, chain=True)
    faulthandler.enable(file=file)  # and where it crashed in C
    local_rank, processes = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    events.introduce(pid=os.getpid(), local_rank=local_rank, processes=processes)
    try:
        # torch, which is imported in there, makes 270,000 objects; the search for garbage among them, then and at each
        # step of the training, takes time and finds none.
        gc.disable()
        guard_stores()  # also those that the script makes, and that of a job whose workers were restarted
        check_agreement(script)
        gc.freeze()
        gc.enable()
        groups = Groups(events, script)
        groups.watch()
        watch = HangWatch(events, script, float(os.environ["LAB_HANG_TIMEOUT"]), groups)
        watch.start()
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            events.write("error", kind="exit", message=f"SystemExit: {end.code}", traceback="", location="")
            write_out()  # the interpreter's own end no longer finds the script's files
            raise
    except BaseException as error:
        _add_parameter_names(error)
        facts = _describe(error, script, root)
        events.write("error", **facts)
        print(_say_error(facts), file=sys.stderr, flush=True)
        write_out()
        # Not by the interpreter's own end: Gloo's threads would be torn down in mid-wait, and abort noisily.
        os._exit(1)
    _finish(events, groups, watch)


def _finish(events: Events, groups: Groups, watch: HangWatch) -> NoReturn:
    """Reports that the script has ended, and ends the process when its threads have."""
    events.write("done", **groups.report_end())
    if list_threads():
        watch.over = True
        events.write("lingers")
    threading._shutdown()  # the script's own threads go on to their end, as in any program
    events.write("left")
    leave(0)


# Before the script starts.


def check_agreement(script: str) -> None:
    """Compares what the nodes are about to run, over the store through which their workers meet.

    torch itself notices only parameters of different shapes; another batch size or another version of the script trains
    silently, and not what was meant.

    Raises:
        MismatchError: The nodes differ in script, arguments, number of nodes or processes, torch, Python or device, or
            two of them run the script of the same node.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wanted, node = int(os.environ["LAB_WORLD_SIZE"]), os.environ["LAB_NODE"]
    if world_size == 1 and wanted > 1:  # there is nobody to compare with; alone it would train, and not what was meant
        raise MismatchError([f"node {node} ({socket.gethostname()}) was told of {wanted} processes in all, and 1 came"])
    # With max_restarts torchrun's store is not shared with the workers (see script.py), and nothing is compared.
    if world_size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    import torch
    from torch.distributed import TCPStore

    mine = {
        "node": f"{node} ({socket.gethostname()})",
        "number": node,
        "torchrun": os.environ.get("GROUP_RANK"),
        "script": hashlib.sha256(Path(script).read_bytes()).hexdigest()[:12],
        "arguments": sys.argv[1:],
        "number of nodes": os.environ.get("LAB_TOLD_NODES"),
        "processes in all": [wanted, world_size],
        # As the preflight compares them: a build for CPUs and one for CUDA train together over Gloo.
        "torch": torch.__version__.partition("+")[0],
        "Python": ".".join(platform.python_version().split(".")[:2]),
        "device": find_device(),
    }
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=MEETING)
    place = f"nodelaunch/{os.environ['LAB_JOB_ID']}"
    store.set(f"{place}/{rank}", json.dumps(mine))
    if rank == 0:
        ranks = [json.loads(store.get(f"{place}/{number}")) for number in range(world_size)]
        store.set(f"{place}/verdict", json.dumps(_find_differences(ranks)))
    if differences := json.loads(store.get(f"{place}/verdict")):
        raise MismatchError(differences)


def find_device() -> str:
    """Returns "GPU" if torch will find one, otherwise "CPU", without starting CUDA.

    ``torch.cuda.is_available()`` would start it, and a script could no longer choose its GPU by CUDA_VISIBLE_DEVICES.
    """
    import torch

    return "GPU" if torch.cuda.device_count() else "CPU"


def _find_differences(ranks: list[dict]) -> list[str]:
    """Names, in words, every fact in which a rank's node differs from that of rank 0, with both nodes' values."""
    first, found = ranks[0], []
    owners: dict[str, dict] = {}  # by the node's number, the first rank that has it
    for other in ranks:
        owner = owners.setdefault(other["number"], other)
        if other["torchrun"] != owner["torchrun"]:
            found.append(f"node {owner['node']} and node {other['node']} both run node{other['number']}.sh")
        wanted, there = other["processes in all"]
        if wanted != there:
            found.append(f"node {other['node']} was told of {wanted} processes in all, and {there} came")
        for fact in ("script", "arguments", "number of nodes", "torch", "Python", "device"):
            if other[fact] != first[fact]:
                found.append(f"{fact}: {first[fact]} on node {first['node']}, {other[fact]} on node {other['node']}")
    return list(dict.fromkeys(found))


# What is said of an error.


def _trim(trace: TracebackType | None, script: str) -> TracebackType | None:
    """Leaves out the frames of this file and of runpy, which say nothing about the training script."""
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


def _find_file(trace: TracebackType | None, script: str) -> str:
    """The file to mend: the script, or the one beside it that it runs as a script, such as one that it watches."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(trace) if frame.f_globals.get("__name__") == "__main__"]
    files = [code.co_filename for code in codes if code.co_name == "<module>"]
    return next((file for file in reversed(files) if Path(file).parent == Path(script).parent), script)


def _describe(error: BaseException, script: str, root: Path) -> dict:
    """The fields of the event."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    script = _find_file(error.__traceback__, script)
    text = "".join(traceback.format_exception(type(error), error, _trim(error.__traceback__, script)))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    message, line = "".join(traceback.format_exception_only(error)).strip(), frames[-1].lineno if frames else None
    if isinstance(error, SyntaxError) and error.filename == script:
        message, line = f"{type(error).__name__}: {error.msg}", error.lineno
    return {
        "kind": "mismatch" if isinstance(error, MismatchError) else "exception",
        "message": message,
        # The copy that runs here lies deep in a folder with a hash for a name; the reader knows the script by its own.
        "traceback": text.replace(script, Path(script).name).replace(f"{root}/", "").rstrip(),
        "location": f"{Path(script).name}, line {line}" if line else "",
        "disk": find_full_disk(error),
        "file": files[-1],
        # What our own errors (LabError) know of themselves.
        **{name: str(getattr(error, name)) for name in ("cause", "fix") if getattr(error, name, None)},
    }


def _say_error(facts: dict) -> str:
    """The traceback; or, from a rank that only lost the others, one line, which does not hide the first one's."""
    if not failed_as_consequence(facts["message"], facts["file"]):
        return facts["traceback"]
    said = shorten_gloo(facts["message"])
    return f"{facts['location']}: another rank is gone or does not answer ({said})"


def _add_parameter_names(error: BaseException) -> None:
    """Adds the parameters' names to those messages of DDP that have their numbers only."""
    found = re.search(
        r"params\[(\d+)\][^\n]* appears not to match|did not receive grad for rank \d+: ([\d ]+)", str(error)
    )
    if not found:
        return
    numbers = [int(number) for number in (found[1] or found[2]).split()]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = getattr(frame.f_locals.get("self"), "module", None)
        if hasattr(module, "named_parameters"):
            names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
            named = [names[number] for number in numbers if number < len(names)]
            if named:
                error.add_note(f"these are: {', '.join(named[:12])}{' …' * (len(named) > 12)}")
                return


if __name__ == "__main__":
    main()
