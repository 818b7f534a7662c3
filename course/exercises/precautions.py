"""Exercise 5.1, by reading the script: faults that a successful run on a CPU cannot show."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from course.check.verdicts import expect

UNITS = {"weeks": 604800, "days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
BY_RANK = "RANK counts over all nodes, and a GPU belongs to one: LOCAL_RANK counts the processes of a node"
NO_NUMBER = (
    'torch.device("cuda", local_rank): "cuda" alone has no number, "cuda:0" is the same GPU for all ranks of a node'
)


def expect_precautions(tree: ast.AST) -> None:
    """Looks for the backend between GPUs, the timeout, the GPU of the process, and a checkpoint.

    Raises:
        NotYetError: One of them is missing.
    """
    values = find_values(tree)
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
    _expect_backend(tree, starts, values)
    _expect_timeout(named, starts)
    _expect_all_ranks(named)
    _expect_chosen_images(named)
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    names = {name for name, _ in named}
    expect(
        "LOCAL_RANK" in texts or "get_node_local_rank" in names,
        "which GPU a process takes",
        yours="LOCAL_RANK is not read",
        expected='int(os.environ["LOCAL_RANK"])',
        hint=BY_RANK,
    )
    expect_no_rank(named, values)
    expect(
        bool({"set_device", "set_device_index"} & names),
        "the current GPU of a process",
        yours="set_device is not called",
        expected="torch.cuda.set_device(device), where there is a GPU",
        hint="calls that name no device take the current one, GPU 0 unless set: all processes would meet there",
    )
    if "CUDA_VISIBLE_DEVICES" not in texts:  # where each process sees one GPU, its number is 0
        expect_local_rank(named, values)
    expect(
        "save" in names,
        "a checkpoint",
        yours="torch.save(...) is not called",
        expected="rank 0 saves",
        hint="if args.checkpoint and rank == 0: torch.save(state, args.checkpoint)",
    )


def _expect_all_ranks(named: Sequence[tuple[str, ast.Call]]) -> None:
    """Expects no sampler that divides the images among a fixed number of ranks."""
    counts = [
        one for name, call in named if name == "DistributedSampler" for one in _find_argument(call, 1, "num_replicas")
    ]
    fixed = [ast.unparse(one) for one in counts if isinstance(one, ast.Constant) and one.value is not None]
    expect(
        not fixed,
        "among how many ranks the images are divided",
        yours=", ".join(fixed),
        expected="the number of ranks that there are",
        hint="leave num_replicas out, or take dist.get_world_size(): torchrun says how many ranks there are",
    )


def _expect_chosen_images(named: Sequence[tuple[str, ast.Call]]) -> None:
    """Expects sampler and loader to use ``train``, which ``--images`` shortens."""
    whole = [
        ast.unparse(call)
        for name, call in named
        if name in ("DistributedSampler", "DataLoader")
        for one in _find_argument(call, 0, "dataset")
        if ast.unparse(one) == "dataset.train"
    ]
    expect(
        not whole,
        "which images are shared out",
        yours=whole[0] if whole else "",
        expected="those of train",
        hint="train, and not dataset.train: it has only as many images as --images says",
    )


def _find_argument(call: ast.Call, place: int, name: str) -> list[ast.expr]:
    return call.args[place : place + 1] + [keyword.value for keyword in call.keywords if keyword.arg == name]


def _expect_timeout(named: Sequence[tuple[str, ast.Call]], starts: Sequence[ast.Call]) -> None:
    """Expects an explicit timeout for the processes' waits, and not one of days."""
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
    spans = [call for name, call in named if name == "timedelta"]
    wrong = [call for call in spans if _is_long(call) or 0 < _count_seconds(call) < 30]
    hint = "two minutes are enough: write timedelta(minutes=2), or seconds="
    if wrong and _is_long(wrong[0]) and wrong[0].args:
        hint = "the first number of timedelta counts days: write minutes= or seconds="
    elif wrong and not _is_long(wrong[0]):
        hint = "a process that only starts slowly would be given up: wait for some minutes"
    expect(
        not wrong,
        "how long a process waits for one that does not answer",
        yours=ast.unparse(wrong[0]) if wrong else "",
        expected="timeout=timedelta(minutes=2)",
        hint=hint,
    )


def _is_long(call: ast.Call) -> bool:
    """Returns True if a ``timedelta(...)`` is longer than ten minutes, judging by its literal numbers."""
    if any(ast.unparse(one) != "0" for one in call.args[:1]):
        return True
    return _count_seconds(call) > 600


def _count_seconds(call: ast.Call) -> float:
    """Returns the seconds in the keywords of a ``timedelta(...)``; 0 if only a run can tell."""
    return sum(UNITS.get(one.arg or "", 0) * _multiply(one.value) for one in call.keywords)


