"""The exercises of lab 5: a DDP script, accumulation, set_epoch, a firewall for training, and SyncBatchNorm's sums."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from course.check import Exercise, expect, refusing
from course.exercises.lab5.accumulation import verify_accumulation
from course.exercises.lab5.ddp_script import verify_ddp_script


def _hand_out(epochs: Sequence[int | None], *, images: int = 12, ranks: int = 2, seed: int = 0) -> list[list[int]]:
    """What rank 0 gets from torch's own sampler in each epoch; None leaves out ``set_epoch``."""
    sampler = DistributedSampler(range(images), num_replicas=ranks, rank=0, seed=seed)
    orders = []
    for epoch in epochs:
        if epoch is not None:
            sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


def _find_same_start() -> list[list[int]]:
    """Two epochs, both with set_epoch, whose first image happens to be the same."""
    tried = (_hand_out((0, 1), seed=seed) for seed in range(1000))
    return next(orders for orders in tried if orders[0][0] == orders[1][0])


def verify_find_forgotten(find_forgotten: Callable) -> str:
    """Asks for what torch's DistributedSampler hands out with and without ``set_epoch``."""
    cases = (
        ("3 epochs without set_epoch", _hand_out((None,) * 3), True, "every epoch has the order of the first"),
        ("3 epochs with set_epoch", _hand_out((0, 1, 2)), False, "the orders differ: compare them with each other"),
        (
            "2 epochs of one process, with set_epoch",
            _hand_out((0, 1), ranks=1),
            False,
            "the images of one process are the same in every epoch, their order is not: compare the lists themselves",
        ),
        (
            "2 epochs whose first image is the same by chance",
            _find_same_start(),
            False,
            "one place may agree by chance: compare whole orders",
        ),
        (
            "epoch 0, epoch 0 again after a restart, epoch 1",
            _hand_out((0, 0, 1)),
            False,
            "two orders may be the same for another reason: compare all epochs with the first",
        ),
        ("epochs 0, 1 and 1 again", _hand_out((0, 1, 1)), False, "compare all epochs, not only neighbours"),
        ("1 epoch", _hand_out((None,)), False, "one epoch alone cannot tell: there is nothing to compare it with"),
        ("2 longer epochs without set_epoch", _hand_out((None,) * 2, images=30, ranks=4), True, "any length, any rank"),
    )
    for case, orders, expected, hint in cases:
        with refusing(IndexError, TypeError, case=case, expected=expected, hint=hint):
            yours = find_forgotten(orders)
        expect(
            isinstance(yours, bool | np.bool_),
            f"{case}: what the function returns",
            yours=repr(yours)[:60],
            expected="True or False",
            hint="a comparison is a bool already: return it",
        )
        expect(bool(yours) == expected, case, yours=yours, expected=expected, hint=hint)
    return f"{len(cases)} runs of torch's DistributedSampler, with and without set_epoch"


EVERY_PORT, SSH = (1, 65535), 22
FIREWALL_CASES = (
    (("10.0.0.11", "10.0.0.12"), "203.0.113.7"),
    (("172.31.4.20", "172.31.21.3", "172.31.40.9"), "198.51.100.23"),
)


def verify_choose_rules(choose_rules: Callable) -> str:
    """Asks for the rules of two clusters: enough to train on, and nothing that is open to anybody else."""
    for nodes, you in FIREWALL_CASES:
        rules = choose_rules(list(nodes), you)
        case = f"{len(nodes)} nodes"
        parsed = [_parse_rule(case, rule) for rule in _expect_list(case, rules)]
        for source, ports in parsed:
            _expect_narrow(case, source, ports, nodes, you)
        for address in nodes:
            _expect_open(case, address, parsed)
        yours = [ports for source, ports in parsed if ipaddress.ip_address(you) in source]
        expect(
            bool(yours),
            f"{case}: what you reach from {you}",
            yours="nothing",
            expected=f"port {SSH}",
            hint="a rule for yourself, from you/32: ssh is how you start the job and how its output comes back",
        )
    return "the nodes reach each other on every port, you reach port 22, and nobody else reaches anything"


def _expect_list(case: str, rules: object) -> Sequence:
    expect(
        isinstance(rules, list | tuple),
        f"{case}: what the function returns",
        yours=type(rules).__name__,
        expected="a list of rules",
        hint='one dictionary per rule: {"from": "10.0.0.11/32", "ports": (low, high)}',
    )
    return rules


def _parse_rule(case: str, rule: object) -> tuple[ipaddress.IPv4Network, tuple[int, int]]:
    """Reads a rule as a network and its first and last port."""
    form = '{"from": "10.0.0.11/32", "ports": (22, 22)}'
    hint = "the source is an address with /32, or a network that begins where its mask says; ports are two numbers"
    with refusing(ValueError, TypeError, KeyError, case=f"{case}: a rule {rule!r}", expected=form, hint=hint):
        source, (low, high) = ipaddress.IPv4Network(rule["from"]), rule["ports"]
        if not 0 <= int(low) <= int(high) <= 65535:
            raise ValueError(f"there are no ports {low} to {high}")
    return source, (int(low), int(high))


