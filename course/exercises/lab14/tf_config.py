"""Exercise 14.2: the value of TensorFlow's variable ``TF_CONFIG`` for each worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from course.check.verdicts import expect, refusing

# Not in any order, and each with a port of its own; an index that is no worker's place is in no cluster.
CLUSTERS = (
    ("10.0.0.7:12345", "10.0.0.2:12346"),
    ("node-b.example:2222", "node-c.example:2223", "node-a.example:2224"),
)
SHAPE = '{"cluster": {"worker": [...]}, "task": {"type": "worker", "index": ...}}'
PROVED = "each worker of two clusters, of 2 and 3, gets the same list, and its own index"


def verify_write_tf_config(write_tf_config: Callable) -> str:
    """Asks for the text of each worker of two clusters."""
    for addresses in CLUSTERS:
        for index in range(len(addresses)):
            case = f"worker {index} of {len(addresses)}"
            config = _read(write_tf_config, list(addresses), index, case)
            _expect_cluster(config, list(addresses), index, case)
            _expect_task(config, index, case)
    return PROVED


def _read(write_tf_config: Callable, addresses: list[str], index: int, case: str) -> dict[str, Any]:
    """Returns the content of the text, which must be JSON."""
    hint = "TensorFlow reads JSON: json.dumps(...) makes its text, with double quotes, of a dictionary"
    text = write_tf_config(addresses, index)
    kind = "return the text: who starts the worker sets the variable" if text is None else hint
    case = f"{case}: what the function returns"
    expect(isinstance(text, str), case, yours=f"{type(text).__name__}: {text!r:.60}", expected="a str", hint=kind)
    with refusing(ValueError, RecursionError, case=case, expected=SHAPE, hint=hint):
        config = json.loads(text)
    hint = "json.dumps once, of the whole dictionary: its result is the text"
    expect(isinstance(config, dict), case, yours=text[:80], expected=SHAPE, hint=hint)
    hints = {
        "cluster": '"cluster" says where all workers are, so that each can reach the others',
        "task": '"task" says which of the workers this one is',
    }
    for key, hint in hints.items():
        expect(isinstance(config.get(key), dict), f'{case}: "{key}"', yours=text[:160], expected=SHAPE, hint=hint)
    return config


def _expect_cluster(config: Mapping[str, Any], addresses: list[str], index: int, case: str) -> None:
    """Expects a cluster of workers only, all of them, in the common order."""
    cluster, case = config["cluster"], f'{case}: "cluster"'
    wanted = json.dumps({"worker": addresses})
    others = [kind for kind in cluster if kind != "worker"]
    hint = f"there are only workers in this cluster: no {', '.join(map(repr, others))}"
    if "ps" in others:
        hint = "a parameter server belongs to another strategy: here every process is a worker"
    elif {"chief", "master"} & {*others}:
        hint = "all processes are workers: where no chief is named, worker 0 does what a chief does"
    expect(not others and "worker" in cluster, case, yours=json.dumps(cluster), expected=wanted, hint=hint)
    found = cluster["worker"]
    hint = "all addresses, as they are, in the order that they have"
    if not isinstance(found, list):
        hint = "a list of addresses, also where there is only one"
    elif found == [address.partition(":")[0] for address in addresses]:
        hint = "the port belongs to the address: the worker listens there"
    elif found == [addresses[index]]:
        hint = "each worker has to know all workers, and not only itself: the cluster is the same for all"
    elif found == [address for address in addresses if address != addresses[index]]:
        hint = "the worker itself is in the list, too: its index says where"
    elif sorted(map(str, found)) == sorted(addresses):
        hint = "the index is a place in this list, so all workers need it in the same order, that of `addresses`"
    expect(found == addresses, case, yours=json.dumps(cluster), expected=wanted, hint=hint)


def _expect_task(config: Mapping[str, Any], index: int, case: str) -> None:
    """Expects this worker's task, by its place in the list."""
    task, case = config["task"], f'{case}: "task"'
    wanted = json.dumps({"type": "worker", "index": index})
    hint = '"type" is the name of the list in "cluster" in which this process stands: "worker"'
    if task.get("type") in ("chief", "master"):
        hint = 'its type is "worker", that of worker 0 also: where no chief is named, it does what a chief does'
    expect(task.get("type") == "worker", case, yours=json.dumps(task), expected=wanted, hint=hint)
    found = task.get("index")
    hint = "the index that the function is given, which counts from 0"
    if isinstance(found, str):
        hint = "the index is a number in JSON: without quotes"
    expect(type(found) is int and found == index, case, yours=json.dumps(task), expected=wanted, hint=hint)
