"""Explains why ssh did not run a program: OpenSSH's messages, each with its likely cause and one fix."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from lab_common import LabError
from lab_common.text import clean
from nodelaunch.failure import explain_full_disk

# By a pattern of ssh's words: the first line, where, the likely cause, and the fix.
REFUSALS = {
    r"HOST IDENTIFICATION HAS CHANGED": (
        "{host} shows another host key than before.",
        "{key_file}",
        "the host was installed again, its address now belongs to another one, or somebody is in between",
        "ask the host's owner which of these; only if it was installed again: ssh-keygen {key_option}-R {bare}  and "
        "log in once by hand",
    ),
    r"Host key verification failed|host key is known|key has been revoked": (
        "The host key of {host} is not known yet, so nobody can say that it is that host.",
        "{known_hosts}",
        "this account never logged in there",
        "run once by hand: {ssh}  (compare the fingerprint with the one from the host's owner, then answer yes)",
    ),
    r"Could not resolve hostname": (
        "The name {host} is not known on this machine.",
        "/etc/hosts and {config} name no such host, nor does the network's name server",
        "a typo, or a name that only the hosts know",
        "use the host's IP address in ssh_nodes, or add to /etc/hosts: <IP address> {host}",
    ),
    r"Connection refused": (
        "{host} is there, but refuses connections for ssh.",
        "{last}",
        "no sshd runs there, or it listens on another port",
        "on that host: sudo systemctl start ssh; or give its port in ~/.ssh/config",
    ),
    r"Permission denied|Too many authentication failures": (
        "{host} does not accept any of your keys.",
        "{last}",
        "here are {keys} and {agent} ssh agent; a password is never asked for",
        "{make_key}{copy_key}",
    ),
    r"timed out|No route to host|Network is unreachable|not responding": (
        "{host} does not answer.",
        "{last}",
        "it is off, the address is another host's, or a firewall drops what comes from here",
        "see that it is on and that port 22 is open to this machine, then try by hand: {ssh} true",
    ),
    r"Bad configuration option|Bad owner or permissions|Can't open user config|extra arguments": (
        "ssh does not accept its configuration.",
        "{config}",
        "{first}",
        "correct that line, then try by hand: {ssh} true",
    ),
    r"": (
        "The connection to {host} ended.",
        "{ssh}",
        "{last}",
        "try it by hand: {ssh} true",
    ),
}


def explain_refusal(name: str, returncode: int, stderr: str, *, python: str, config: Path | None) -> LabError:
    """Returns the error for a program that ssh could not run.

    Args:
        name: The host, as given to ssh.
        returncode: Exit status of ssh: 255 is its own failure, any other is the program's.
        stderr: What ssh printed.
        python: The interpreter that was to run there.
        config: The configuration that ssh was given, or None for its own.
    """
    # A server's banner and ssh's warnings come first; what ended it comes last.
    noise = ("ControlSocket", "mux_client", "mm_receive_fd", "proxy dialer")
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith(noise)]
    last, host = clean(lines[-1], 300) if lines else "", name[:60]
    ssh = f"ssh {f'-F {shlex.quote(str(config))} ' if config else ''}{shlex.quote(name)}"
    if returncode == 255:
        pattern = next(pattern for pattern in REFUSALS if re.search(pattern, stderr, re.IGNORECASE))
        facts = _find_facts(lines, config) | {"host": host, "bare": shlex.quote(name.rpartition("@")[2]), "ssh": ssh}
        facts |= {"last": last or "the host went away, or its sshd refused; it gave no reason"}
        facts |= {"copy_key": ssh.replace("ssh ", "ssh-copy-id ", 1)}
        what, where, cause, fix = (words.format_map(facts) for words in REFUSALS[pattern])
        return LabError(what, where=where, cause=cause, fix=fix)
    if full := explain_full_disk(name, "its folder there", stderr):
        return full
    if returncode in (126, 127):  # a shell's status if the program does not exist or cannot be run
        fix = f"install Python and torch there ({ssh}), or name the one to use: ssh_nodes(…, python='/its/path')"
        what, cause = f"The Python for the job is not on {host}.", last or "no such program"
        return LabError(what, where=f"{name}: {python}", cause=cause, fix=fix)
    what = f"A program on {host} ended with exit status {returncode}."
    return LabError(what, where=ssh, cause=last or "it gave no reason", fix=f"try it by hand: {ssh}")


def _find_facts(lines: list[str], config: Path | None) -> dict[str, str]:
    """The files, keys and words that the explanations name."""
    offending = next((re.search(r" in (.+):\d+$", line) for line in lines if line.startswith("Offending")), None)
    keys = sorted(path.stem for path in Path.home().glob(".ssh/id_*.pub"))
    return {
        "first": clean(lines[0], 300) if lines else "",
        "config": str(config or "~/.ssh/config"),
        "known_hosts": f"the known_hosts file of {config}" if config else "~/.ssh/known_hosts",
        "key_file": offending[1] if offending else "known_hosts",
        "key_option": f"-f {shlex.quote(offending[1])} " if offending else "",
        "keys": f"the key files {', '.join(keys)}" if keys else "no key file in ~/.ssh",
        "make_key": "" if keys else "ssh-keygen -t ed25519, then ",
        "agent": "an" if os.environ.get("SSH_AUTH_SOCK") else "no",
    }