def _expect_narrow(
    case: str, source: ipaddress.IPv4Network, ports: tuple[int, int], nodes: Sequence[str], you: str
) -> None:
    """A rule that lets nobody in but the nodes, and you to ssh."""
    strangers = source.num_addresses - sum(ipaddress.ip_address(one) in source for one in (*nodes, you))
    own = not strangers and ipaddress.ip_address(you) in source
    hint = "a subnet holds other machines too: a rule per node with /32, or, in a cloud, a group that names itself"
    if ipaddress.ip_address(you) in source:
        hint = "your own address is you/32: a wider one lets your neighbours in"
    if source.prefixlen == 0 and ports == (SSH, SSH):
        hint = "ssh that is open to the world is tried by guessers within minutes: open it to you/32"
    elif source.prefixlen == 0:
        hint = "torchrun's store and Gloo ask for no password: whoever reaches their ports can run code on your nodes"
    expect(
        not strangers,
        f"{case}: a rule from {source}, ports {ports[0]} to {ports[1]}",
        yours=f"open to {strangers:,} other addresses",
        expected="open to the nodes, and port 22 to you",
        hint=hint,
    )
    expect(
        not own or ports == (SSH, SSH),
        f"{case}: what is open to {you}",
        yours=f"ports {ports[0]} to {ports[1]}",
        expected=f"port {SSH}",
        hint="you need ssh alone; everything else goes through it (ssh -L), and the nodes talk among themselves",
    )


def _expect_open(case: str, address: str, parsed: Sequence[tuple[ipaddress.IPv4Network, tuple[int, int]]]) -> None:
    """A node that the others let in on every port."""
    ranges = sorted(ports for source, ports in parsed if ipaddress.ip_address(address) in source)
    first, last = EVERY_PORT
    reached = first - 1
    for low, high in ranges:
        reached = max(reached, high) if low <= reached + 1 else reached
    hint = "the rendezvous is only where ranks meet: Gloo and NCCL then listen on random ports, so open 1 to 65535"
    if not ranges:
        hint = "every node has to be let in by the others, rank 0's node too: one rule per address of nodes"
    expect(
        reached >= last,
        f"{case}: the ports that are open to the node {address}",
        yours=", ".join(f"{low} to {high}" if low < high else f"{low}" for low, high in ranges) or "none",
        expected=f"{first} to {last}",
        hint=hint,
    )


def verify_sync_statistics(sync_statistics: Callable) -> str:
    """Compares with torch's statistics of the union batch, for two, three and one ranks."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 3), (3, 4), (4, 1), (1, 2))
    for ranks, channels in shapes:
        # Ranks whose images differ, so that their means do.
        batches = torch.randn(ranks, 5, channels, generator=generator, dtype=torch.float64)
        batches += torch.randn(ranks, 1, channels, generator=generator, dtype=torch.float64)
        means, variances = batches.mean(1), batches.var(1, correction=0)
        union = batches.flatten(0, 1)
        case = f"{ranks} rank{'s' if ranks > 1 else ''}, {channels} channel{'s' if channels > 1 else ''}"
        yours = sync_statistics(means.clone(), variances.clone())
        expect(
            isinstance(yours, tuple | list)
            and len(yours) == 2
            and all(isinstance(one, torch.Tensor) and one.shape == (channels,) for one in yours),
            f"{case}: what the function returns",
            yours=_describe(yours),
            expected=f"(mean, variance), each of shape ({channels},)",
            hint="one number per channel: average over the ranks, which are dimension 0",
        )
        right = (union.mean(0), union.var(0, correction=0))
        for name, found, expected in zip(("mean", "variance"), yours, right, strict=True):
            expect(
                torch.allclose(found, expected, rtol=1e-9, atol=1e-12),
                f"{case}: the {name} over the union batch",
                yours=_round(found),
                expected=_round(expected),
                hint=_explain_statistics(name, found, means, variances),
            )
    return f"{len(shapes)} groups of ranks, equal to torch's mean and variance of the union batch"


def _explain_statistics(name: str, found: torch.Tensor, means: torch.Tensor, variances: torch.Tensor) -> str:
    """The hint that fits wrong statistics."""
    ranks, inside, between = len(means), variances.mean(0), means.var(0, correction=0)
    if name == "mean":
        return "shares of equal size: the mean of the means, over dimension 0"
    known = (
        (inside, "the ranks' means differ too: add the variance of the means to the mean of the variances"),
        (between, "each rank's images vary too: add the mean of the variances to the variance of the means"),
        (
            inside + between * ranks / max(ranks - 1, 1),
            "torch.var divides by R - 1 unless told otherwise: the means need var(0, correction=0), divided by R",
        ),
        ((inside + between).sqrt(), "that is the standard deviation: BatchNorm keeps the variance"),
        (variances.sum(0) + between, "average the ranks' variances: their sum grows with the number of ranks"),
    )
    if not found.isfinite().all():
        return "the means of one rank do not vary: var(0, correction=0) is 0 there, and torch.var's default is nan"
    fitting = (hint for wrong, hint in known if torch.allclose(found, wrong))
    return next(fitting, "the mean of the variances plus the biased variance of the means")


def _describe(value: object) -> str:
    parts = value if isinstance(value, tuple | list) else [value]
    shown = [f"shape {tuple(one.shape)}" if isinstance(one, torch.Tensor) else type(one).__name__ for one in parts]
    return ", ".join(shown) or "nothing"


def _round(values: torch.Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]


EXERCISES = {
    "5.1": Exercise("The DDP script", verify_ddp_script),
    "5.2": Exercise("Accumulation", verify_accumulation),
    "5.3": Exercise("A forgotten set_epoch", verify_find_forgotten),
    "5.4": Exercise("Open only what is needed", verify_choose_rules),
    "5.5": Exercise("What SyncBatchNorm computes", verify_sync_statistics),
}
