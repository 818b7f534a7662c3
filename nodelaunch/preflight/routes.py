"""Chooses the address at which each node is reached, and judges names, interfaces, firewalls and the rendezvous."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from nodelaunch.backends.nodes import Node
from nodelaunch.preflight.verdicts import Facts, Verdict

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Network:
    """The nodes, and what they found out about each other.

    Attributes:
        nodes: By name; the first is node 0, where the rendezvous listens.
        facts: Per node that answered.
        one_machine: True if they are all the same machine.
        listening: Per node, the answer of :func:`nodelaunch.node.probe.listen`.
        reached: Per node, the outcomes of :func:`nodelaunch.node.probe.reach` by :func:`name_target`.
    """

    nodes: Mapping[str, Node]
    facts: Facts
    one_machine: bool
    listening: Mapping[str, Mapping] = field(default_factory=dict)
    reached: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def head(self) -> str:
        """The name of node 0."""
        return next(iter(self.nodes))

    def interfaces(self, name: str) -> dict[str, list[str]]:
        """The node's interfaces and their IPv4 addresses; {} if it could not find them out."""
        found = self.facts[name].get("interfaces", {})
        return {key: value for key, value in found.items() if isinstance(value, list)}

    def system(self, name: str) -> Mapping:
        """The node's host name, its machine, and the address that ssh came in by."""
        return self.facts[name].get("system", {})

    def outcome(self, source: str, target: str, address: str, kind: str) -> str | None:
        """The outcome of ``source`` connecting to ``target`` there; None if it was not tried."""
        return self.reached.get(source, {}).get(name_target(target, address, kind))


def name_target(name: str, address: str, kind: str) -> str:
    """The key of one try to connect; ``kind`` is "any" (a random port) or "port" (the rendezvous')."""
    return f"{kind} {address} {name}"


def list_candidates(network: Network, name: str) -> list[str]:
    """The addresses at which a node might be reached: the given one, or those of its interfaces but the loopback."""
    node, interfaces = network.nodes[name], network.interfaces(name)
    if node.address:
        return [node.address]
    if network.one_machine and node.interface is None:
        return [LOOPBACK]
    # With a wrong name all are tried, so that the fix can name the right one.
    held = interfaces.get(node.interface or "") or [a for addresses in interfaces.values() for a in addresses]
    return list(dict.fromkeys(a for a in held if not a.startswith("127."))) or [a for a in held if network.one_machine]


def choose_address(network: Network, name: str) -> str | None:
    """The address that most of the others reach; among equals, the likeliest, so that a fix can name it."""
    candidates = list_candidates(network, name)
    others = [other for other in network.facts if other != name]
    elsewhere = {a for other in others for a in list_candidates(network, other)}

    def rate(address: str) -> tuple:
        reached = sum(network.outcome(other, name, address, "any") == "ok" for other in others)
        # A bridge such as docker0 has the same address on every host, and no other host is behind it.
        return reached, address not in elsewhere, address == network.system(name).get("ssh")

    return max(candidates, key=rate, default=None)


def find_interface(network: Network, name: str, address: str | None) -> str | None:
    """The interface with an address; all of 127/8 belongs to the loopback."""
    for interface, held in network.interfaces(name).items():
        if address in held or (address and address.startswith("127.") and any(a.startswith("127.") for a in held)):
            return interface
    return None


def judge_address(network: Network, name: str, chosen: str | None) -> Verdict:
    """Judges a node's address and interface, given or found."""
    node, interfaces = network.nodes[name], network.interfaces(name)
    judge = functools.partial(Verdict, name, "address")
    listing = ", ".join(f"{key} {' '.join(held) or '(no address)'}" for key, held in interfaces.items())
    there = f"there are: {listing}"
    holder = find_interface(network, name, chosen)
    right = f'interface="{holder}"' if holder else "leave interface= away"
    if not interfaces:
        cause = "the system did not list them"
        return judge("note", "the interfaces could not be listed", cause, "name one: interface=…")
    if node.interface and not interfaces.get(node.interface):
        word = "has no address" if node.interface in interfaces else "is not there"
        cause = "names differ from host to host, and an interface that is down has no address"
        return judge("red", f"interface {node.interface} {word}; {there}", cause, right)
    if chosen is None:
        cause = "a container without a network, or one with IPv6 only"
        fix = "give it a network (docker run --network host …)"
        return judge("red", f"no address that another machine could reach; {there}", cause, fix)
    if holder is None:
        cause = "it is the address of a router in front of the node; Gloo and NCCL send the interface's own"
        fix = "name the node by its private address, or leave address= away"
        return judge("red", f"{chosen} is on no interface; {there}", cause, fix)
    if node.interface and holder != node.interface:
        what = f"{chosen} is on {holder}, not on {node.interface}; {there}"
        return judge("red", what, "address= and interface= disagree", right)
    if not chosen.startswith("127.") and interfaces[holder][0] != chosen:
        what = f"{chosen} is the second address of {holder}; Gloo takes the first, {interfaces[holder][0]}"
        return judge("note", what, "several addresses on one interface", "see that both are reached")
    return judge("ok", f"{chosen} on {holder}")


