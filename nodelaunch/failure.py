"""Explains a failed job: from its ``JobState`` to one ``Failure`` with its cause and a fix.

``KNOWN`` has the messages of torch, Python and Linux that the launcher knows: what each means, and what to do about it.
Texts are those of torch 2.14 and Python 3.11. A message that explains itself has no row: it is quoted.
"""

from __future__ import annotations

import re
import signal
import textwrap

from lab_common.text import clean, clean_message
from nodelaunch.node.errors import FULL, StopReason, failed_as_consequence, name_full_disk, shorten_gloo
from nodelaunch.result import Failure
from nodelaunch.state import JobState, NodeState

# Where on a node the script lies, or its project; libraries, too, may be in a folder called work.
SCRIPT_FOLDER = r"[^\"]*/(?:code/[0-9a-f]{64}/script|work/[\w.-]+-[0-9a-f]{6})/"
# The last traceback in a rank's output, and the line with the error.
PRINTED = re.compile(r"[\s\S]*(Traceback \(most recent call last\):\n(?: .*\n)+(\S.*)[\s\S]*)")
WAITED = re.compile(r"Timed out waiting|Application timeout|wait timeout|Watchdog caught collective|Connect timeout")
# Lines by which a program says why it aborts; everything else that it printed may have nothing to do with its end.
ABORTS = re.compile(r"terminate called|what\(\):|^(ERROR|FATAL|Fatal)\b|bad_alloc|gloo|[Bb]us error")

AGAIN = "run the job again; a checkpoint lets the job go on where it was"
SENT = "a kill, a batch system (Slurm's --signal or time limit), or the system sent it (`man 7 signal` says what for)"
# The likely cause of a signal that ended a program, and what to do. All others somebody sent.
SIGNALS = {
    signal.SIGKILL: (
        "often Linux's out-of-memory killer (`sudo dmesg | tail` then says so); else a `kill -9`, or the scheduler",
        "a smaller batch, fewer processes on the node, or a node with more memory"),
    signal.SIGABRT: ("C++ code gave up (an assertion or an exception that nobody caught)", "read its last lines"),
    signal.SIGBUS: ("it read memory whose file is gone or too short: a full /dev/shm, or a mapped file that was cut",
                    "num_workers=0, or more shared memory (--shm-size=2g); leave files alone that a job has mapped"),
    signal.SIGSEGV: ("C code touched memory that is not its own: often a package built for another torch",
                     "import the packages one by one to find it; install those with C++ parts again for this torch"),
}  # fmt: skip


