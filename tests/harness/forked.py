"""Functions in their own process, which may be killed, or give up the rights of root."""

import multiprocessing
import threading

from lab_common import LabError

forked = multiprocessing.get_context("fork")


def fork(function, *arguments):
    """Starts a function in a forked process. Each gets its own tqdm lock: a killed one may hold it."""

    def work():
        from tqdm.auto import tqdm

        tqdm.set_lock(threading.RLock())
        function(*arguments)

    process = forked.Process(target=work, daemon=True)
    process.start()
    return process


def drop_root_rights():
    """Gives up root's right to pass over file modes, for this process; without root there is nothing to give up."""
    import ctypes

    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capset(header, nothing)


def run_forked(function, *arguments):
    """Runs a function in its own process and returns what it returns, or raises its LabError."""

    def work():
        try:
            results.put((function(*arguments), None))
        except LabError as error:
            results.put((None, (error.what, error.where, error.cause, error.fix)))

    results = forked.SimpleQueue()
    process = fork(work)
    process.join(timeout=30)
    assert process.exitcode == 0
    value, failure = results.get()
    if failure:
        raise LabError(failure[0], where=failure[1], cause=failure[2], fix=failure[3])
    return value