def judge_routes(network: Network, chosen: Mapping[str, str], *, seconds: float) -> list[Verdict]:
    """Judges both directions between every two nodes: a red verdict for each that fails, or one green for all."""
    names = [name for name in network.listening if name in chosen]
    pairs = [(a, b) for a in names for b in names if a != b and a in network.reached]
    verdicts = [_judge_route(network, chosen, pair, seconds) for pair in pairs]
    if pairs and not any(verdicts):
        port = network.listening.get(network.head, {}).get("chosen")
        also = f", and {network.head} on port {port}" if network.listening.get(network.head, {}).get("port") else ""
        return [Verdict(", ".join(names), "network", "ok", f"each reaches each on a random port{also}")]
    return [verdict for verdict in verdicts if verdict]


def _judge_route(network: Network, chosen: Mapping[str, str], pair: tuple[str, str], seconds: float) -> Verdict | None:
    source, target = pair
    address = chosen[target]
    ports = {kind: network.listening[target].get(kind, {}).get(address) for kind in ("any", "port")}
    outcomes = {kind: network.outcome(source, target, address, kind) for kind, port in ports.items() if port}
    failed = [kind for kind, outcome in outcomes.items() if outcome != "ok"]
    if not failed:
        return None
    # An address that it has itself does not lead to another node, whatever answers there.
    own = any(address in held for held in network.interfaces(source).values()) and not address.startswith("127.")
    outcome = "stranger" if own else outcomes[failed[0]] or "dropped"
    words = {
        "dropped": f"no answer in {seconds:.1f} s (dropped)",
        "refused": "refused",
        "stranger": "another one answers",
    }
    where = "any port" if len(failed) == len(outcomes) else f"port {ports[failed[0]]}"
    what = f"{source} does not reach {target} at {address}, {where}: {words.get(outcome, outcome)}"
    if len(failed) < len(outcomes):
        other = next(kind for kind in outcomes if kind not in failed)
        what += f"; port {ports[other]} is open"
    back = network.outcome(target, source, chosen[source], "any")
    what += f". {target} reaches {source}." if back == "ok" else f". {target} does not reach {source} either."
    causes = {
        "dropped": f"a firewall or security group drops what {target} is sent",
        "refused": f"a firewall of {target} refuses it, or {address} belongs to another machine",
        "stranger": f"{address} is also the address of another machine, or of a bridge such as docker0",
    }
    fix = f"allow all TCP from {chosen[source]} on {target} (Gloo and NCCL open random ports), for example there: "
    fix += f"sudo ufw allow from {chosen[source]}"
    if outcome == "stranger":
        fix = "leave interface= and address= away, or name those between the nodes"
    cause = causes.get(outcome, "no network joins the two, or a firewall refuses")
    return Verdict(f"{source} → {target}", "network", "red", what, cause, fix)


def judge_port(network: Network, stop: str) -> list[Verdict]:
    """Judges if the rendezvous' port is free on node 0; ``stop`` is the command that ends a job of ours there."""
    answer = network.listening.get(network.head)
    if answer is None:
        return []
    port, busy = answer["chosen"], answer["busy"]
    if busy is None:
        return [Verdict(network.head, "port", "ok", f"{port} is free")]
    if "user" not in busy:
        cause = "ports below 1024 are the administrator's"
        what = f"port {port} cannot be listened on: {busy['error']}"
        return [Verdict(network.head, "port", "red", what, cause, "port=None picks a free one")]
    holder = f"{busy['command']} (pid {busy['pid']}, user {busy['user']})" if "pid" in busy else ""
    holder = holder or f"a process of user {busy['user'] or '?'} (which one, only that user may see)"
    job = busy.get("job")
    cause = f"a leftover of job {job}" if job else "another program, which the labs leave alone"
    fix = stop if job else "port=None picks a free one"
    return [Verdict(network.head, "port", "red", f"port {port} is held by {holder}", cause, fix)]


def judge_exposure(network: Network, chosen: Mapping[str, str]) -> list[Verdict]:
    """Notes what the job opens to others, and warns of an interface that the whole Internet might reach."""
    verdicts = []
    for name, address in chosen.items():
        held = network.interfaces(name).get(find_interface(network, name, address) or "", [])
        public = any(ipaddress.ip_address(each).is_global for each in (address, *held))
        what = "listens on the loopback only: no other machine reaches the job"
        if not address.startswith("127."):
            what = f"torch's ports on {address}{', a PUBLIC interface,' if public else ''} will ask for no password"
        cause = "anyone who reaches them can read or disturb the job (https://pytorch.org, SECURITY.md)"
        fix = "use private addresses, or let the firewall admit the nodes alone"
        verdicts.append(Verdict(name, "exposure", *(("note", what, cause, fix) if public else ("ok", what))))
    return verdicts


def judge_names(network: Network, chosen: Mapping[str, str]) -> list[Verdict]:
    """Notes a node's own name that stands for nothing, or for the loopback; the job uses addresses."""
    verdicts = []
    for name, found in () if network.one_machine else network.facts.items():
        own, host = found.get("own"), network.system(name).get("host", "")
        held = {address for addresses in network.interfaces(name).values() for address in addresses}
        what = f"its own name {host} stands for {' '.join(own or []) or 'nothing'} (/etc/hosts)"
        if not isinstance(own, list):
            what = f"its own name {host} was not looked up in time (its name server is silent)"
        elif own and all(address in held and not address.startswith("127.") for address in own):
            verdicts.append(Verdict(name, "names", "ok", f"{host} resolves"))
            continue
        cause = "the labs pass addresses and need no names (--local-addr, is_host); other programs may fail"
        fix = f'in /etc/hosts of every node: "{chosen.get(name, "ADDRESS")} {host}", and the same for the others'
        verdicts.append(Verdict(name, "names", "note", what, cause, fix))
    return verdicts