# A pattern, searched in a rank's traceback and message, or in its last words; the cause in plain words; and the fix.
# `\g<name>` inserts what a group of the pattern has found. The first match counts: a special case comes before the
# general one.
KNOWN = (
    # Limits of the node, and its memory.
    (r"Too many open files|received \d+ items of ancdata|Errno 24\]",
     "this process has as many open files as the node allows it (`ulimit -n`)",
     "torch.multiprocessing.set_sharing_strategy('file_system'); or ulimit -n 65536 in the shell that starts the job"),
    # A full /dev/shm is no full disk. Semaphores, which queues need, are files there, too; no message names them.
    (r"unable to (write to|open|mmap|resize|allocate)[^\n]*</?torch_[^\n]*|/dev/shm[^\n]*No space left"
     "|^bash: .*Bus error|by signal: Bus error|insufficient shared memory|out of shared memory"
     r"|</?torch_[^\n]*No space left|No space left on device: '/dev/shm|creating shared memory segment /dev/shm"
     r'|multiprocessing/\w+\.py\"[^\n]*\n(?:(?: {4}[^\n]*)?\n)*OSError: \[Errno 28\]',
     "the shared memory (/dev/shm) is full; a DataLoader's workers hand their batches over in it, and NCCL uses it",
     "num_workers=0, or more of it: podman run --shm-size=2g (docker too); ls -l /dev/shm shows what runs left"),
    ("CUDA out of memory|CUDA error: out of memory|cuda.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
     "the GPU's memory is full", "a smaller --batch-size"),
    (r"can't allocate memory: you tried to allocate (?P<size>\d+) bytes",
     r"the node's memory (or its limit, `ulimit -v`) has no room for a tensor of \g<size> bytes",
     "a smaller batch or model, fewer processes on the node, or a node with more memory"),
    (r"Cannot allocate memory|std::bad_alloc|^MemoryError|\bENOMEM\b|Unable to allocate [\d.]+ \w+ for an array",
     "the node's memory is full (or its limit, `ulimit -v`, is reached); starting another process needs some, too",
     "a smaller batch or data set in memory, fewer num_workers, or a node with more memory"),
    # DistributedDataParallel.
    (r"Expected to have finished reduction in the prior iteration(?:[\s\S]*these are(?P<names>: [^\n]+))?",
     r"DDP waits for a gradient of every parameter, and some took no part in the loss\g<names>",
     "use them in the loss, or requires_grad_(False) before DDP; if they change: DDP(…, find_unused_parameters=True)"),
    ("Expected to mark a variable ready only once",
     "a parameter got its gradient twice in one backward: it is used in two forwards, or recomputed by a checkpoint",
     "checkpoint(…, use_reentrant=False), one forward per backward, or DDP(model, static_graph=True)"),
    ("appears not to match sizes of the same param|DDP expects same model across all ranks",
     "the ranks built different models", "build the model from the same arguments on every rank"),
    (r"'(?P<kind>DistributedDataParallel|DataParallel)' object has no attribute '(?P<name>\w+)'",
     r"\g<kind> wraps the model, and has none of the model's own attributes", r"model.module.\g<name>"),
    # Weights and checkpoints.
    (r'Error\(s\) in loading state_dict[\s\S]*(Missing|Unexpected) key\(s\)[^\n]*\"(?P<prefix>module\.|_orig_mod\.)',
     r'the names of the weights begin with "\g<prefix>" on one side alone: the wrapper (DDP or torch.compile) was '
     "saved, or the bare model's weights were loaded into it",
     "save model.module.state_dict(), and load into model.module; for a file with the prefix: "
     r"torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, '\g<prefix>')"),
    (r"Weights only load failed[\s\S]*GLOBAL (?P<name>[\w.]+) was not an allowed global",
     r"the checkpoint holds \g<name>, and since torch 2.6 torch.load takes nothing but tensors and plain values",
     "save plain values (vars(args), float(x)); for a file that you trust: torch.load(…, weights_only=False)"),
    # Devices and backends.
    ("invalid device ordinal|device >= 0 && device < num_gpus|Invalid device id"
     "|Duplicate GPU detected|Multiple Ranks are using the same GPU",
     "the node has fewer GPUs than processes, or two took the same GPU: all the first, or by RANK, not LOCAL_RANK",
     "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), and nproc_per_node= at most the GPUs of each node"),
    ("ProcessGroupNCCL is only supported with GPUs|doesn't have NCCL built in|NCCL is not available",
     "the script asks for the backend nccl, which needs a GPU for every process; this process sees none",
     "backend='nccl' if torch.cuda.is_available() else 'gloo'"),
    ("Found no NVIDIA driver|No CUDA GPUs are available|not compiled with CUDA enabled|No NVIDIA GPU"
     "|CUDA driver version is insufficient|driver on your system is too old|no CUDA-capable device"
     "|CUDA is not available|cuInit|CUDA unknown error",
     "the script asks for a GPU, and torch finds none here",
     "device = 'cuda' if torch.cuda.is_available() else 'cpu'; nvidia-smi says what this node has"),
    (r"device-side assert|index out of range in self|Target \S+ is out of bounds|Class values must be",
     "a label (or token) is below 0, or larger than the number of classes (or words) that the model has",
     "compare labels.min() and labels.max() with num_classes= (tokens: num_embeddings); labels count from 0"),
    # The group and its collectives.
    (r"EnforceNotMet[\s\S]*(pair|context|buffer)\.(cc|h)|op\.preamble\.length <= op\.nbytes"
     r"|gloo/\S+\.cc:\d+\] [^\n]* vs |Detected mismatch between collectives on ranks",
     "the ranks called different collectives, or one collective with tensors of different sizes",
     "same collective, shape and dtype on every rank (for parts of different sizes: pad them, or all_gather_object)"),
    (r"environment variable (?P<name>\w+) expected, but not set|rendezvous: (?P<part>rank|world size) parameter missing"
     r"|KeyError: '(?P<key>RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|SLURM_\w+|OMPI_\w+|PMI_\w+)'",
     r"the script asks for \g<name>\g<part>\g<key>, and what started it does not set that",
     "torchrun sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; start the script by it, and read them: "
     "init_process_group('gloo') (nccl on GPUs) alone, without init_method="),
    (r"the name '(?P<name>[^'\n]*)' of the meeting point is not known on this node(?P<own>, and the script set it)?",
     r"no address belongs to the name \g<name> here\g<own>",
     "leave MASTER_ADDR and MASTER_PORT to torchrun, which has set them: init_process_group('gloo') alone"),
    ("EADDRINUSE|(?i:address already in use)",
     "another program on that node has this port", "another port, or 0, which takes a free one"),
    ("ncclUnhandledCudaError|ncclSystemError|ncclInternalError|NCCL error|ncclRemoteError",
     "NCCL, which moves the gradients between GPUs, gave up; its own words are in the lines before",
     "job.preflight() looks at GPUs and interfaces; env={'NCCL_DEBUG': 'INFO'} prints what NCCL tried"),
    # How the script was started, and what it may not do as a rank.
    (r"required: [^\n]*--local[-_]rank|unrecognized arguments: [^\n]*--local[-_]rank",
     "the script expects --local_rank, which torch passed before 2.0; torchrun sets LOCAL_RANK",
     "local_rank = int(os.environ['LOCAL_RANK']) in the script, in place of the argument"),
    ("attempted relative import (with no known parent package|beyond top-level package)",
     "the script is part of a package (`from .model import …`), and was started as a file of its own",
     "`from package.model import …`, with root='.' and env={'PYTHONPATH': '.'}; or a file beside the package that "
     "imports it"),
    (r"bdb\.BdbQuit|EOFError: EOF when reading a line|reading from stdin while output is captured",
     "the script asks the keyboard (breakpoint(), pdb or input()), and a rank has none",
     "take that line out; to debug: python -m pdb train.py with one process, or print()"),
    ("Can't pickle|cannot pickle|Can't get local object|PicklingError",
     "this object cannot be sent to another process, saved or copied: it is or holds a lambda, a function inside a "
     "function, an open file or a lock",
     "a function or class at the top of the file; open files inside the worker; save model.state_dict()"),
    (r"No API key configured|api_key not configured|wandb\.errors\S* ?UsageError: [^\n]*(login|API key)",
     "Weights & Biases has no key on this node, and cannot ask for one",
     "env={'WANDB_MODE': 'offline'}; or run `wandb login` on the node once"),
    # The network beyond the job.
    ("no internet connection|LocalEntryNotFoundError|couldn't connect to 'https?:|Max retries exceeded with url"
     "|Couldn't reach '|doesn't exist on the Hugging Face Hub either|URLError: <urlopen error|Failed to resolve '"
     "|Network is unreachable|outgoing traffic has been disabled|Name or service not known|gaierror"
     "|Temporary failure in name resolution|^ConnectionRefusedError|CERTIFICATE_VERIFY_FAILED",
     "the script asks for a server that this node does not reach: on the internet, or by a name or port that is wrong",
     "download it once beforehand, and give its path; a proxy: env={'https_proxy': …}; the node's own name: a line in "
     "its /etc/hosts; a server of yours: its address, since localhost is each node itself"),
    # What is missing on the node.
    (r"(?P<name>lib[\w+.-]+\.so[\w.]*): cannot open shared object file",
     r"the library \g<name> is missing on this node, or a package was built for another version of CUDA",
     "one of CUDA or torch: install the package again for the torch that is here; one of the system: install the "
     "system's package that has it (libGL.so.1: pip install opencv-python-headless)"),
    ("undefined symbol|operator torchvision::nms does not exist|partially initialized module 'torchvision'",
     "a package with C++ parts was built for another version of torch or of the system",
     "install it again for the torch that is here; torch and torchvision go in pairs"),
    (r"InvalidGitRepositoryError|not a git repository|Command '\[?'?git\b[^\n]*non-zero exit status 128",
     "the script asks git about its own folder, and a job runs in a copy without .git",
     "ask git before the job starts and hand the answer over in args= or env="),
    (r"subprocess\.py\"[\s\S]*No such file or directory: '(?P<name>[^'/\n]+)'"
     r"|(?m:^\S*: line \d+: (?P<shell>[\w.+-]+): command not found|^\S*sh: \d+: (?P<dash>[\w.+-]+): not found)",
     r"there is no \g<name>\g<shell>\g<dash> on this node: a program, or the folder that cwd= names",
     "install the program there, or give its whole path; make the folder first"),
    (r"No module named '?(?P<name>[\w.]+)",
     r"the script imports what this node does not have: \g<name>",
     "a module of yours beside the script: root='.' copies the folder (files=['…'] one file); else: pip install it "
     "there"),
    (r"(?<!\.h: )No such file or directory|FileNotFoundError: \[Errno 2\]|Parent directory \S+ does not exist",
     "a path that is not on this node: a job runs in its own folder, which has the script and the files of files=, or "
     "with root= the project without files that git ignores or that are above 8 MiB",
     "root='.' copies the script's project and runs in it; large or ignored data: an absolute path; what another rank "
     "writes: dist.barrier() after the save"),
    # A process that the script started, where nothing before has said why it ended.
    (r"DataLoader worker \(pid|terminated with signal SIGKILL|<Signals\.SIGKILL|process pool was terminated abruptly",
     "a process that the script started (such as a worker of the DataLoader) ended without a word: it crashed in C "
     "code, or, most often, Linux killed it because memory was full (`sudo dmesg | tail`)",
     "num_workers=0 shows a worker's own error; if memory is full: fewer processes, or less in the memory of each"),
)  # fmt: skip


