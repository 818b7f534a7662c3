"""Makes torch's stores harder to reach and to misuse: one address in place of all, and data in place of code.

A ``TCPStore`` listens on every address of its machine, also where it was told 127.0.0.1 (torch 2.11 to 2.14), and the
state of the c10d rendezvous in it is unpickled, which runs what the pickle says. Neither asks for a password.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import pickle
import socket
from types import SimpleNamespace

RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
# All that the state of a rendezvous is made of.
STATE = {(RENDEZVOUS, "_RendezvousState"), (RENDEZVOUS, "_NodeDesc"), ("builtins", "set")}
STATE |= {("datetime", name) for name in ("datetime", "timedelta", "timezone")}


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in STATE:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of the state of a rendezvous")
        return super().find_class(module, name)


def load_state(content: bytes) -> object:
    """Unpickles the state of a rendezvous.

    Raises:
        pickle.UnpicklingError: It is damaged, or names anything else; nothing of that has run.
    """
    try:
        return _StateUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle raises what it likes, and the rendezvous expects one kind
        raise pickle.UnpicklingError(str(error)) from error


def guard_stores() -> None:
    """Makes every store of this process listen at its given address, and the rendezvous read data only.

    torch has no setting for either (2.14): its ``TCPStore`` takes a socket that was bound before, and the rendezvous
    takes ``pickle`` from its own module.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    functions = {"loads": load_state, "dumps": pickle.dumps, "PickleError": pickle.PickleError}
    dynamic_rendezvous.pickle = SimpleNamespace(**functions)  # the part of the module that it needs
    make_store, told = TCPStore.__init__, os.environ.get("MASTER_ADDR", "")
    if hasattr(make_store, "__wrapped__"):
        return

    @functools.wraps(make_store)
    def make_bound_store(
        self: TCPStore, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *rest, **more
    ) -> None:
        _check_name(host_name, told)
        # `rest` goes on with timeout, wait_for_workers, multi_tenant, master_listen_fd.
        if is_master and len(rest) < 4 and more.get("master_listen_fd") is None:
            more["master_listen_fd"], port = _bind(host_name, port)
        make_store(self, host_name, port, world_size, is_master, *rest, **more)

    TCPStore.__init__ = make_bound_store


def _check_name(host: str, told: str) -> None:
    """Checks that a name has an address; torch would ask again for as long as the group's timeout, half an hour."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        words = f"the name '{host}' of the meeting point is not known on this node"
        if told and host != told:
            words += f", and the script set it: MASTER_ADDR was {told}"
        raise RuntimeError(f"{words} ({error.strerror})") from None


def _bind(host: str, port: int) -> tuple[int, int]:
    """A socket that listens at this address only, as a descriptor for its new owner; and its port."""
    from torch.distributed import DistNetworkError

    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        name = errno.errorcode.get(error.errno, "")
        raise DistNetworkError(f"The server cannot listen on {host} port {port}: {name}, {error.strerror}") from error
    bound = listener.getsockname()[1]
    return listener.detach(), bound
