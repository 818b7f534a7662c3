"""The preflight: finds in seconds what would make a job on these nodes fail or hang, each with its fix."""

from __future__ import annotations

import functools
import random
import secrets
import socket
import textwrap
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lab_common import LabError
from lab_common.markup import escape
from lab_common.text import clean
from nodelaunch.backends.nodes import Node
from nodelaunch.node import facts as own_facts
from nodelaunch.node.probe import FREE_PORTS, claim
from nodelaunch.preflight import routes, table
from nodelaunch.preflight.client import ProbeClient, ask_all, open_clients
from nodelaunch.preflight.gpus import find_offers, judge_gpus, must_hide
from nodelaunch.preflight.verdicts import (
    Verdict,
    Wanted,
    judge_clocks,
    judge_error,
    judge_facts,
    judge_jobs,
    stop_command,
)
from nodelaunch.values import PORT, PROCESSES, check_value

# torchrun takes at most this long to end after its supervisor was killed.
DYING_SECONDS = 3.0


class Claim:
    """Keeps other launchers of this machine from a port, until nothing refers to it any more.

    Args:
        holder: The result of :func:`nodelaunch.node.probe.claim`.
    """

    def __init__(self, holder: socket.socket) -> None:
        weakref.finalize(self, holder.close)


@dataclass(frozen=True, repr=False)
class Preflight:
    """The result of a preflight.

    Attributes:
        verdicts: In the order of the checks.
        addresses: Per node, the IPv4 address at which the others reach it; the likeliest one if none do.
        interfaces: Per node, the network interface with that address.
        port: The rendezvous' port on node 0.
        seconds: The time it took.
        hide_gpus: True if all nodes have to use the CPU, since not every process has a GPU.
        claim: On the port, if it was picked and node 0 is this machine.
    """

    verdicts: tuple[Verdict, ...]
    addresses: Mapping[str, str] = field(default_factory=dict)
    interfaces: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    seconds: float = 0.0
    hide_gpus: bool = False
    claim: Claim | None = field(default=None, compare=False)

    @property
    def reds(self) -> tuple[Verdict, ...]:
        """The verdicts that have to be fixed first."""
        return tuple(verdict for verdict in self.verdicts if verdict.state == "red")

    @property
    def ok(self) -> bool:
        """True if the job can be started."""
        return not self.reds

    def raise_if_red(self) -> None:
        """Raises the first red verdict, with the number of the others.

        Raises:
            LabError: There is a red verdict.
        """
        if self.ok:
            return
        first, more = self.reds[0], len(self.reds) - 1
        headline, *lines = clean(first.found).split("\n")
        what = textwrap.shorten(f"{first.check}: {headline}", 100, placeholder=" …")
        # A headline that is too long is repeated below the first line.
        cut = [headline] if what.endswith(" …") else []
        where = "; ".join([clean(first.node), *cut, *(line.strip() for line in lines)])
        more = f" (+ {more} more)" if more else ""
        raise LabError(f"{what}{more}", where=where, cause=clean(first.cause), fix=clean(first.fix))

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return "\n".join([*table.write_lines(self.verdicts), self._summarise()])

    def _repr_html_(self) -> str:
        return f"{table.write_html(self.verdicts)}<div>{escape(self._summarise())}</div>"

    def _summarise(self) -> str:
        notes = sum(verdict.state == "note" for verdict in self.verdicts)
        counts = [f"{count} {word}" for count, word in ((len(self.reds), "red"), (notes, "to note")) if count]
        return f"Preflight: {', '.join(counts) or 'all is well'}; {self.seconds:.1f} s."