def diagnose(state: JobState) -> Failure | None:
    """Returns what failed first, or None if nothing did.

    The first that holds: stopped; standstill; a rank's own error; the time limit; a node that ended the job by itself;
    ranks that only waited; nodes that did not join; a lost node; torchrun's exit status; ranks that formed no group.
    """
    errors = sorted((_add_traceback(state, error) for error in state.errors), key=lambda error: error["at"])
    # What the ranks say about their end comes of it; what was heard before does not.
    before = [error for error in errors if state.asked is not None and error["at"] <= state.asked]
    if state.reason == StopReason.STOPPED:
        if not before:
            return _fail("stopped", "The job was stopped.", "job.stop() was called", AGAIN, stacks=state.stacks)
        errors = before
    if state.reason == StopReason.STANDSTILL and not any(_is_own(error) for error in before):
        return _explain_hang(state, before)
    if any(_is_own(error) for error in errors):
        return _explain_rank(state, errors)
    ended = [part for part in state.nodes.values() if part.ended]
    limits = [part.ended["why"] for part in ended if part.ended["reason"] == StopReason.LIMIT]
    if limits or state.reason == StopReason.LIMIT:
        return _explain_limit(state, limits)
    left = [part for part in ended if part.ended["reason"] in (StopReason.SILENCE, StopReason.SIGNAL)]
    # A scheduler tells all nodes to end when a rank of one has given up waiting.
    if left and not state.reason and not any(WAITED.search(error["message"]) for error in errors):
        slept = "the computer of the launcher slept, or the network to the node was cut"
        cause = slept if left[0].ended["reason"] == StopReason.SILENCE else SENT
        return _fail("lost", f"{left[0].name} ended the job: {left[0].ended['why']}.", cause, AGAIN, node=left[0].name)
    if errors:
        return _explain_waiting(state, errors)
    if state.reason:
        return _explain_join(state)
    if lost := _find_lost(state):
        return _explain_lost(lost)
    bad = [part for part in state.nodes.values() if not part.by_hand and (not part.ended or part.ended["returncode"])]
    if bad:
        # A node that was told to end (srun tells all when one has failed) is not the one that failed.
        return _explain_torchrun(state, min(bad, key=lambda part: bool(part.ended and part.ended["reason"])))
    return _explain_alone(state) if trained_alone(state) else None


