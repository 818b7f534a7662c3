"""Exercise 5.1, by reading the script: what a run on a CPU that goes well cannot show."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from course.check import expect

BY_RANK = "RANK counts over all nodes: with two GPUs each, rank 2 would look for a third GPU on its own node"


def expect_precautions(tree: ast.AST) -> None:
    """Looks for the backend between GPUs, the timeout, the GPU of the process, and a checkpoint.

    Raises:
        NotYetError: One of them is not there.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [(getattr(call.func, "attr", getattr(call.func, "id", "")), call) for call in calls]
    starts = [call for name, call in named if name == "init_process_group"]
    expect(
        bool(starts),
        "how the processes meet",
        yours="no init_process_group",
        expected="dist.init_process_group(backend, timeout=...)",
        hint="torchrun sets the addresses and ranks; init_process_group reads them and connects the processes",
    )
    _expect_backend(tree)
    # A keyword without a name is **options, which may hold it.
    waits = [keyword.value for call in starts for keyword in call.keywords if keyword.arg in ("timeout", None)]
    waits += [call.args[2] for call in starts if len(call.args) > 2]
    expect(
        any(not (isinstance(wait, ast.Constant) and wait.value is None) for wait in waits),
        "how long a process waits for one that does not answer",
        yours="timeout=None, the default" if waits else "init_process_group without timeout=",
        expected="timeout=timedelta(minutes=2)",
        hint="without it the others wait 10 minutes (nccl) or 30 (gloo) for a process that hangs",
    )
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    names = {name for name, _ in named}
    expect(
        "LOCAL_RANK" in texts or "get_node_local_rank" in names,
        "which GPU a process takes",
        yours="LOCAL_RANK is not read",
        expected='int(os.environ["LOCAL_RANK"])',
        hint=BY_RANK,
    )
    _expect_local_rank(named)
    expect(
        bool({"set_device", "set_device_index"} & names),
        "the current GPU of a process",
        yours="set_device is not called",
        expected="torch.cuda.set_device(device), where there is a GPU",
        hint="calls that name no device take the current one, GPU 0 unless set: all processes would meet there",
    )
    expect(
        "save" in names,
        "a checkpoint",
        yours="torch.save(...) is not called",
        expected="rank 0 saves",
        hint="if args.checkpoint and rank == 0: torch.save(state, args.checkpoint)",
    )


def _expect_backend(tree: ast.AST) -> None:
    """Gloo is not the only backend that is named."""
    words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    words += [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    backends = {backend for backend in ("gloo", "nccl") if any(backend in word.lower() for word in words)}
    expect(
        backends != {"gloo"},  # where none is named, torch chooses by the device
        "the backend between GPUs",
        yours="gloo alone is named",
        expected='"nccl" if cuda else "gloo"',
        hint="gloo sends a GPU's gradients through the processor's memory; nccl is made for GPUs",
    )


def _expect_local_rank(named: Sequence[tuple[str, ast.Call]]) -> None:
    """No device is chosen by the rank in the whole job, unless it is divided by the number of GPUs."""
    for name, call in named:
        chosen = [keyword.value for keyword in call.keywords if keyword.arg == "device_ids"]
        if name in ("set_device", "set_device_index", "device"):
            chosen += [*call.args, *(keyword.value for keyword in call.keywords)]
        elif name in ("DDP", "DistributedDataParallel"):
            chosen += call.args[1:2]
        for one in chosen:
            nodes = list(ast.walk(one))
            used = {getattr(node, "attr", getattr(node, "id", getattr(node, "value", ""))) for node in nodes}
            expect(
                "device_count" in used or not {"rank", "RANK", "get_rank"} & used,
                "which GPU a process takes",
                yours=f"{ast.unparse(one)[:80]} in {name}(...)",
                expected="the one of its local_rank",
                hint=BY_RANK,
            )


def asks_for_checkpoint(tree: ast.AST) -> bool:
    """Whether some condition names the checkpoint, as one around ``torch.save`` does; if not, a run has to tell."""
    tests = (node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp | ast.While))
    names = (getattr(node, "attr", getattr(node, "id", "")) for test in tests for node in ast.walk(test))
    return "checkpoint" in names