def check_nodes(nodes: Sequence[Node], *, port: int | None = None, timeout: float = 8.0, **needs: object) -> Preflight:
    """Checks all nodes of a job at once, and the network between them.

    Args:
        nodes: The job's nodes; the rendezvous listens on the first.
        port: The rendezvous' port; None picks a free one.
        timeout: Seconds for everything; a second more in the worst case.
        needs: The job's needs: fields of :class:`nodelaunch.preflight.verdicts.Wanted`.

    Raises:
        LabError: The port or the number of processes is invalid.
    """
    start, wanted = time.monotonic(), Wanted(**needs)
    port = check_value("preflight", "port", port, PORT)
    check_value("preflight", "nproc_per_node", wanted.nproc_per_node, PROCESSES)
    by_name = {node.name: node for node in nodes}
    # Two thirds for the start: SSH gives up on a host after 5 s, and reports why.
    waits = {"facts": 0.7 * timeout, "listen": 0.1 * timeout, "connect": 0.2 * timeout}
    machine, data = own_facts.find_system()["machine"], wanted.data
    own = own_facts.identify_data(data.path / data.identity) if data and data.copy_data else {}
    wanted = replace(wanted, machine=machine, data_hash="" if own.get("missing") else own.get("hash") or "")
    with open_clients(nodes) as clients:
        tasks = {name: functools.partial(_examine, client, wanted, waits["facts"]) for name, client in clients.items()}
        answers, errors = _split(ask_all(tasks, waits["facts"]))
        machines = {answer["facts"].get("system", {}).get("machine") for answer in answers.values()}
        together = len(machines) == 1 and None not in machines and (not errors or machines == {machine})
        network = routes.Network(by_name, {name: answer["facts"] for name, answer in answers.items()}, together)
        network, late = _explore(network, clients, port, waits, start + timeout)
        # While the probe still claims it: otherwise another launcher could choose it in between.
        picked = None if port else network.listening.get(network.head, {}).get("chosen")
        holder = claim(picked, "job") if picked and by_name[network.head].here else None
    chosen = {name: address for name in answers if (address := routes.choose_address(network, name))}
    verdicts = [judge_error(name, error) for name, error in {**errors, **late}.items()]
    verdicts += routes.judge_names(network, chosen)
    verdicts += [routes.judge_address(network, name, chosen.get(name)) for name in answers]
    verdicts += routes.judge_exposure(network, chosen)
    verdicts += routes.judge_routes(network, chosen, seconds=waits["connect"])
    listening = network.listening.get(network.head, {})
    job = (listening.get("busy") or {}).get("job", "")
    system = network.facts.get(network.head, {}).get("system", {})
    verdicts += routes.judge_port(network, stop_command(job, network.head, system, wanted))
    offers = find_offers(by_name, network.facts, wanted)
    verdicts += judge_facts(network.facts, wanted, judge_gpus(offers, network.facts, wanted))
    verdicts += judge_jobs(network.facts, wanted, {name: answer["jobs"] for name, answer in answers.items()})
    verdicts += judge_clocks({name: answer["clock"] for name, answer in answers.items()})
    interfaces = {name: found for name, a in chosen.items() if (found := routes.find_interface(network, name, a))}
    return Preflight(
        verdicts=tuple(verdicts),
        addresses=chosen,
        interfaces=interfaces,
        port=port or listening.get("chosen") or random.randint(*FREE_PORTS),
        seconds=time.monotonic() - start,
        hide_gpus=must_hide(offers, wanted),
        claim=holder and Claim(holder),
    )


def _split(answers: Mapping[str, dict | LabError]) -> tuple[dict[str, dict], dict[str, LabError]]:
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, LabError)}
    return {name: answer for name, answer in answers.items() if name not in errors}, errors


def _examine(client: ProbeClient, wanted: Wanted, seconds: float) -> dict:
    """Starts a node's probe, and asks for its clock and for all that it can find out without the other nodes."""
    end = time.monotonic() + seconds
    client.open()
    client.ask({"do": "clock"}, end - time.monotonic())  # waits for the start, too
    sent = time.time()
    answer = client.ask({"do": "clock"}, end - time.monotonic())
    delay = time.time() - sent
    clock = answer["time"] - sent - delay / 2, delay
    node = client.node
    question = {"do": "facts", "folder": node.folder, "code": wanted.bundle, "seconds": 0.5 * seconds}
    file = wanted.data.identity_path if wanted.data else ""
    # A node of this machine needs no copy, unless it was given a data folder of its own.
    own = str(wanted.data.path) if wanted.data and node.here and not node.data else ""
    question |= {"data": node.data_folder, "data_file": file, "pack": own}
    found = client.ask(question, end - time.monotonic())
    return {"facts": found, "jobs": _find_jobs(client, wanted, end), "clock": clock}


def _find_jobs(client: ProbeClient, wanted: Wanted, end: float) -> dict:
    """This user's processes of jobs; waits a moment for a leftover that is just ending."""
    patience = min(time.monotonic() + DYING_SECONDS, end - 1.0)
    while True:
        answer = client.ask({"do": "jobs"}, end - time.monotonic())
        watched = {process["id"] for process in answer["jobs"] if process["supervisor"]} | {wanted.job_id}
        if time.monotonic() > patience or all(process["id"] in watched for process in answer["jobs"]):
            return answer
        time.sleep(0.2)


def _explore(
    network: routes.Network,
    clients: Mapping[str, ProbeClient],
    port: int | None,
    waits: Mapping[str, float],
    end: float,
) -> tuple[routes.Network, dict[str, LabError]]:
    """Lets the nodes listen, and then each try all addresses of every other; uses the time until ``end``."""
    names = list(network.facts)
    # A connection without an answer is reported when its time is over; 0.8 s are for the way there and back.
    told = waits["connect"] + 0.8
    listen = max(waits["listen"], end - time.monotonic() - told)
    tokens = {name: secrets.token_hex(16) for name in names}
    questions = {name: {"do": "listen", "addresses": routes.list_candidates(network, name)} for name in names}
    for name, question in questions.items():
        question |= {"token": tokens[name], "port": (port or 0) if name == network.head else None}
    asked = {name: functools.partial(clients[name].ask, questions[name], listen) for name in names}
    listening, errors = _split(ask_all(asked, listen))
    patience = max(told, end - time.monotonic())
    tasks = {}
    for name in listening:
        targets = {
            routes.name_target(other, address, kind): (address, number, tokens[other])
            for other, answer in listening.items()
            for kind in ("any", "port")
            for address, number in answer[kind].items()
            if other != name and number
        }
        question = {"do": "connect", "targets": targets, "seconds": waits["connect"]}
        tasks[name] = functools.partial(clients[name].ask, question, patience)
    answers, late = _split(ask_all(tasks, patience))
    reached = {name: answer["reached"] for name, answer in answers.items()}
    explored = routes.Network(network.nodes, network.facts, network.one_machine, listening, reached)
    return explored, errors | late