def describe_restart(errors: list[dict]) -> str:
    """One line about the first of the errors after which torchrun restarted the workers."""
    error = _find_first(errors)
    return f"rank {error['rank']} on {error['node']}: {_shorten_message(error)}"


def _fail(kind: str, what: str, cause: str, fix: str, **more: object) -> Failure:
    return Failure(kind, textwrap.shorten(what, 120, placeholder="…"), cause=cause, fix=fix, **more)


def _find_first(errors: list[dict]) -> dict:
    """A rank's own failures come before those that another rank caused, and then the earlier ones."""
    # SIGABRT and SIGTERM are between the two: NCCL's watchdog aborts a rank that waits, and torchrun ends one.
    return min(errors, key=lambda error: (not _is_own(error), error.get("code") in (-6, -15), error["at"]))


def _is_own(error: dict) -> bool:
    """True unless it only says that another rank is gone; an error without a file is taken for torch's."""
    return not failed_as_consequence(error["message"], error.get("file", "/torch/"))


def _add_traceback(state: JobState, error: dict) -> dict:
    """An exit with the traceback that the rank printed last, if only its exit status was heard of."""
    found = PRINTED.match("\n".join(state.rank_states[error["rank"]].tail))
    # With another status it did not end by an exception: it caught that, and printed it.
    if not found or error["kind"] != "exit" or error.get("code") != 1:
        return error
    place, traceback = _find_stand(found[1]).partition(", in ")[0], re.sub(rf'(File "){SCRIPT_FOLDER}', r"\1", found[1])
    return {**error, "kind": "exception", "message": found[2], "traceback": traceback, "location": place}


