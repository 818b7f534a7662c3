"""The messages of torch, Python and Linux that the launcher knows: what each means, and what to do about it.

Texts are those of torch 2.14 and Python 3.11. A message that explains itself has no row: it is quoted.
"""

from __future__ import annotations

import re

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


def look_up(text: str) -> tuple[str, str]:
    """The cause and the fix of the first known message in a text; two empty strings if there is none."""
    # What was caught before ("During handling …") need not be why the script failed.
    text = text.rpartition("During handling of the above exception, another exception occurred:")[2]
    for pattern, cause, fix in KNOWN:
        if found := re.search(pattern, text, re.MULTILINE):
            return found.expand(cause), found.expand(fix)
    return "", ""
