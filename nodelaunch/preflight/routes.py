"""Chooses the address at which each node is reached, and judges names, interfaces, firewalls and the rendezvous."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from nodelaunch.backends.nodes import Node
from nodelaunch.preflight.verdicts import Facts, Verdict, find_part, stop_command

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Network:
    """The nodes that answered, and what they found out about each other."""

    nodes: Mapping[str, Node]  # by name; the first is node 0, where the rendezvous listens
    facts: Facts
    # Per node, the outcomes of nodelaunch.node.probe.reach, by "ADDRESS NODE" of what it tried to reach.
    reached: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def one_machine(self) -> bool:
        """True if all nodes are the same machine."""
        return len({found["system"]["machine"] for found in self.facts.values()}) == 1

    @property
    def head(self) -> str:
        """The name of node 0."""
        return next(iter(self.nodes))

    def list_interfaces(self, name: str) -> dict[str, list[str]]:
        """The node's interfaces and their IPv4 addresses; {} if it could not find them out."""
        return find_part(self.facts[name], "interfaces")

    def find_ports(self, name: str) -> Mapping:
        """The answer of :func:`nodelaunch.node.probe.listen`; {} if there is none."""
        return find_part(self.facts.get(name, {}), "ports")

    def list_candidates(self, name: str) -> list[str]:
        """The addresses at which a node might be reached: the given one, or those of its interfaces."""
        node, interfaces = self.nodes[name], self.list_interfaces(name)
        if node.address:
            return [node.address]
        if self.one_machine and node.interface is None:
            return [LOOPBACK]
        # With a wrong name all are tried, so that the fix can name the right one.
        held = interfaces.get(node.interface or "") or [a for addresses in interfaces.values() for a in addresses]
        return [address for address in held if self.one_machine or not address.startswith("127.")]

    def list_targets(self, name: str, tokens: Mapping[str, str]) -> dict[str, tuple[str, int, str]]:
        """Address, port and token of everything that a node tries to reach."""
        return {
            f"{address} {other}": (address, port, tokens[other])
            for other in self.facts
            if other != name and (port := self.find_ports(other).get("any"))
            for address in self.list_candidates(other)
        }

    def outcome(self, source: str, target: str, address: str) -> str | None:
        """The outcome of ``source`` connecting to ``target`` there; None if it was not tried."""
        return self.reached.get(source, {}).get(f"{address} {target}")

    def choose_address(self, name: str) -> str | None:
        """The address that most of the others reach; among equals, the likeliest, so that a fix can name it."""
        others = [other for other in self.facts if other != name]
        elsewhere = {address for other in others for address in self.list_candidates(other)}

        def rate(address: str) -> tuple[int, bool]:
            # A bridge such as docker0 has the same address on every host, and no other host is behind it.
            return sum(self.outcome(other, name, address) == "ok" for other in others), address not in elsewhere

        return max(self.list_candidates(name), key=rate, default=None)

    def find_interface(self, name: str, address: str) -> str | None:
        """The interface with an address; all of 127/8 belongs to the loopback."""
        for interface, held in self.list_interfaces(name).items():
            if address in held or (address.startswith("127.") and LOOPBACK in held):
                return interface
        return None


def judge_address(network: Network, name: str, chosen: str | None) -> Verdict:
    """Judges a node's address and interface, given or found."""
    node, interfaces = network.nodes[name], network.list_interfaces(name)
    holder = network.find_interface(name, chosen) if chosen else None
    listing = ", ".join(f"{key} {' '.join(held) or '(no address)'}" for key, held in interfaces.items())
    fix = "leave interface= away"
    if node.interface and not interfaces.get(node.interface):
        what, cause = f"interface {node.interface} is not there, or has no address", "names differ from host to host"
        fix = f'interface="{holder}"' if holder else fix
    elif chosen is None:
        what, cause = "no address that another machine could reach", "a container without a network, or with IPv6 only"
        fix = "give it a network (docker run --network host …)"
    else:
        return Verdict(name, "address", "ok", f"{chosen} on {holder}")
    return Verdict(name, "address", "red", f"{what}; there are: {listing}", cause, fix)


