"""The messages of torch, Python and Linux that the launcher knows: what each means, and what to do about it.

This table is the only place that knows messages of a failed rank. tests/test_launch_field.py takes a real text of each
through the whole diagnosis. Texts are those of torch 2.14 and Python 3.11 unless a version is named.
"""

from __future__ import annotations

import re

HANDLING = "During handling of the above exception, another exception occurred:"

# A pattern, searched in a rank's traceback and message, or in its last words; the cause in plain words; and the fix.
# `\g<name>` inserts what a group of the pattern has found. The first match counts: a special case comes before the
# general one.
KNOWN = (
    # Limits of the node. A full /dev/shm is no full disk.
    (r"Too many open files|received \d+ items of ancdata|Errno 24\]",
     "this process has as many open files as the node allows it (`ulimit -n`)",
     "torch.multiprocessing.set_sharing_strategy('file_system'), or fewer files kept open; or raise the limit: ulimit "
     "-n 65536 in the shell that starts the job"),
    (r"unable to (write to|open|mmap|resize|allocate)[^\n]*</?torch_[^\n]*|/dev/shm[^\n]*No space left"
     "|^bash: .*Bus error|by signal: Bus error|insufficient shared memory|out of shared memory"
     r"|</?torch_[^\n]*No space left|No space left on device: '/dev/shm"
     r'|multiprocessing/\w+\.py\"[^\n]*\n(?:(?: {4}[^\n]*)?\n)*OSError: \[Errno 28\]',
     "the shared memory (/dev/shm) is full; a DataLoader's workers hand their batches over in it",
     "num_workers=0, or more shared memory: podman run --shm-size=2g (docker too); ls -l /dev/shm shows what earlier "
     "runs left"),
    (r"unable to lock file|HDF5[^\n]*lock",
     "another rank has this file open for writing, and HDF5 locks it",
     "open it with mode 'r' on every rank, and let rank 0 alone write; env={'HDF5_USE_FILE_LOCKING': 'FALSE'} if all "
     "read"),
    ("can't start new thread|pthread_create (failed|has failed)|(fork|thread"
     r"|libgomp)[^\n]*Resource temporarily unavailable|(\bfork(pty)?\(|in _execute_child|in spawnv_passfds"
     r"|popen_fork\.py)[\s\S]*^BlockingIOError: ",
     "the node allows this user no more processes or threads (`ulimit -u`, or the container's limit)",
     "fewer num_workers and threads (OMP_NUM_THREADS=1), or a higher limit: ulimit -u"),
    ("^BlockingIOError: ",
     "somebody else, such as another rank, holds the lock (flock, lockf) that the script asked for without waiting; or "
     "a socket had nothing to read yet",
     "let one rank alone take the lock, or wait for it: fcntl.flock(file, fcntl.LOCK_EX) without LOCK_NB"),
    # Memory.
    ("CUDA out of memory|CUDA error: out of memory|cuda.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
     "the GPU's memory is full",
     "a smaller --batch-size"),
    (r"can't allocate memory: you tried to allocate (?P<size>\d+) bytes",
     r"the node's memory (or its limit, `ulimit -v`) has no room for a tensor of \g<size> bytes",
     "a smaller batch or model, fewer processes on the node, or a node with more memory"),
    (r"Cannot allocate memory|std::bad_alloc|^MemoryError|\bENOMEM\b|Unable to allocate [\d.]+ \w+ for an array",
     "the node's memory is full (or its limit, `ulimit -v`, is reached); starting another process needs some, too",
     "a smaller batch or data set in memory, fewer num_workers, or a node with more memory"),
    (r"terminated with signal SIGKILL|died with <Signals\.SIGKILL|process pool was terminated abruptly",
     "a process that the script started was killed: most often by Linux, for want of memory (`sudo dmesg | tail` then "
     "says so)",
     "fewer such processes, less in the memory of each, or a node with more memory"),
    # DistributedDataParallel.
    (r"Expected to have finished reduction in the prior iteration(?:[\s\S]*these are(?P<names>: [^\n]+))?",
     r"DDP waits for a gradient of every parameter, and some took no part in the loss\g<names>",
     "use them in the loss, or requires_grad_(False) before DDP; if they differ from step to step: DDP(model, "
     "find_unused_parameters=True)"),
    ("Expected to mark a variable ready only once",
     "a parameter got its gradient twice in one backward: it is used in two forwards, or recomputed by a checkpoint",
     "checkpoint(…, use_reentrant=False), one forward per backward, or DDP(model, static_graph=True)"),
    ("appears not to match sizes of the same param|DDP expects same model across all ranks",
     "the ranks built different models",
     "build the model from the same arguments on every rank"),
    ("is not needed when a module doesn't have any parameter",
     "no parameter of the model can be trained (requires_grad is False for all), so there is nothing to average",
     "freeze fewer parameters, or leave the model without DDP"),
    (r"'(?P<kind>DistributedDataParallel|DataParallel)' object has no attribute '(?P<name>\w+)'",
     r"\g<kind> wraps the model, and has none of the model's own attributes",
     r"model.module.\g<name>"),
    ("device_ids and output_device arguments only work with",
     "DDP was given device_ids, and the model is not on that one GPU",
     "model.to(device) before DDP; on a CPU: DDP(model) without device_ids"),
    # Weights and checkpoints.
    (r'Error\(s\) in loading state_dict[\s\S]*Unexpected key\(s\)[^\n]*\"(?P<prefix>module\.|_orig_mod\.)',
     r'the names in the checkpoint begin with "\g<prefix>": the wrapper (DDP or torch.compile) was saved, not the '
     "model",
     "save model.module.state_dict(); for this file: "
     r"torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, '\g<prefix>')"),
    (r'Error\(s\) in loading state_dict[\s\S]*Missing key\(s\)[^\n]*\"(?P<prefix>module\.|_orig_mod\.)',
     r'the wrapped model (DDP or torch.compile) was given the weights of the bare one, whose names lack "\g<prefix>"',
     "load the weights before the model is wrapped, or into model.module"),
    (r"size mismatch for (?P<name>[\w.]+): copying a param",
     r"the checkpoint is of a model with other sizes; the first that differs is \g<name>",
     "build the model as it was when the checkpoint was saved (classes, width, depth)"),
    (r"Error\(s\) in loading state_dict",
     "the names of the weights in the checkpoint are not those of this model",
     "build the model as it was when the checkpoint was saved, and load the part of the file that holds the weights"),
    (r"Weights only load failed[\s\S]*GLOBAL (?P<name>[\w.]+) was not an allowed global",
     r"the checkpoint holds \g<name>, and since torch 2.6 torch.load takes nothing but tensors and plain values",
     "save plain values (vars(args), float(x)); for a file that you trust: torch.load(…, weights_only=False)"),
    ("Weights only load failed|PytorchStreamReader failed|invalid load key|not a ZIP archive|unexpected EOF, expected",
     "the file that torch.load read is no checkpoint, or is damaged: cut short, or another kind of file; or another "
     "rank still writes it",
     "look at it (ls -l, file); copy or download it again, or take the checkpoint before it; if a rank has just saved "
     "it: dist.barrier() after the save"),
    (r"Attempting to deserialize object on (?P<what>a CUDA device|CUDA device \d+)",
     "the checkpoint was saved on a GPU that this process does not have",
     "torch.load(…, map_location='cpu'), then model.to(device)"),
    # Devices and backends.
    ("invalid device ordinal|device >= 0 && device < num_gpus|Invalid device id",
     "the node has fewer GPUs than processes, or the script numbers them by RANK instead of LOCAL_RANK",
     "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), and nproc_per_node= at most the GPUs of each node"),
    ("Duplicate GPU detected|Multiple Ranks are using the same GPU",
     "two processes took the same GPU, and NCCL wants one for each",
     "torch.cuda.set_device(LOCAL_RANK) in the script; nproc_per_node= at most the number of GPUs of each node"),
    ("ProcessGroupNCCL is only supported with GPUs|doesn't have NCCL built in|NCCL is not available",
     "the script asks for the backend nccl, which needs a GPU for every process; this process sees none",
     "backend='nccl' if torch.cuda.is_available() else 'gloo'"),
    (r"No backend type associated with device type (?P<device>\w+)|Tensors must be CUDA and dense",
     "the group's backend does not take tensors of this device (nccl: GPU alone; gloo: CPU)",
     "move the tensor to the group's device first, or init_process_group('cpu:gloo,cuda:nccl')"),
    ("Found no NVIDIA driver|No CUDA GPUs are available|not compiled with CUDA enabled|No NVIDIA GPU"
     "|CUDA driver version is insufficient|driver on your system is too old|no CUDA-capable device"
     "|CUDA is not available|cuInit|CUDA unknown error",
     "the script asks for a GPU, and torch finds none here",
     "device = 'cuda' if torch.cuda.is_available() else 'cpu'; nvidia-smi says what this node has"),
    ("no kernel image is available",
     "this torch was built for other GPUs than the one here",
     "a torch build whose torch.cuda.get_arch_list() has this GPU's torch.cuda.get_device_capability()"),
    ("an illegal memory access was encountered",
     "a kernel on the GPU read or wrote beyond its tensors; it was another one than the line that is named",
     "env={'CUDA_LAUNCH_BLOCKING': '1'} names the right line; often an index out of range"),
    (r"Target -\d+ is out of bounds|Class values must be non-negative",
     "a label is below 0: the data has none there and says so by -1, or 1 was taken off a label that counts from 0",
     "look at labels.min(); leave such examples out, or cross_entropy(…, ignore_index=-1)"),
    ("index out of range in self",
     "an embedding was asked for a row that it does not have: a token that is not among its words, or a text that is "
     "longer than the model's table of positions",
     "compare tokens.min() and tokens.max() with num_embeddings; cut long texts (truncation=True, max_length=…)"),
    (r"device-side assert|Target \S+ is out of bounds|Class values must be smaller than num_classes",
     "a label (or token) is larger than the number of classes (or words) that the model has, or below 0",
     "num_classes= of the data set; labels count from 0"),
    (r"Expected all tensors to be on the same device|Input type \(\S+\) and weight type \(\S+\) should be the same",
     "the model and its input are on different devices, or have different dtypes",
     "model.to(device), and images.to(device), labels.to(device) in each step"),
    ("Cannot re-initialize CUDA in forked subprocess",
     "a process that had used the GPU was copied by fork, and CUDA does not survive that",
     "DataLoader(…, multiprocessing_context='spawn'), and no CUDA call in the data set's own code"),
    (r"SyncBatchNorm[^\n]*(only work with GPU|expected input tensor to be on)",
     "SyncBatchNorm works on GPUs alone",
     "convert_sync_batchnorm only if torch.cuda.is_available()"),
    (r"mixed torch\.Tensor and DTensor",
     "a sharded parameter (DTensor) met a plain tensor: a part or a method of the model was called, not the model",
     "call the module that fully_shard (or parallelize_module) was applied to; or shard that part by itself, too"),
    ("OMP: Error #15",
     "two copies of OpenMP were loaded: numpy, torch or another package come from different sources",
     "install them from one source (all by pip, or all by conda), into a new environment"),
    (r"free\(\): invalid|double free or corruption|malloc\(\): |munmap_chunk\(\)|corrupted (size|double-linked"
     "|unsorted)",
     "C or C++ code damaged the process's memory; often a package built for another version of torch or numpy",
     'the log has the line of the script, below "Current thread"; install what has C++ parts again for this torch'),
    ("Trying to backward through the graph a second time",
     "a tensor of an earlier step is still part of this step's graph, such as a hidden state or a summed loss; or "
     "backward() was called twice",
     "detach it before the next step (hidden = hidden.detach()), sum loss.item(); backward(retain_graph=True) if both "
     "are meant"),
    ("sampler option is mutually exclusive with shuffle",
     "the DataLoader got a sampler and shuffle=True; the sampler shuffles already",
     "remove shuffle=True, and call sampler.set_epoch(epoch) before each epoch"),
    ("Expected more than 1 value per channel",
     "a batch normalisation got a single image: the last, smaller batch of an epoch",
     "DataLoader(…, drop_last=True)"),
    # The group and its collectives.
    (r"EnforceNotMet[\s\S]*(pair|context|buffer)\.(cc|h)|op\.preamble\.length <= op\.nbytes"
     r"|gloo/\S+\.cc:\d+\] [^\n]* vs ",
     "the ranks called different collectives, or one collective with tensors of different sizes",
     "same collective, shape and dtype on every rank (for parts of different sizes: pad them, or all_gather_object)"),
    ("Default process group has not been initialized",
     "the script used torch.distributed before it had joined the group of all ranks",
     "dist.init_process_group('gloo') (nccl on GPUs) at its start"),
    ("initialize the default process group twice",
     "the script (or a framework in it) calls init_process_group a second time",
     "call it once: `if not dist.is_initialized(): dist.init_process_group(…)`"),
    (r"environment variable (?P<name>\w+) expected, but not set|KeyError: '(?P<key>RANK|LOCAL_RANK|WORLD_SIZE"
     r"|MASTER_ADDR|MASTER_PORT|SLURM_\w+|OMPI_\w+|PMI_\w+)'",
     r"the script reads \g<name>\g<key> from the environment, and what started it does not set that",
     "torchrun sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; start the script by it, and read those"),
    ("rendezvous: (rank|world size) parameter missing",
     "init_process_group got an address (init_method=), and no rank or world_size: they are -1, as where a script "
     "waits for --local_rank, which torchrun does not pass",
     "init_process_group('gloo') (nccl on GPUs) without init_method=, rank= and world_size=; local_rank = "
     "int(os.environ['LOCAL_RANK'])"),
    (r"the name '(?P<name>[^'\n]*)' of the meeting point is not known on this node(?P<own>, and the script set it)?",
     r"no address belongs to the name \g<name> here\g<own>",
     "leave MASTER_ADDR and MASTER_PORT to torchrun, which has set them: init_process_group('gloo') alone"),
    ("Unable to find (an? )?address for|Unable to find interface|no socket interface",
     "this network interface is not there, or has no address",
     "job.preflight() lists the interfaces of every node"),
    ("EADDRINUSE|(?i:address already in use)",
     "another program on that node has this port",
     "another port, or 0, which takes a free one"),
    (r"Error while creating shared memory segment (?P<path>/dev/shm\S*)",
     "NCCL found no room in the shared memory (/dev/shm)",
     "more shared memory: podman run --shm-size=2g (docker too); or env={'NCCL_SHM_DISABLE': '1'}"),
    ("Detected mismatch between collectives on ranks",
     "the ranks called different collectives, or one collective with tensors of different sizes",
     "same collective, shape and dtype on every rank: the message names both"),
    ("ncclUnhandledCudaError|ncclSystemError|ncclInternalError|NCCL error|ncclRemoteError",
     "NCCL, which moves the gradients between GPUs, gave up; its own words are in the lines before",
     "job.preflight() looks at GPUs and interfaces; env={'NCCL_DEBUG': 'INFO'} prints what NCCL tried"),
    # How the script was started.
    (r"required: [^\n]*--local[-_]rank|unrecognized arguments: [^\n]*--local[-_]rank",
     "the script expects --local_rank, which torch.distributed.launch passed before torch 2.0; torchrun sets "
     "LOCAL_RANK",
     "local_rank = int(os.environ['LOCAL_RANK']) in the script, in place of the argument"),
    (r"error: the following arguments are required: (?P<names>[^\n]+)",
     r"the script needs arguments that it was not given: \g<names>",
     "give them in args=[…]"),
    (r"error: (?P<words>unrecognized arguments: [^\n]+|argument [^\n]+)",
     r"the script does not take the arguments that it was given: \g<words>",
     "compare args=[…] with what the script's parser names"),
    ("attempted relative import (with no known parent package|beyond top-level package)",
     "the script is part of a package (`from .model import …`), and was started as a file of its own",
     "TorchrunJob(module='package.train', root='.') starts it as `torchrun -m package.train` does"),
    (r"before the\s+current process has finished its bootstrapping phase",
     "the script starts processes, and each of them ran the whole script again",
     "put what runs below `if __name__ == '__main__':`"),
    (r"bdb\.BdbQuit|EOFError: EOF when reading a line|reading from stdin while output is captured",
     "the script asks the keyboard (breakpoint(), pdb or input()), and a rank has none",
     "take that line out; to debug: python -m pdb train.py with one process, or print()"),
    (r"torch/serialization\.py\"[\s\S]*(Can't pickle|cannot pickle|Can't get local object|PicklingError)",
     "torch.save cannot write this object: its class is inside a function, or it holds a lambda, a lock or a file",
     "torch.save(model.state_dict(), …), which holds tensors alone"),
    (r"[/\"]copy\.py\"[\s\S]*(Can't pickle|cannot pickle|Can't get local object|PicklingError)",
     "copy.deepcopy cannot copy this object: it holds something such as a lock, an open file or a logger",
     "keep that out of the model, or copy its weights: new.load_state_dict(model.state_dict())"),
    ("Can't pickle|cannot pickle|Can't get local object|PicklingError",
     "this object cannot be sent to another process: a lambda, a function inside a function, an open file or a lock",
     "a function or class at the top of the file; open files inside the worker"),
    (r"No API key configured|api_key not configured|wandb\.errors\S* ?UsageError: [^\n]*(login|API key)",
     "Weights & Biases has no key on this node, and cannot ask for one",
     "env={'WANDB_MODE': 'offline'}; or run `wandb login` on the node once"),
    # The network beyond the job.
    ("CERTIFICATE_VERIFY_FAILED|SSLCertVerificationError",
     "the server's certificate is not trusted: it or this node's list is out of date, or a proxy shows its own",
     "look at the date (date), pip install -U certifi; or download by hand, and give the path"),
    ("gated repo|Cannot access gated|401 Client Error",
     "the model or data set asks for a licence to be accepted, or for a key",
     "accept it on its page once, and run `huggingface-cli login` on the node"),
    (r"\A(?![\s\S]*(urllib|requests|http|huggingface|wandb))[\s\S]*(gaierror|Name or service not known"
     "|Temporary failure in name resolution|nodename nor servname provided)",
     "no address belongs to a name that the script asked for, such as the node's own name or that of another node",
     "os.environ['MASTER_ADDR'], which torchrun sets, is node 0's; for the node's own name: a line in its /etc/hosts; "
     "a name on the internet: this node may not reach it"),
    (r"HTTPS?Connection\w*\(host=[\s\S]*Connection refused|URLError: <urlopen error \[Errno 111\]"
     "|^ConnectionRefusedError",
     "nothing listens where the script asks: the server (visdom, MLflow, …) is not started, or it runs on another "
     "machine, since localhost is each node itself",
     "start it, or give the address of the node that it runs on"),
    ("no internet connection|LocalEntryNotFoundError|couldn't connect to 'https?:|Max retries exceeded with url"
     "|Couldn't reach '|doesn't exist on the Hugging Face Hub either|URLError: <urlopen error|Failed to resolve '"
     "|Network is unreachable|outgoing traffic has been disabled|Temporary failure in name resolution"
     "|Name or service not known",
     "the script asks for something on the internet, which this node does not reach",
     "download it once beforehand, and give its path; a node behind a proxy needs env={'https_proxy': …}"),
    # What is missing on the node.
    (r"(?P<name>lib(?!cu|nv|nccl|torch|c10)[\w+.-]+\.so[\w.]*): cannot open shared object file",
     r"the library \g<name>, which belongs to the system, is missing on this node",
     "install the system's package that has it; for libGL.so.1: pip install opencv-python-headless"),
    (r"(?P<name>lib[\w+.-]+\.so[\w.]*): cannot open shared object file",
     r"the library \g<name> is missing on this node, or a package was built for another version of CUDA",
     "install the package again for the torch that is here (python -c 'import torch; print(torch.version.cuda)')"),
    (r"version `?(?P<name>(GLIBC|GLIBCXX|CXXABI)_[\d.]+)'? not found",
     r"this node's C or C++ library is older than a package needs (\g<name>)",
     "on this node, install the package from a wheel of pip, or bring a newer library: conda install -c conda-forge "
     "libstdcxx-ng, with the environment's lib folder first in LD_LIBRARY_PATH; for GLIBC_2.xx only a newer system"),
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
    (r"partially initialized module '(?P<name>[\w.]+)'",
     r"\g<name> and a module that it imports import each other, or a file of yours has a package's name",
     "import in one direction, or inside the function that needs it; rename a file that is called as a package is"),
    (r"cannot import name '(?P<name>\w+)' from '(?P<where>torch[\w.]*)'",
     r"this torch has no \g<name> in \g<where>: the script was written for another version of it, older or newer",
     "the version that the script asks for, or the name that torch's notes on a release give in its place"),
    (r"(?P<name>\w+)' \(consider renaming '(?P<file>[^']+)'",
     r"the script's own file \g<file> is imported in place of the package of that name",
     "rename that file"),
    (r"No module named '?(?P<name>torch\._six|torch\.utils\.data\._utils\.collate\.container_abcs)"
     r"|module 'numpy' has no attribute '(?P<numpy>\w+)'|cannot import name '(?P<old>\w+)' from 'collections'",
     r"the script was written for older versions: \g<name>\g<numpy>\g<old> is no longer there",
     "a newer version of that code, or the versions that it was written for"),
    (r"in find_class\n[^\n]*No module named '(?P<name>[\w.]+)|Can't get attribute '(?P<cls>\w+)' on <module",
     r"the file that torch.load read holds a whole model, and asks for the code of \g<name>\g<cls> as it was then",
     "save model.state_dict() in its place; for this file: that project's folder, by root= and PYTHONPATH in env="),
    (r"No module named '[\w.]+'; '(?P<name>[\w.]+)' is not a package",
     r"another file or installed package of the name \g<name> is imported in place of yours",
     r"rename or uninstall it: python -c 'import \g<name>; print(\g<name>.__file__)' says where it is"),
    (r"No module named '?(?P<name>(?:torch|torchvision|torchaudio|numpy)\.[\w.]+)",
     r"the installed version has no \g<name>: the code was written for another one, older or newer",
     "a newer version of that code, or the version that it was written for"),
    (r"No module named '?(?P<name>[\w.]+)|cannot import name '(?P<part>\w+)'",
     r"the script imports what this node does not have: \g<name>\g<part>",
     "a module of yours beside the script: root='.' copies the folder (files=['…'] one file); else: pip install it "
     "there"),
    (r"(PermissionError|Permission denied)[^\n]*?(?P<path> '[^'\n]+')?$",
     r"the user of this job may not use this file or address\g<path>",
     "ls -ld shows who may; use a folder of your own on that node"),
    ("FileExistsError|: File exists$",
     "it is there already: from an earlier run, or another rank made it a moment before",
     "os.makedirs(…, exist_ok=True), or a new name for each run; let rank 0 alone make it, with a barrier behind"),
    (r"Parent directory (?P<path>\S+) does not exist",
     r"the folder \g<path> is not on this node",
     "os.makedirs(…, exist_ok=True) on every rank before torch.save"),
    ("Read-only file system",
     "the script writes where nobody may write",
     "write below the job's own folder, or name a folder of yours"),
    (r"Couldn't find any class folder in (?P<path>\S+?)\.?$",
     r"\g<path> is there, and has no folder of pictures for each class",
     "name the folder above or below it that has: FOLDER/<class>/*.png"),
    (r"fatal error: (?P<name>[\w./+-]+\.(h|hpp|cuh)): No such file or directory",
     r"the C++ compiler does not find the header \g<name> on this node",
     "Python.h: the package python3-dev; cuda_*.h: the CUDA toolkit (nvcc); then run the job again"),
    (r"No such file or directory: '(?P<path>/(?![^'\n]*/(?:code/[0-9a-f]{64}|work/[\w.-]+-[0-9a-f]{6})/)[^'\n]*)'",
     r"\g<path> (or its folder) is not on this node, or not there yet",
     "see what is there (ls); if another rank writes it: dist.barrier() after the save, on every rank; data of your "
     "own: copy it to each node"),
    (r"No such file or directory|FileNotFoundError: \[Errno 2\]",
     "a path that is not on this node: a job runs in its own folder, which has the script and the files of files=, or "
     "with root= the project without files that git ignores or that are above 8 MiB",
     "root='.' copies the script's project and runs in it; for data that is large or that git ignores, an absolute "
     "path; what another rank writes: dist.barrier() after the save"),
    # A DataLoader's worker, where nothing before has said why.
    (r"DataLoader worker \(pid[^\n]*killed by signal: (?P<name>Segmentation fault|Aborted|Illegal instruction"
     "|Floating point exception|Bus error)",
     r"a worker of the DataLoader crashed in C code (\g<name>)",
     "num_workers=0 and env={'PYTHONFAULTHANDLER': '1'} show the line"),
    (r"DataLoader worker \(pid[^\n]*(killed by signal: (?P<name>\w+)|exited unexpectedly)",
     'a worker of the DataLoader ended without a word; Linux ends ("Killed") the process that takes most memory',
     "num_workers=0 shows the worker's own error; for want of memory: fewer workers, or a smaller prefetch_factor"),
    ("EADDRNOTAVAIL|Cannot assign requested address",
     "the script asks to listen at an address that this node does not have, such as one copied from an example "
     "(init_method=, MASTER_ADDR)",
     "init_process_group('gloo') alone: torchrun has set MASTER_ADDR and MASTER_PORT"),
    (r"connectFullMesh|Connection refused, remote=\[127\.",
     "a rank is gone, or listens on an address that the others cannot reach, such as the loopback",
     "leave interface= to the preflight, which takes the one on the route between the nodes"),
    ("RecursionError|maximum recursion depth|Stack overflow",
     "a function calls itself without an end",
     "look at the lines that repeat in the traceback"),
)  # fmt: skip


def look_up(text: str) -> tuple[str, str]:
    """The cause and the fix of the first known message in a text; two empty strings if there is none."""
    # What was caught before ("During handling …") need not be why the script failed.
    text = text.rpartition(HANDLING)[2]
    for pattern, cause, fix in KNOWN:
        if found := re.search(pattern, text, re.MULTILINE):
            return found.expand(cause), found.expand(fix)
    return "", ""
