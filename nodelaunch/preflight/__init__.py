"""The preflight: asks all nodes at once what a job would stumble over, and says it in seconds, each with its fix."""

from __future__ import annotations

import functools
import os
import random
import secrets
import socket
import textwrap
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lab_common import LabError
from lab_common.markup import escape
from lab_common.text import clean
from nodelaunch.backends.nodes import Node
from nodelaunch.node import facts as own_facts
from nodelaunch.node.probe import FREE_PORTS, claim
from nodelaunch.preflight import routes, table
from nodelaunch.preflight.client import ProbeClient, ask_all, open_clients
from nodelaunch.preflight.gpus import find_offers, judge_gpus, must_hide
from nodelaunch.preflight.leftovers import judge_inherited, judge_jobs, stop_command
from nodelaunch.preflight.verdicts import Verdict, Wanted, judge_error, judge_facts
from nodelaunch.spec import DataFolder
from nodelaunch.values import PORT, PROCESSES, check_value

# Beyond it, timelines of several nodes laid side by side mislead, and so do the times in their logs.
CLOCK_ALLOWED = 2.0

# How long torchrun takes at most to end when its supervisor was killed.
DYING_SECONDS = 3.0


class Claim:
    """Keeps other launchers of this machine from a port, until nothing refers to it any more.

    Args:
        holder: What :func:`nodelaunch.node.probe.claim` returned.
    """

    def __init__(self, holder: socket.socket) -> None:
        weakref.finalize(self, holder.close)


@dataclass(frozen=True, repr=False)
class Preflight:
    """What a preflight found.

    Attributes:
        verdicts: In the order in which things were looked at.
        addresses: Per node, the IPv4 address at which the others reach it; the likeliest one where none do.
        interfaces: Per node, the network interface that holds it.
        port: The rendezvous' port on node 0.
        seconds: How long it took.
        offsets: Per node, how far its clock is ahead of the launcher's, in seconds.
        hide_gpus: Whether all nodes have to use the CPU, since not every process has a GPU.
        claim: On the port, where it was picked and node 0 is this machine.
    """

    verdicts: tuple[Verdict, ...]
    addresses: Mapping[str, str]
    interfaces: Mapping[str, str]
    port: int
    seconds: float
    offsets: Mapping[str, float]
    hide_gpus: bool = False
    claim: Claim | None = field(default=None, compare=False)

    @property
    def reds(self) -> tuple[Verdict, ...]:
        """What has to be mended first."""
        return tuple(verdict for verdict in self.verdicts if verdict.state == "red")

    @property
    def ok(self) -> bool:
        """Whether the job can be started."""
        return not self.reds

    def raise_if_red(self) -> None:
        """Raises the first red verdict, and says how many more there are.

        Raises:
            LabError: There is a red verdict.
        """
        if self.ok:
            return
        first, more = self.reds[0], len(self.reds) - 1
        headline, *lines = clean(first.found).split("\n")
        what = textwrap.shorten(f"{first.check}: {headline}", 100, placeholder=" …")
        # What the first line had no room for stands below it.
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


def check_nodes(
    nodes: Sequence[Node],
    *,
    port: int | None = None,
    bundle: str = "",
    data: DataFolder | None = None,
    nproc_per_node: int = 1,
    torchrun: bool = True,
    job_id: str = "",
    visible: str | None = None,
    timeout: float = 8.0,
) -> Preflight:
    """Looks at all nodes of a job, at once, and at the network between them.

    Args:
        nodes: Of the job; the rendezvous listens on the first.
        port: Of the rendezvous; None picks a free one.
        bundle: Hash of the job's code, as :func:`nodelaunch.node.facts.hash_tree` takes it; "" skips the check.
        data: What data each node needs; None skips the check. Where the job copies them, what a node has already has
            to be the same.
        nproc_per_node: Processes on each node.
        torchrun: Whether torchrun runs the script, and not another program.
        job_id: The job's own id.
        visible: CUDA_VISIBLE_DEVICES as the job sets it on all nodes; None where it does not.
        timeout: Seconds for everything; a second more in the worst case.

    Raises:
        LabError: The port or the number of processes is none.
    """
    start = time.monotonic()
    port = check_value("preflight", "port", port, PORT)
    nproc_per_node = check_value("preflight", "nproc_per_node", nproc_per_node, PROCESSES)
    by_name = {node.name: node for node in nodes}
    # Two thirds for the start: SSH gives up on a host after 5 s, and says why.
    waits = {"facts": 0.7 * timeout, "listen": 0.1 * timeout, "connect": 0.2 * timeout}
    machine = own_facts.find_system()["machine"]
    own = own_facts.identify_data(data.path / data.identity) if data and data.copy_data else {}
    copied = "" if own.get("missing") else own.get("hash") or ""
    wanted = Wanted(nproc_per_node, bundle, data, copied, job_id, machine, os.getpid(), torchrun, visible)
    with open_clients(nodes) as clients:
        tasks = {name: functools.partial(_examine, client, wanted, waits["facts"]) for name, client in clients.items()}
        answers, errors = _split(ask_all(tasks, by_name, waits["facts"]))
        machines = {answer["facts"].get("system", {}).get("machine") for answer in answers.values()}
        together = len(machines) == 1 and None not in machines and (not errors or machines == {machine})
        network = routes.Network(by_name, {name: answer["facts"] for name, answer in answers.items()}, together)
        network, late = _explore(network, clients, port, waits, start + timeout)
        # While the probe still claims it: else another launcher could choose it in between.
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
    inherited = {name: answer["inherited"] for name, answer in answers.items()}
    verdicts += judge_inherited(network.facts, inherited, machine)
    verdicts += judge_clocks({name: (answer["offset"], answer["delay"]) for name, answer in answers.items()})
    interfaces = {name: found for name, a in chosen.items() if (found := routes.find_interface(network, name, a))}
    return Preflight(
        verdicts=tuple(verdicts),
        addresses=chosen,
        interfaces=interfaces,
        port=port or listening.get("chosen") or random.randint(*FREE_PORTS),
        seconds=time.monotonic() - start,
        offsets={name: answer["offset"] for name, answer in answers.items()},
        hide_gpus=must_hide(offers, wanted),
        claim=holder and Claim(holder),
    )