def _multiply(node: ast.expr) -> float:
    """Returns the value of a number or a product of numbers; 0 for anything else, which only a run can tell."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _multiply(node.left) * _multiply(node.right)
    number = getattr(node, "value", 0)
    return number if isinstance(number, int | float) else 0


def _expect_backend(tree: ast.AST, starts: Sequence[ast.Call], values: Mapping[str, list[ast.expr]]) -> None:
    """Expects another backend besides Gloo where the group is made, or, if none is named there, in the script."""
    chosen = [one for call in starts for one in call.args[:1]]
    chosen += [word.value for call in starts for word in call.keywords if word.arg in ("backend", None)]
    words = [word for one in chosen for word in _list_used(one, values)]
    for used in (words, [getattr(node, "attr", getattr(node, "value", "")) for node in ast.walk(tree)]):
        backends = {one for one in ("gloo", "nccl") if any(one in str(word).lower() for word in used)}
        if backends:
            break
    expect(
        backends != {"gloo"},  # where none is named, torch chooses by the device
        "the backend between GPUs",
        yours="gloo alone is named",
        expected='"nccl" if cuda else "gloo"',
        hint="gloo sends a GPU's gradients through the processor's memory; nccl is made for GPUs",
    )


def _list_chosen(named: Sequence[tuple[str, ast.Call]]) -> Iterator[tuple[str, ast.expr]]:
    """Yields each expression that chooses a GPU, with the name of its call."""
    for name, call in named:
        if name in ("set_device", "set_device_index", "device"):
            yield from ((name, one) for one in [*call.args, *(keyword.value for keyword in call.keywords)])
        elif name in ("DDP", "DistributedDataParallel"):
            yield from ((name, one) for one in _find_argument(call, 1, "device_ids"))


def expect_no_rank(named: Sequence[tuple[str, ast.Call]], values: Mapping[str, list[ast.expr]]) -> None:
    """Expects no device chosen by the rank in the whole job, unless it is divided by the number of GPUs."""
    for name, one in _list_chosen(named):
        used = _list_used(one, values)
        expect(
            _is_local(used) or not {"rank", "RANK", "get_rank"} & used,
            "which GPU a process takes",
            yours=f"{ast.unparse(one)[:80]} in {name}(...)",
            expected="the one of its local_rank",
            hint=BY_RANK,
        )


def expect_local_rank(named: Sequence[tuple[str, ast.Call]], values: Mapping[str, list[ast.expr]]) -> None:
    """Expects the GPU to be chosen by ``LOCAL_RANK``, and none by a number that is the same for all processes."""
    for name, one in [*_list_chosen(named), ("", ast.Name("device"))]:
        used = _list_used(one, values)
        fixed = name != "device" and any(re.fullmatch(r"(cuda:)?\d+", str(word)) for word in used)
        expect(
            _is_local(used) or not (fixed or name.startswith("set_device")),
            "which GPU a process takes",
            yours=f"{ast.unparse(one)[:80]} in {name}(...)" if name else "the device has a fixed number",
            expected="the one of its local_rank",
            hint=NO_NUMBER,
        )
    used = _list_used(ast.Name("device"), values)
    expect(
        "cpu" not in used or _is_local(used) or any(re.search("cuda|accelerator", str(word)) for word in used),
        "which device the model goes to",
        yours="always the CPU",
        expected="the GPU of its local_rank, where there is one",
        hint='torch.device("cuda", local_rank) if cuda else torch.device("cpu")',
    )


def _is_local(used: set) -> bool:
    """Returns True if an expression uses ``LOCAL_RANK`` or the number of a node's GPUs."""
    return "device_count" in used or any("local" in str(word).lower() for word in used)


def find_values(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """Finds all values assigned to each name, and all return values and arguments of each function."""
    values = defaultdict(list)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                parts = getattr(target, "elts", [target])
                each = getattr(node.value, "elts", ()) if parts != [target] else ()
                whole = [node.value] * len(parts)
                for part, value in zip(parts, each if len(each) == len(parts) else whole, strict=True):
                    values[ast.unparse(part)].append(value)
        elif isinstance(node, ast.Call) and (called := functions.get(getattr(node.func, "id", ""))):
            values[called.name] += [one.value for one in ast.walk(called) if isinstance(one, ast.Return) and one.value]
            for parameter, value in zip(called.args.args, node.args, strict=False):
                values[parameter.arg].append(value)
            for keyword in node.keywords:
                values[str(keyword.arg)].append(keyword.value)
    return values


def _list_used(expression: ast.AST, values: Mapping[str, list[ast.expr]]) -> set:
    """Returns the names, attributes and constants in a value, following assignments, but not conditions."""
    used, seen, nodes = set(), set(), [expression]
    while nodes:
        node = nodes.pop()
        key = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) else ""
        if key in values:
            nodes += values[key] if key not in seen else []
            seen.add(key)
            continue
        used.add(getattr(node, "attr", getattr(node, "id", getattr(node, "value", ""))))
        nodes += [child for child in ast.iter_child_nodes(node) if child is not getattr(node, "test", None)]
    return used


def asks_for_checkpoint(tree: ast.AST) -> bool:
    """Returns True if a condition names the checkpoint, as around ``torch.save``; otherwise a run has to tell."""
    tests = (node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.While))
    names = (getattr(node, "attr", getattr(node, "id", "")) for test in tests for node in ast.walk(test))
    return "checkpoint" in names