def judge_routes(network: Network, chosen: Mapping[str, str], *, seconds: float) -> list[Verdict]:
    """Judges both directions between every two nodes: a red verdict for each that fails, or one green for all."""
    pairs = [(a, b) for a in network.reached for b in chosen if a != b and a in chosen]
    reds = [red for pair in pairs if (red := _judge_route(network, chosen, *pair, seconds))]
    if reds or not pairs:
        return reds
    return [Verdict(", ".join(chosen), "network", "ok", "each reaches each on a random port")]


def _judge_route(
    network: Network, chosen: Mapping[str, str], source: str, target: str, seconds: float
) -> Verdict | None:
    address = chosen[target]
    outcome = network.outcome(source, target, address)
    if outcome == "ok" or not network.find_ports(target).get("any"):
        return None
    # An address that it has itself does not lead to another node, whatever answers there.
    if any(address in held for held in network.list_interfaces(source).values()) and not address.startswith("127."):
        outcome = "stranger"
    fix = f"allow all TCP from {chosen[source]} on {target} (Gloo and NCCL open random ports), for example there: "
    fix += f"sudo ufw allow from {chosen[source]}"
    words, cause = outcome, "no network joins the two, or a firewall refuses"
    if outcome in (None, "dropped"):
        words = f"no answer in {seconds:.1f} s (dropped)"
        cause = f"a firewall or security group drops what {target} is sent"
    elif outcome == "refused":
        cause = f"a firewall of {target} refuses it, or {address} belongs to another machine"
    elif outcome == "stranger":
        words, fix = "another one answers", "leave interface= away, or name the one between the nodes"
        cause = f"{address} is also another machine's, or that of a bridge such as docker0"
    back = "reaches" if network.outcome(target, source, chosen[source]) == "ok" else "does not reach"
    what = f"{source} does not reach {target} at {address}, any port: {words}. {target} {back} {source}."
    return Verdict(f"{source} → {target}", "network", "red", what, cause, fix)


def judge_port(network: Network) -> list[Verdict]:
    """Judges if the rendezvous' port is free on node 0."""
    if not (answer := network.find_ports(network.head)):
        return []
    port, busy = answer["chosen"], answer["busy"]
    if busy is None:
        return [Verdict(network.head, "port", "ok", f"{port} is free")]
    what, cause = f"port {port} cannot be listened on: {busy['error']}", "ports below 1024 are the administrator's"
    fix = "port=None picks a free one"
    if "user" in busy:
        process = f"{busy['command']} (pid {busy['pid']}, " if "pid" in busy else "a process ("
        what = f"port {port} is held by {process}user {busy['user'] or '?'})"
        cause = "another program, which the labs leave alone"
    if job := busy.get("job"):
        cause, fix = f"a leftover of job {job}", stop_command(job, network.nodes[network.head])
    return [Verdict(network.head, "port", "red", what, cause, fix)]


def judge_exposure(network: Network, chosen: Mapping[str, str]) -> list[Verdict]:
    """Notes what the job opens to others, and warns of an interface that the whole Internet might reach."""
    verdicts = []
    for name, address in chosen.items():
        held = network.list_interfaces(name).get(network.find_interface(name, address) or "", [])
        public = any(ipaddress.ip_address(each).is_global for each in (address, *held))
        what = "listens on the loopback only: no other machine reaches the job"
        if not address.startswith("127."):
            what = f"torch's ports on {address}{', a PUBLIC interface,' if public else ''} will ask for no password"
        cause = "anyone who reaches them can read or disturb the job (https://pytorch.org, SECURITY.md)"
        fix = "use private addresses, or let the firewall admit the nodes alone"
        verdicts.append(Verdict(name, "exposure", *(("note", what, cause, fix) if public else ("ok", what))))
    return verdicts
