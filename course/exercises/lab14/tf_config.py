"""Exercise 14.2: the value of TensorFlow's variable ``TF_CONFIG`` for each worker."""

from __future__ import annotations

import json
from collections.abc import Callable

from course.check.judge import AnyOf, judge
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
    for addresses in map(list, CLUSTERS):
        for index in range(len(addresses)):
            case = f"worker {index} of {len(addresses)}"
            config = _read(write_tf_config(list(addresses), index), case)
            own, first = addresses[index], addresses[:1]
            judge(
                config.get("cluster"),
                right={"worker": addresses},
                case=f'{case}: "cluster"',
                hint='"cluster" holds {"worker": [...]} alone: all addresses, as they are, in the order that they have',
                wrong={
                    "each worker has to know all workers, and not only itself: the cluster is the same for all": AnyOf(
                        ({"worker": [own]}, {"worker": own})
                    ),
                    "all processes are workers: where no chief is named, worker 0 does what a chief does": AnyOf(
                        ({"worker": addresses, "chief": first}, {"worker": addresses[1:], "chief": first})
                    ),
                },
                show=repr,
            )
            judge(
                config.get("task"),
                right={"type": "worker", "index": index},
                case=f'{case}: "task"',
                hint='"task" says which worker this is: its "type" is "worker", also for worker 0, and its "index" is '
                "the one that the function is given",
                wrong={"the index is a number in JSON: without quotes": {"type": "worker", "index": str(index)}},
                show=repr,
            )
    return PROVED


def _read(text: object, case: str) -> dict:
    """Returns the content of the text, which must be JSON."""
    hint = "TensorFlow reads JSON: return the text that json.dumps(...) makes, once, of the whole dictionary"
    case = f"{case}: what the function returns"
    expect(isinstance(text, str), case, yours=f"{type(text).__name__}: {text!r:.60}", expected="a str", hint=hint)
    with refusing(ValueError, case=case, expected=SHAPE, hint=hint):
        config = json.loads(text)
    expect(isinstance(config, dict), case, yours=text[:80], expected=SHAPE, hint=hint)
    return config