def _explain_rank(state: JobState, errors: list[dict]) -> Failure:
    error = _find_first(errors)
    rank, kind = error["rank"], error["kind"]
    # Its last lines that say why it ended, if it ended without an exception.
    words = [line for line in state.rank_states[rank].tail if "Warning" not in line]
    if kind == "signal":
        words = [line for line in words if ABORTS.search(line)] or [line for line in words if line[:1] != " "][-1:]
    else:
        words = words[-1:] if kind == "exit" else []
    said = (error["message"].strip().splitlines() or [kind])[0]
    if kind == "exit" and words and words[-1] not in said:
        said += f": {words[-1]}"
    later = [other for other in errors if other["rank"] != rank]
    # torchrun ends the other ranks of its node by SIGTERM.
    own = [other for other in later if _is_own(other) and other.get("code") != -signal.SIGTERM]
    return _fail(
        kind,
        f"Rank {rank} on {error['node']} {'was ' if kind == 'signal' else 'failed first: '}{said}",
        *_explain_error(state, error, words, errors),
        **{name: error[name] for name in ("rank", "node", "message", "location", "traceback")},
        consequences=_list_messages([other for other in later if other not in own]),
        others=_list_messages(own),
        stacks=state.stacks,
    )


def _explain_error(state: JobState, error: dict, words: list[str], errors: list[dict]) -> tuple[str, str]:
    """The cause and the fix, as far as they are known: from the rank's message, its last words, or how it ended."""
    kind = error["kind"]
    if kind == "signal" and error["code"] == -signal.SIGKILL:
        (cause, fix), peak = SIGNALS[signal.SIGKILL], state.memory.get(error["rank"])
        return (f"{cause}; its memory had reached {peak / 2**20:,.0f} MiB" if peak else cause), fix
    trace = re.sub(r"^ {4}.*\n?", "", error["traceback"], flags=re.MULTILINE)  # lines of source may talk of anything
    cause, fix = look_up("\n".join([trace, error["message"], *words]))
    if not cause:
        cause, fix = _explain_full_disk(state, error)
    cause, fix = error.get("cause") or cause, error.get("fix") or fix
    if kind == "signal" and not cause:
        return _explain_signal(-error["code"], words[-1][:200] if words else "")
    if "different collectives" in cause:
        places = {rank: _find_stand(text) for rank, text in state.stacks.items()}
        places |= {other["rank"]: other["location"] for other in errors if other["location"]}
        cause += f": {'; '.join(f'rank {rank} at {place}' for rank, place in sorted(places.items()) if place)}"
    unknown = "the launcher does not know this message; it is the script's, or of a package that it uses"
    place = error["location"] or _find_stand(state.rank_states[error["rank"]].stack)
    begin = f"begin at {place}, the script's own line" if place else "begin at the last lines of the traceback"
    if kind == "exit":
        unknown = "the script ended itself with this status; that is the last line that it printed"
        begin = "look at the last lines of this rank"
    return cause or unknown, fix or begin


def _explain_signal(number: int, last: str = "") -> tuple[str, str]:
    """The likely cause of a signal that ended a program, and what to do; ``last`` is the last line that it printed."""
    cause, fix = SIGNALS.get(number, (SENT, AGAIN))
    return f"{cause}; the last that it printed: {last}" if last else cause, fix


def _explain_waiting(state: JobState, errors: list[dict]) -> Failure:
    """Ranks only waited for others: one ended early, hangs, or cannot be reached."""
    first, waiting, texts = errors[0], {error["rank"] for error in errors}, _list_messages(errors)
    if lost := _find_lost(state):
        return _explain_lost(lost, texts)
    if early := [rank for rank in state.find_ranks(lambda one: one.done) if rank not in waiting]:
        return _explain_early(state, early[0], first, texts)
    text = "\n".join(error["message"] for error in errors)
    if WAITED.search(text):
        return _explain_hang(state, errors)
    cause, fix = look_up(text)
    cause = cause or "another rank died without a word, or the network between the nodes was cut"
    fix = fix or "job.preflight() looks at the network both ways; the log has what torchrun said"
    what = f"Rank {first['rank']} on {first['node']} lost its peers: {_shorten_message(first)}"
    rank = min(set(state.ranks) - waiting, default=first["rank"])
    who = {"rank": rank, "node": state.ranks[rank].node if rank in state.ranks else first["node"]}
    others = {"consequences": texts, "stacks": _list_stands(state, errors)}
    return _fail("lost", what, cause, fix, **who, message=first["message"], **others)


