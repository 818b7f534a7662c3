"""Exercises 5.1 and 14.1, by reading the script: faults that a successful run on a CPU cannot show."""

from __future__ import annotations

import ast
import datetime
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from course.check.verdicts import expect

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
    names = {name for name, _ in named}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    expect(
        "init_process_group" in names,
        "how the processes meet",
        yours="no init_process_group",
        expected="dist.init_process_group(backend, timeout=...)",
        hint="torchrun sets the addresses and ranks; init_process_group reads them and connects the processes",
    )
    _expect_backend(tree, named, values)
    _expect_timeout(named)
    counts = _find_arguments(named, "DistributedSampler", 1, "num_replicas")
    fixed = [ast.unparse(one) for one in counts if isinstance(one, ast.Constant) and one.value is not None]
    hint = "leave num_replicas out, or take dist.get_world_size(): torchrun says how many ranks there are"
    case = "among how many ranks the images are divided"
    expect(not fixed, case, yours=", ".join(fixed), expected="the number of ranks that there are", hint=hint)
    sources = [
        one for name in ("DistributedSampler", "DataLoader") for one in _find_arguments(named, name, 0, "dataset")
    ]
    whole = "dataset.train" in map(ast.unparse, sources)
    hint = "train, and not dataset.train: it has only as many images as --images says"
    expect(not whole, "which images are shared out", yours="dataset.train", expected="those of train", hint=hint)
    case, expected = "which GPU a process takes", 'int(os.environ["LOCAL_RANK"])'
    read = "LOCAL_RANK" in texts or "get_node_local_rank" in names
    expect(read, case, yours="LOCAL_RANK is not read", expected=expected, hint=BY_RANK)
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
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.While)]
    # Around torch.save the name of a checkpoint may have been assigned to another before.
    used = [_list_used(node.test, values if "attr='save'" in ast.dump(node) else {}) for node in tests]
    asked = "save" in names and any("checkpoint" in one for one in used)
    hint = "if args.checkpoint and rank == 0: torch.save(state, args.checkpoint); only then is there a name to save to"
    expect(asked, "a checkpoint", yours="none, or also where no name is given", expected="rank 0 saves", hint=hint)


def _find_arguments(named: Sequence[tuple[str, ast.Call]], function: str, place: int, name: str) -> list[ast.expr]:
    """The values of one argument in all calls of a function; ``**options``, which may hold it, counts too."""
    calls = [call for found, call in named if found == function]
    by_name = [keyword.value for call in calls for keyword in call.keywords if keyword.arg in (name, None)]
    return [one for call in calls for one in call.args[place : place + 1]] + by_name


def _expect_timeout(named: Sequence[tuple[str, ast.Call]]) -> None:
    """Expects an explicit timeout for the processes' waits, and not one of days, or of seconds."""
    case, expected = "how long a process waits for one that does not answer", "timeout=timedelta(minutes=2)"
    waits = [ast.unparse(one) for one in _find_arguments(named, "init_process_group", 2, "timeout")]
    hint = "without it the others wait 10 minutes (nccl) or 30 (gloo) for a process that hangs"
    yours = "timeout=None, the default" if waits else "init_process_group without timeout="
    expect(any(wait != "None" for wait in waits), case, yours=yours, expected=expected, hint=hint)
    for call in (call for name, call in named if name == "timedelta"):
        try:
            span = eval(ast.unparse(call), {"timedelta": timedelta, "datetime": datetime})
        except Exception:  # it has other names in it: only a run can tell
            continue
        hint = "some minutes: timedelta(minutes=2); its first number counts days, and after some seconds a process "
        hint += "that only starts slowly would be given up"
        fits = timedelta(seconds=30) <= span <= timedelta(minutes=10)
        expect(fits, case, yours=ast.unparse(call), expected=expected, hint=hint)


def _expect_backend(tree: ast.AST, named: Sequence[tuple[str, ast.Call]], values: Mapping[str, list[ast.expr]]) -> None:
    """Expects another backend besides Gloo where the group is made, or, if none is named there, in the script."""
    chosen = _find_arguments(named, "init_process_group", 0, "backend")
    words = [word for one in chosen for word in _list_used(one, values)]
    for used in (words, [getattr(node, "attr", getattr(node, "value", "")) for node in ast.walk(tree)]):
        backends = {one for one in ("gloo", "nccl") if any(one in str(word).lower() for word in used)}
        if backends:
            break
    hint = "gloo sends a GPU's gradients through the processor's memory; nccl is made for GPUs"
    case, expected = "the backend between GPUs", '"nccl" if cuda else "gloo"'  # if none is named, torch chooses
    expect(backends != {"gloo"}, case, yours="gloo alone is named", expected=expected, hint=hint)


def _list_chosen(named: Sequence[tuple[str, ast.Call]]) -> Iterator[tuple[str, ast.expr]]:
    """Yields each expression that chooses a GPU, with the name of its call."""
    for name, call in named:
        if name in ("set_device", "set_device_index", "device"):
            yield from ((name, one) for one in [*call.args, *(keyword.value for keyword in call.keywords)])
        elif name in ("DDP", "DistributedDataParallel"):
            yield from ((name, one) for one in _find_arguments([(name, call)], name, 1, "device_ids"))


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
    """Finds all values assigned to each name, and all return values of each function."""
    values = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            values[node.name] += [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                parts = getattr(target, "elts", [target])
                each = getattr(node.value, "elts", ()) if parts != [target] else ()
                whole = [node.value] * len(parts)
                for part, value in zip(parts, each if len(each) == len(parts) else whole, strict=True):
                    values[ast.unparse(part)].append(value)
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