def _split(answers: Mapping[str, dict | LabError]) -> tuple[dict[str, dict], dict[str, LabError]]:
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, LabError)}
    return {name: answer for name, answer in answers.items() if name not in errors}, errors


def _examine(client: ProbeClient, wanted: Wanted, seconds: float) -> dict:
    """Starts a node's probe and asks for all that it knows by itself, and for its clock."""
    end = time.monotonic() + seconds
    client.open()
    client.ask({"do": "clock"}, end - time.monotonic())  # waits for the start, too
    readings = []
    for _ in range(3):
        sent = time.time()
        answer = client.ask({"do": "clock"}, end - time.monotonic())
        delay = time.time() - sent
        readings.append((delay, answer["time"] - sent - delay / 2))
    delay, offset = min(readings)  # the quickest answer tells the most
    node = client.node
    question = {"do": "facts", "folder": node.folder, "code": wanted.bundle, "seconds": 0.5 * seconds}
    file = wanted.data.identity_path if wanted.data else ""
    # A node of this machine needs no copy, unless it was given a data folder of its own.
    own = str(wanted.data.path) if wanted.data and node.here and not node.data else ""
    question |= {"data": node.data_folder, "data_file": file, "pack": own}
    found = client.ask(question, end - time.monotonic())
    return {"facts": found, **_find_jobs(client, wanted, end), "offset": offset, "delay": delay}


def _find_jobs(client: ProbeClient, wanted: Wanted, end: float) -> dict[str, list]:
    """This user's processes of jobs; a leftover that is about to end is given the time to do so."""
    patience = min(time.monotonic() + DYING_SECONDS, end - 1.0)
    while True:
        answer = client.ask({"do": "jobs"}, end - time.monotonic())
        watched = {process["id"] for process in answer["jobs"] if process["supervisor"]} | {wanted.job_id}
        if time.monotonic() > patience or all(process["id"] in watched for process in answer["jobs"]):
            return {"jobs": answer["jobs"], "inherited": answer.get("inherited", [])}
        time.sleep(0.2)


def _explore(
    network: routes.Network,
    clients: Mapping[str, ProbeClient],
    port: int | None,
    waits: Mapping[str, float],
    end: float,
) -> tuple[routes.Network, dict[str, LabError]]:
    """Has the nodes listen, and then each try all addresses of each other; may use what is left until ``end``."""
    names = list(network.facts)
    # A connection that nothing answers is told of only when its time is over; 0.8 s are for the way there and back.
    told = waits["connect"] + 0.8
    listen = max(waits["listen"], end - time.monotonic() - told)
    tokens = {name: secrets.token_hex(16) for name in names}
    questions = {name: {"do": "listen", "addresses": routes.list_candidates(network, name)} for name in names}
    for name, question in questions.items():
        question |= {"token": tokens[name], "port": (port or 0) if name == network.head else None}
    asked = {name: functools.partial(clients[name].ask, questions[name], listen) for name in names}
    listening, errors = _split(ask_all(asked, network.nodes, listen))
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
        hosts = [network.system(other).get("host", "") for other in listening if other != name]
        question = {"do": "connect", "targets": targets, "names": hosts, "seconds": waits["connect"]}
        tasks[name] = functools.partial(clients[name].ask, question, patience)
    answers, late = _split(ask_all(tasks, network.nodes, patience))
    reached = {name: answer["reached"] for name, answer in answers.items()}
    resolved = {name: answer.get("names", {}) for name, answer in answers.items()}
    explored = routes.Network(network.nodes, network.facts, network.one_machine, listening, reached, resolved)
    return explored, errors | late


def judge_clocks(readings: Mapping[str, tuple[float, float]]) -> list[Verdict]:
    """Judges the nodes' clocks by (offset, round trip) in seconds against the launcher's."""
    verdicts = []
    for name, (offset, delay) in readings.items():
        if abs(offset) - delay / 2 > CLOCK_ALLOWED:
            what = f"the clock is {abs(offset):,.1f} s {'ahead of' if offset > 0 else 'behind'} the launcher's"
            cause, fix = "nobody sets it; times in logs cannot be compared", "sudo timedatectl set-ntp true  (there)"
            verdicts.append(Verdict(name, "clock", "note", what, cause, fix))
    return verdicts or [
        Verdict(name, "clock", "ok", f"within {CLOCK_ALLOWED:.0f} s of the launcher's") for name in readings
    ]
