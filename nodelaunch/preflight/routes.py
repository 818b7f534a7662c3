"""Chooses the address at which each node is reached, and judges names, interfaces, firewalls and the rendezvous."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nodelaunch.backends.nodes import Node
from nodelaunch.preflight.verdicts import Facts, Verdict

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Network:
    """What the nodes found out about each other.

    Attributes:
        nodes: By name; the first is node 0, where the rendezvous listens.
        facts: Of those that answered.
        one_machine: Whether they are all the same machine.
        listening: Per node, the answer of :func:`nodelaunch.node.probe.listen`.
        reached: Per node, the outcomes of :func:`nodelaunch.node.probe.reach` by :func:`name_target`.
        names: Per node, the addresses that the other nodes' host names stand for there.
    """

    nodes: Mapping[str, Node]
    facts: Facts
    one_machine: bool
    listening: Mapping[str, Mapping] = field(default_factory=dict)
    reached: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    names: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)

    @property
    def head(self) -> str:
        """The name of node 0."""
        return next(iter(self.nodes))

    def interfaces(self, name: str) -> dict[str, list[str]]:
        """The node's interfaces and their IPv4 addresses; {} where it could not tell."""
        found = self.facts[name].get("interfaces", {})
        return {key: value for key, value in found.items() if isinstance(value, list)}

    def system(self, name: str) -> Mapping:
        """Who the node is: host name, machine, the address that ssh came in by."""
        return self.facts[name].get("system", {})

    def outcome(self, source: str, target: str, address: str, kind: str) -> str | None:
        """How ``source`` fared with ``target`` there; None where it was not tried."""
        return self.reached.get(source, {}).get(name_target(target, address, kind))


def name_target(name: str, address: str, kind: str) -> str:
    """The key of one try to connect; ``kind`` is "any" (a random port) or "port" (the rendezvous')."""
    return f"{kind} {address} {name}"


def list_candidates(network: Network, name: str) -> list[str]:
    """The addresses at which a node might be reached: its given one, else those of its interfaces, loopback aside."""
    node, interfaces = network.nodes[name], network.interfaces(name)
    if node.address:
        return [node.address]
    if network.one_machine and node.interface is None:
        return [LOOPBACK]
    # A wrong name costs only the choice: all are tried, so that the fix can name the right one.
    held = interfaces.get(node.interface or "") or [a for addresses in interfaces.values() for a in addresses]
    return list(dict.fromkeys(a for a in held if not a.startswith("127."))) or [a for a in held if network.one_machine]


def choose_address(network: Network, name: str) -> str | None:
    """The address that most of the others reach; among equals, the likeliest, so that a fix can speak of it."""
    candidates = list_candidates(network, name)
    others = [other for other in network.facts if other != name]
    elsewhere = {a for other in others for a in list_candidates(network, other)}

    def rate(address: str) -> tuple:
        reached = sum(network.outcome(other, name, address, "any") == "ok" for other in others)
        # A bridge such as docker0 has the same address on every host, and leads to none of the others.
        return reached, address not in elsewhere, address == network.system(name).get("ssh")

    return max(candidates, key=rate, default=None)


def find_interface(network: Network, name: str, address: str | None) -> str | None:
    """The interface that holds an address; all of 127/8 belongs to the loopback."""
    for interface, held in network.interfaces(name).items():
        if address in held or (address and address.startswith("127.") and any(a.startswith("127.") for a in held)):
            return interface
    return None


def judge_address(network: Network, name: str, chosen: str | None) -> Verdict:
    """Judges a node's address and interface, given or found."""
    node, interfaces = network.nodes[name], network.interfaces(name)
    listing = ", ".join(f"{key} {' '.join(held) or '(no address)'}" for key, held in interfaces.items())
    holder = find_interface(network, name, chosen)
    right = f'interface="{holder}"' if holder else "leave interface= away"
    if not interfaces:
        cause = "the system did not tell"
        return Verdict(name, "address", "note", "the interfaces could not be listed", cause, "name one: interface=…")
    if node.interface and not interfaces.get(node.interface):
        word = "has no address" if node.interface in interfaces else "is not there"
        cause = "names differ from host to host, and an interface that is down has no address"
        return Verdict(name, "address", "red", f"interface {node.interface} {word}; there are: {listing}", cause, right)
    if chosen is None:
        cause = "a container without a network, or one with IPv6 only"
        what = f"no address that another machine could reach; there are: {listing}"
        return Verdict(name, "address", "red", what, cause, "give it a network (docker run --network host …)")
    if holder is None:
        cause = "it is the address of a router in front of the node; Gloo and NCCL send the interface's own"
        what = f"{chosen} is on no interface; there are: {listing}"
        return Verdict(
            name, "address", "red", what, cause, "name the node by its private address, or leave address= away"
        )
    if node.interface and holder != node.interface:
        what = f"{chosen} is on {holder}, not on {node.interface}; there are: {listing}"
        return Verdict(name, "address", "red", what, "address= and interface= disagree", right)
    if not chosen.startswith("127.") and interfaces[holder][0] != chosen:
        what = f"{chosen} is the second address of {holder}; Gloo takes the first, {interfaces[holder][0]}"
        return Verdict(name, "address", "note", what, "several addresses on one interface", "see that both are reached")
    return Verdict(name, "address", "ok", f"{chosen} on {holder}")


def judge_routes(network: Network, chosen: Mapping[str, str], *, seconds: float) -> list[Verdict]:
    """Judges each direction between each two nodes: one red verdict for each that fails, or one green for all."""
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
    # What it holds itself it does not reach elsewhere, whatever answers there.
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
    """Judges that the rendezvous' port is free on node 0; ``stop`` is the command where a job of ours holds it."""
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
    """Says what the job opens to others, and warns of an interface that the whole Internet might reach."""
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
    """Says which host names stand for nothing, or for the loopback: notes, because the job uses addresses."""
    if network.one_machine:
        return []
    verdicts = []
    hosts = {name: network.system(name).get("host", "") for name in network.facts}
    for name, found in network.facts.items():
        troubles, own = [], found.get("own")
        held = {address for addresses in network.interfaces(name).values() for address in addresses}
        if not isinstance(own, list):
            troubles.append(f"its own name {hosts[name]} was not looked up in time (its name server is silent)")
        elif not own or any(a.startswith("127.") or a not in held for a in own):
            troubles.append(f"its own name {hosts[name]} stands for {' '.join(own) or 'nothing'} (/etc/hosts)")
        for other, host in hosts.items():
            if other == name or other not in network.listening:
                continue
            if host == hosts[name]:
                troubles.append(f"{other} has the same host name, {host}")
            elif name in network.names and not network.names[name].get(host):
                troubles.append(f"{other}'s name {host} stands for nothing")
        if not troubles:
            verdicts.append(Verdict(name, "names", "ok", f"{hosts[name]} and the others resolve"))
            continue
        cause = "nothing to mend for the labs: they pass addresses (--local-addr, is_host); other programs may fail"
        fix = f'in /etc/hosts of every node: "{chosen.get(name, "ADDRESS")} {hosts[name]}", and so for the others'
        verdicts.append(Verdict(name, "names", "note", "; ".join(troubles), cause, fix))
    return verdicts