def _explain_early(state: JobState, rank: int, waiter: dict, consequences: dict[int, str]) -> Failure:
    """A rank had ended its script in order while another still waited for it."""
    cause = "it left earlier (return, sys.exit), or the ranks have different numbers of batches"
    cause += _quote_last(state, rank)
    fix = "for batches: drop_last=True, or torch.distributed.algorithms.join.Join around the loop"
    what = f"Rank {rank} had ended its work while rank {waiter['rank']} still waited for it."
    facts = {"rank": rank, "node": state.ranks[rank].node, "message": waiter.get("message", "")}
    return _fail("exit", what, cause, fix, **facts, consequences=consequences, stacks=_list_stands(state, [waiter]))


def _explain_hang(state: JobState, errors: list[dict]) -> Failure:
    """The ranks stand still, or their group's timeout came: the answer depends on where each of them stood."""
    facts = {error["rank"]: error for error in errors} | state.still
    waiting = sorted({*state.waiting, *(error["rank"] for error in errors)})
    halted, done = state.find_ranks(lambda one: one.halted), state.find_ranks(lambda one: one.done)
    awaited = [*halted, *(rank for rank in state.busy if rank not in waiting)]
    if waiting and done and not awaited:
        return _explain_early(state, done[0], {"rank": waiting[0], **facts.get(waiting[0], {})}, {})
    rank = next(iter([*awaited, *state.find_ranks(lambda one: one.lingers), *waiting]), 0)
    node, fact = state.ranks[rank].node if rank in state.ranks else "", facts.get(rank, {})
    if awaited:
        whom = next((f"rank {one} on {state.ranks[one].node}" for one in waiting if one != rank), "another rank")
        stood = _find_stand(state.rank_states[rank].stack)
        where = f"in {fact['where']}" if fact.get("where") else f"at {stood}" if stood else "silent"
        where = "stopped (SIGSTOP)" if rank in halted else where
        what = f"Rank {rank} on {node} was {where} while {whom} waited for it."
        # Where only the stack of its end is known, that does not tell if it waited, too.
        cause = "it did something else for longer than the group's own timeout, or waited in another collective"
        cause += _quote_last(state, rank)
        fix = "every rank has to come to the same collectives; for work that takes long: init_process_group(timeout=…)"
    elif not waiting:
        what = f"The script has ended on every rank, but thread {fact['thread']!r} of rank {rank} still runs."
        cause = "Python waits at its end for every thread that is not a daemon; this one waits for something itself"
        fix = "stop the thread and join() it at the script's end, or make it with daemon=True"
    else:
        what, cause, fix = _explain_standstill({one: facts.get(one, {}) for one in waiting})
    message = next((error["message"] for error in errors), "")
    others = {"consequences": _list_messages(errors), "stacks": _list_stands(state, errors)}
    return _fail("hang", what, cause, fix, rank=rank, node=node, message=message, **others)


def _explain_standstill(facts: dict[int, dict]) -> tuple[str, str, str]:
    """The headline, the cause and the fix if every rank waits for another one."""
    what = "The ranks wait for each other."
    cause = "a collective (all_reduce, barrier, backward of DDP) that not every rank calls, or a blocked network"
    fix = "compare where the ranks stood: every rank has to call the same collectives in the same order"
    places = {rank: fact["where"] for rank, fact in facts.items() if fact.get("where")}
    named = "; ".join(f"rank {rank} in {place}" for rank, place in list(places.items())[:4])
    if all(fact.get("meeting") for fact in facts.values()):
        what = f"The ranks did not meet: {len(facts)} of them stand in init_process_group."
        cause = "they look for each other in different places, a rank= or world_size= is wrong, or the network is shut"
        if changes := next((fact["changes"][0] for fact in facts.values() if fact.get("changes")), ""):
            cause = f"the script overrides torchrun: {changes}"
        fix = "remove the lines that set MASTER_ADDR, MASTER_PORT, RANK or WORLD_SIZE, and call "
        fix += "init_process_group('gloo') without init_method=, rank= and world_size=: torchrun has set them all"
    elif raised := [rank for rank, fact in facts.items() if fact.get("raised")]:
        what = f"Rank {raised[0]} waits in {places.get(raised[0], '')} while it handles an error."
        error = clean_message(facts[raised[0]]["raised"])
        cause = f"the error is {error}; its `finally` or `except` waits for other ranks"
        fix = "fix that error; call no collective and no barrier in a finally: or except:"
    elif 0 < sum(bool(fact.get("forward")) for fact in facts.values()) < len(facts):
        cause = f"not every rank is in the forward of a DDP model: {named}"
        fix = "evaluate with model.module(…) on one rank alone, or call the model equally often on every rank"
    elif len(set(places.values())) > 1:
        cause = f"they stand in different collectives, or one of them is an exchange with another rank: {named}"
    return what, cause, fix


