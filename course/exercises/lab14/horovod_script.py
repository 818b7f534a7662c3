"""Exercise 14.1: the calls of the learner's Horovod script, by reading it; nothing is run, and no Horovod needed."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from course.check.verdicts import expect
from course.exercises import precautions
from course.exercises.scripts import expect_scripts, read_script
from lab_common import read_path

PROVED = "all that Horovod needs is called in the five places, in this order; the script was read, and not run"
SAME = "every rank has to call the same operations of hvd, in the same order: none of them may stand in `if rank == 0`"
SIZE, RANK = ("size", "hvd.size()"), ("rank", "hvd.rank()")


@dataclass(frozen=True)
class _Call:
    """A call that the script needs.

    Attributes:
        place: Where it belongs.
        wanted: The call as a statement; with ``_`` behind its name, the form that works in place is as good.
        hint: What is wrong without it.
        names: Its parameters that can be given by position.
        values: What each argument may be; None if it may be left out.
    """

    place: str
    wanted: str
    hint: str
    names: tuple[str, ...]
    values: Mapping[str, tuple[str | None, ...]]


CALLS = (
    _Call("place 1", "hvd.init()", "before hvd.init() nothing else of hvd works", (), {}),
    _Call(
        "place 2",
        "sampler = DistributedSampler(train, size, rank, drop_last=True)",
        "how many processes first, then which one, both of the whole job: hvd.size(), hvd.rank(); full shares only",
        ("dataset", "num_replicas", "rank"),
        {"dataset": ("train",), "num_replicas": SIZE, "rank": RANK, "drop_last": ("True",)},
    ),
    _Call(
        "place 2",
        "loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)",
        "sampler=sampler, or each process goes through all images; drop_last=True, or the last batch is not a full one",
        ("dataset", "batch_size"),
        {"dataset": ("train",), "batch_size": ("args.batch_size",), "sampler": ("sampler",), "drop_last": ("True",)},
    ),
    _Call(
        "before place 3",
        "optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)",
        "examples of Horovod multiply the learning rate by hvd.size(); DDP does not, and --lr says what is wanted",
        ("params", "lr"),
        {"lr": ("args.lr",)},
    ),
    _Call(
        "place 3",
        "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())",
        "it averages the gradients, as they are, if the loop uses it: give it the same name",
        ("optimizer", "named_parameters"),
        {
            "optimizer": ("optimizer",),
            "named_parameters": (None, "model.named_parameters()"),
            "op": (None, "hvd.Average"),
            "compression": (None, "hvd.Compression.none"),
        },
    ),
    _Call(
        "before place 4",
        "optimizer.load_state_dict(state['optimizer'])",
        "place 3 comes before the checkpoint is loaded, and place 4 after it",
        (),
        {},
    ),
    _Call(
        "place 4",
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
        "all processes need the weights of rank 0, which alone has loaded the checkpoint",
        ("params", "root_rank"),
        {"params": ("model.state_dict()",), "root_rank": ("0",)},
    ),
    _Call(
        "place 4",
        "hvd.broadcast_optimizer_state(optimizer, root_rank=0)",
        "without it rank 0 goes on with the checkpoint's momentum, and the others without",
        ("optimizer", "root_rank"),
        {"optimizer": ("optimizer",), "root_rank": ("0",)},
    ),
    _Call(
        "place 5",
        "counts = hvd.allreduce(counts, op=hvd.Sum)",
        "allreduce returns a new tensor, and averages unless op= says otherwise",
        ("tensor",),
        {"tensor": ("counts",), "op": ("hvd.Sum",)},
    ),
)


def verify_horovod_script(path: str | Path) -> str:
    """Reads the script, and compares its calls with the table."""
    script = read_path(path).resolve()
    expect_scripts(script)
    tree = read_script(script, path)
    line = 0
    for call in CALLS:
        line = _expect_call(tree, call, line)
    conditions = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "rank" in ast.unparse(node.test)]
    inside = [ast.unparse(part) for node in conditions for part in (*node.body, *node.orelse)]
    alone = [text for text in inside if re.search(r"\bhvd\.(?!rank|size|local_)", text)]
    expect(not alone, "which ranks call hvd", yours="".join(alone[:1])[:120], expected="all of them", hint=SAME)
    hint = "Horovod does without torch.distributed: hvd.init() is enough"
    group = "init_process_group" in ast.unparse(tree)
    expect(not group, "how the processes meet", yours="init_process_group", expected="hvd.init() alone", hint=hint)
    _expect_devices(tree)
    return PROVED


def _expect_call(tree: ast.AST, call: _Call, after: int) -> int:
    """Expects a call below a line; returns its own line."""
    wanted = ast.parse(call.wanted).body[0]
    function = ast.unparse(wanted.value.func)
    statements = [node for node in ast.walk(tree) if isinstance(getattr(node, "value", None), ast.Call)]
    found = [node for node in statements if ast.unparse(node.value.func) in (function, f"{function}_")]
    right = [node for node in found if _is_right(node, wanted, call) and node.lineno > after]
    expect(
        bool(right),
        f"{call.place}: {function}",
        yours=ast.unparse(found[0]) if found else "it is not called",
        expected=call.wanted,
        hint=call.hint,
    )
    return right[0].lineno


def _is_right(node: ast.AST, wanted: ast.AST, call: _Call) -> bool:
    """Returns True if the arguments are the wanted ones, and the value gets its name or stays where it was."""
    given = dict(zip(call.names, map(ast.unparse, node.value.args), strict=False))
    given |= {one.arg: ast.unparse(one.value) for one in node.value.keywords}
    targets = [list(map(ast.unparse, getattr(one, "targets", []))) for one in (node, wanted)]
    in_place = ast.unparse(node.value.func).endswith("_")
    named = in_place or targets[0] == targets[1]
    return named and all(given.get(name) in values for name, values in call.values.items())


def _expect_devices(tree: ast.AST) -> None:
    """Expects each process to use the GPU of its local rank."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [(getattr(call.func, "attr", getattr(call.func, "id", "")), call) for call in calls]
    values = precautions.find_values(tree)
    precautions.expect_no_rank(named, values)
    precautions.expect_local_rank(named, values)
    expect(
        any(name in ("set_device", "set_device_index") for name, _ in named),
        "place 1: the current GPU of a process",
        yours="set_device is not called",
        expected="torch.cuda.set_device(device), where there is a GPU",
        hint="calls that name no device take the current one, GPU 0 unless set: all processes would meet there",
    )
