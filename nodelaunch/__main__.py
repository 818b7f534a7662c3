"""``python -m nodelaunch``: look at nodes before a job, list the jobs on them, stop one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lab_common import LabError
from lab_common.commandline import run_command
from lab_common.text import clean
from nodelaunch.backends.local import local_nodes
from nodelaunch.backends.nodes import Node
from nodelaunch.backends.ssh import FOLDER, ssh_nodes
from nodelaunch.preflight import ask_once, check_nodes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 1 where something is red or was not reached."""
    arguments = _parse(argv)
    return run_command(lambda: arguments.run(arguments, _make_nodes(arguments)))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m nodelaunch", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    look = commands.add_parser("preflight", help="say what a job on these nodes would stumble over")
    look.add_argument("--interface", help="network interface, on every host")
    look.add_argument("--port", type=int, help="of the rendezvous on the first node; by default a free one")
    look.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="processes on each node")
    stop = commands.add_parser("stop", help="end the processes of one job, and of no other")
    stop.add_argument("job", help="the job's id, as `jobs` and the preflight print it")
    jobs = commands.add_parser("jobs", help="list the processes of jobs")

    for command, run in {look: _preflight, stop: _stop, jobs: _list}.items():
        command.set_defaults(run=run)
        command.add_argument("hosts", nargs="*", help="hosts as you would type them after ssh; none: this machine")
        command.add_argument("--local", type=int, default=1, metavar="N", help="without hosts: N nodes on this machine")
        command.add_argument("--python", help="the interpreter on the hosts")
        command.add_argument("--folder", default=FOLDER, help="where our files go there (default: %(default)s)")
        command.add_argument("--config", help="a configuration of ssh in place of ~/.ssh/config")
    return parser.parse_args(argv)


def _make_nodes(arguments: argparse.Namespace) -> list[Node]:
    given = {name: value for name in ("interface", "python") if (value := getattr(arguments, name, None))}
    if arguments.hosts:
        return ssh_nodes(arguments.hosts, folder=arguments.folder, config=arguments.config, **given)
    return [replace(node, **given) for node in local_nodes(arguments.local)]


def _preflight(arguments: argparse.Namespace, nodes: Sequence[Node]) -> int:
    preflight = check_nodes(nodes, port=arguments.port, nproc_per_node=arguments.nproc_per_node)
    print(preflight)
    return 0 if preflight.ok else 1


def _stop(arguments: argparse.Namespace, nodes: Sequence[Node]) -> int:
    def describe(answer: Mapping) -> list[str]:
        if answer["left"]:
            return [f"these processes did not end: {', '.join(map(str, answer['left']))}"]
        ended = f"{len(answer['stopped'])} process(es) of {arguments.job} ended"
        return [ended if answer["stopped"] else f"no process of {arguments.job} runs"]

    return _print_answers(ask_once(nodes, {"do": "stop_job", "id": arguments.job}), describe)


def _list(arguments: argparse.Namespace, nodes: Sequence[Node]) -> int:
    def describe(answer: Mapping) -> list[str]:
        return [f"{job['id']}  pid {job['pid']}  {job['command']}" for job in answer["jobs"]] or ["no job runs"]

    return _print_answers(ask_once(nodes, {"do": "jobs"}), describe)


def _print_answers(answers: Mapping, describe: Callable[[Mapping], list[str]]) -> int:
    """Prints what each node answered; returns 1 if one was not reached, or has processes that did not end."""
    for name, answer in answers.items():
        for line in [str(answer)] if isinstance(answer, LabError) else map(clean, describe(answer)):
            print(f"{clean(name)}: {line}")
    return int(any(isinstance(answer, LabError) or answer.get("left") for answer in answers.values()))


if __name__ == "__main__":
    sys.exit(main())