def _quote_last(state: JobState, rank: int) -> str:
    tail = state.rank_states[rank].tail
    return f"; the last that it printed: {tail[-1][:160]}" if tail else ""


def _shorten_message(error: dict) -> str:
    # The first line: the last one of torch's long messages is advice.
    lines = error["message"].strip().splitlines() or [error["kind"]]
    return shorten_gloo(lines[0])[:160]


def _list_messages(errors: list[dict]) -> dict[int, str]:
    return {error["rank"]: _shorten_message(error) for error in errors if error["message"]}


def _list_stands(state: JobState, errors: list[dict]) -> dict[int, str]:
    """By rank, where it stood, as a file, a line and a function."""
    # A rank that NCCL's watchdog aborted has printed its stacks; it was in no state to hand them over.
    tails = {error["rank"]: "\n".join(state.rank_states[error["rank"]].tail) for error in errors}
    printed = {error["rank"]: error.get("traceback") or tails[error["rank"]] for error in errors}
    # From the same look as the place in the cause: a rank may move when the others end.
    printed |= {rank: fact["traceback"] for rank, fact in state.still.items() if fact.get("traceback")}
    texts = state.stacks | {rank: text for rank, text in printed.items() if text}
    return {rank: _find_stand(text) or "(not known)" for rank, text in texts.items()}


def _find_stand(stack: str) -> str:
    """The line of the training script in a stack of faulthandler (innermost first) or of traceback (last), or ""."""
    found = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', stack)
    # In traceback's own form the script has no folder, or only those of its package, see nodelaunch.node.watch.
    own = [place for place in found if re.match(SCRIPT_FOLDER, place[0]) or not re.match("[/<]", place[0])]
    if not own:
        return ""
    path, line, name = own[0] if "most recent call first" in stack else own[-1]
    return f"{re.sub(SCRIPT_FOLDER, '', path)}, line {line}, in {name}"


def _explain_limit(state: JobState, limits: list[str]) -> Failure:
    cause = "it had more to do, or a rank waited for something that never came"
    silent = [part.name for part in state.nodes.values() if state.reason and not (part.ended or part.by_hand)]
    if silent:
        cause = f"the supervisor on {', '.join(silent)} was stopped (SIGSTOP), or that machine hangs"
    if stands := [f"rank {rank} in {fact['where']}" for rank, fact in state.still.items() if fact["where"]]:
        seconds = min(fact["seconds"] for fact in state.still.values())
        cause += f"; these ranks have not moved for {seconds:.0f} s: {'; '.join(stands[:4])}"
    fix = "look at what each rank waits for there; a larger limit= only if that ends by itself"
    if not state.still.keys() >= state.ranks.keys():  # a rank moved until the end
        fix = "a larger limit=, or less work"
    what = f"The job ran into its {limits[0] if limits else f'time limit of {state.spec.limit:g} s'}."
    return _fail("limit", what, cause, fix)


def trained_alone(state: JobState) -> bool:
    """True if ranks that should have formed one group of all formed none."""
    spec, groups = state.spec, [state.rank_states[rank].groups for rank in state.ranks]
    if not spec or spec.program or not spec.needs_group or spec.world_size == 1:
        return False
    return bool(groups) and not any(sizes is None or max(sizes, default=0) >= spec.world_size for sizes in groups)


def _explain_alone(state: JobState) -> Failure:
    """Every rank ended well, and they formed no group of all."""
    ranks = [state.rank_states[rank] for rank in sorted(state.ranks)]
    believed = next((one.believed for one in ranks if one.believed), [])
    cause = "; ".join(believed[:3]) or "the script does not call init_process_group, or only on a condition"
    size = max(max(one.groups, default=1) for one in ranks)
    trained = "alone" if size == 1 else f"in a group of {size}"
    join = "init_process_group('gloo') with no other arguments uses what torchrun has set"
    advice = next((one.advice for one in ranks if one.advice), join)
    fix = f"{advice}; a script that needs no group: TorchrunJob(…, needs_group=False)"
    what = f"The {state.spec.world_size} ranks did not work together: each trained {trained}."
    return _fail("alone", what, cause, fix)


def _explain_join(state: JobState) -> Failure:
    missing = state.list_missing()
    cause = "it was started, and did not reach the meeting point"
    if not state.nodes[missing[0]].started:
        cause = f"{_name_starter(state, 'the')} was not started there"
    fix = "start it (bash node….sh on that node), or let job.preflight() say what is in the way"
    return _fail("join", f"Not all nodes joined in time; missing: {', '.join(missing)}.", cause, fix, node=missing[0])


def _name_starter(state: JobState, article: str) -> str:
    return f"{article} starter of {state.spec.program[0]}" if state.spec and state.spec.program else "torchrun"


def _find_lost(state: JobState) -> NodeState | None:
    return next((part for part in state.nodes.values() if part.gone and part.ended is None), None)


def _explain_lost(part: NodeState, consequences: dict[int, str] | None = None) -> Failure:
    refusal = part.refusal
    if refusal and (not part.started or FULL.search(str(refusal))):
        return _fail("lost", refusal.what, refusal.cause, refusal.fix, node=part.name, message=str(refusal))
    cause = "the node was switched off, the network between you and it was cut, or its supervisor was killed"
    what, fix = f"The connection to {part.name} was lost.", f"see that it answers (ssh), then {AGAIN}"
    return _fail("lost", what, cause, fix, node=part.name, message=f"{refusal or ''}", consequences=consequences or {})


def _explain_torchrun(state: JobState, part: NodeState) -> Failure:
    text, returncode = "\n".join(part.tail), part.ended["returncode"] if part.ended else 1
    # torchrun's own clock was a moment before the launcher's; or a node that expects fewer others ended the meeting.
    if re.search("Rendezvous(Timeout|Closed)Error", text) and not all(one.joined for one in state.nodes.values()):
        return _explain_join(state)
    errors = [line.strip() for line in part.tail if re.search(r"(Error|Exception|error)\b", line)]
    said = errors[-1] if errors else f"exit status {returncode}"
    cause, fix = _explain_disk(part)
    if not cause and re.search(r"Rendezvous\w*Error|DistStoreError|TimeoutError|EADDRINUSE", text):
        cause = "the nodes could not meet at node 0's address and port"
        fix = "job.preflight() says in seconds which way is closed"
    elif not cause:
        cause, fix = _explain_signal(-returncode) if returncode < 0 else look_up(text)
    facts = {"node": part.name, "message": said, "traceback": "\n".join(list(part.tail)[-15:])}
    what = f"{_name_starter(state, 'The')} ended on {part.name}: {said}"
    return _fail("torchrun", what, cause, fix or "read the log", **facts)


def _explain_disk(part: NodeState, path: str = "") -> tuple[str, str]:
    """The cause and the fix if a disk of a node is full, as far as that was said or measured; otherwise "", ""."""
    ended = part.ended or {}
    full = ended.get("room") is not None and ended["room"] < 2**16
    path = path or name_full_disk(part.full) or (ended["folder"] if full else "")
    if path.startswith("/dev/shm/"):
        return look_up(f"No space left on device: '{path}'")
    fix = "free some space there (df -h), or use a folder on a larger disk; then run the job again"
    if path:
        return f"the disk is full at {path}", fix
    return (f"a disk is full: {clean(part.full, 200)}", fix) if part.full else ("", "")


def _explain_full_disk(state: JobState, error: dict) -> tuple[str, str]:
    """The cause and the fix if a rank failed because a disk is full; otherwise "", ""."""
    text, part = f"{error['message']}\n{error['traceback']}", state.nodes[error["node"]]
    if FULL.search(text):
        return _explain_disk(part, error.get("disk") or name_full_disk(text))
    # A rank that says nothing more: its own words, or those of a program that it ran, may have found no room.
    return _explain_disk(part) if error["kind"] == "exit" or "CalledProcessError" in error["message"] else ("", "")


def look_up(text: str) -> tuple[str, str]:
    """The cause and the fix of the first known message in a text; two empty strings if there is none."""
    # What was caught before ("During handling …") need not be why the script failed.
    text = text.rpartition("During handling of the above exception, another exception occurred:")[2]
    for pattern, cause, fix in KNOWN:
        if found := re.search(pattern, text, re.MULTILINE):
            return found.expand(cause), found.expand(fix)
    return "", ""
