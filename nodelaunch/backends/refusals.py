"""What it means when ssh does not run a program: OpenSSH's messages, the likely cause, one way to mend it."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from lab_common import LabError
from lab_common.text import clean
from nodelaunch.failure import explain_end


def explain_refusal(name: str, returncode: int, stderr: str, *, python: str, config: Path | None) -> LabError:
    """Returns the error for a program that ssh could not run.

    Args:
        name: The host, as given to ssh.
        returncode: Of ssh: 255 is its own failure, all else is the program's.
        stderr: What ssh printed.
        python: The interpreter that was to run there.
        config: The configuration that ssh was given, or None for its own.
    """
    # A server's banner and ssh's warnings come first; what ended it comes last.
    noise = ("ControlSocket", "mux_client", "mm_receive_fd", "proxy dialer")
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith(noise)]
    ssh = f"ssh {f'-F {shlex.quote(str(config))} ' if config else ''}{shlex.quote(name)}"
    if returncode != 255:
        # A signal ended ssh here; what that means for the program there is not known.
        if end := explain_end(name, "its folder there", max(returncode, 0), stderr):
            return end
        return _explain_program(name, returncode, lines, python, ssh)
    for pattern, explain in (
        (r"HOST IDENTIFICATION HAS CHANGED", _explain_changed_key),
        (r"Host key verification failed|host key is known|key has been revoked", _explain_unknown_key),
        (r"Could not resolve hostname", _explain_name),
        (r"Connection refused", _explain_closed_port),
        (r"Permission denied|Too many authentication failures", _explain_denied),
        (r"timed out|No route to host|Network is unreachable|not responding", _explain_silence),
        (r"Bad configuration option|Bad owner or permissions|Can't open user config|extra arguments", _explain_config),
    ):
        if re.search(pattern, stderr, re.IGNORECASE):
            return explain(name, lines, ssh, config)
    return LabError(
        f"The connection to {name[:60]} ended.",
        where=ssh,
        cause=_shorten(lines) or "the host went away, or its sshd refused; it gave no reason",
        fix=f"try it by hand: {ssh} true",
    )


def _shorten(lines: list[str]) -> str:
    return clean(lines[-1], 300) if lines else ""


def _explain_program(name: str, returncode: int, lines: list[str], python: str, ssh: str) -> LabError:
    said = _shorten(lines)
    if returncode in (126, 127):  # what a shell ends with when the program is not there, or is none
        return LabError(
            f"The Python for the job is not on {name[:60]}.",
            where=f"{name}: {python}",
            cause=said or "no such program",
            fix=f"install Python and torch there ({ssh}), or name the one to use: ssh_nodes(…, python='/its/path')",
        )
    return LabError(
        f"A program on {name[:60]} ended with exit status {returncode}.",
        where=ssh,
        cause=said or "it gave no reason",
        fix=f"try it by hand: {ssh}",
    )


def _explain_name(name: str, lines: list[str], ssh: str, config: Path | None) -> LabError:
    return LabError(
        f"The name {name[:60]} is not known on this machine.",
        where=f"/etc/hosts and {config or '~/.ssh/config'} name no such host, nor does the network's name server",
        cause="a typo, or a name that only the hosts know",
        fix=f"use the host's IP address in ssh_nodes, or add to /etc/hosts: <IP address> {name[:60]}",
    )


def _explain_closed_port(name: str, lines: list[str], ssh: str, config: Path | None) -> LabError:
    return LabError(
        f"{name[:60]} is there, but refuses connections for ssh.",
        where=_shorten(lines),
        cause="no sshd runs there, or it listens on another port",
        fix="on that host: sudo systemctl start ssh; or give its port in ~/.ssh/config",
    )


def _explain_silence(name: str, lines: list[str], ssh: str, config: Path | None) -> LabError:
    return LabError(
        f"{name[:60]} does not answer.",
        where=_shorten(lines),
        cause="it is off, the address is another host's, or a firewall drops what comes from here",
        fix=f"see that it is on and that port 22 is open to this machine, then try by hand: {ssh} true",
    )


def _explain_unknown_key(name: str, lines: list[str], ssh: str, config: Path | None) -> LabError:
    return LabError(
        f"The host key of {name[:60]} is not known yet, so nobody can say that it is that host.",
        where="~/.ssh/known_hosts" if not config else f"the known_hosts file of {config}",
        cause="this account never logged in there",
        fix=f"run once by hand: {ssh}  (compare the fingerprint with the one from the host's owner, then answer yes)",
    )


def _explain_changed_key(name: str, lines: list[str], ssh: str, config: Path | None) -> LabError:
    entry = next((line for line in lines if line.startswith("Offending")), "")
    file = match[1] if (match := re.search(r" in (.+):\d+$", entry)) else ""
    given = f"-f {shlex.quote(file)} " if file else ""
    return LabError(
        f"{name[:60]} shows another host key than before.",
        where=file or "known_hosts",
        cause="the host was installed anew, its address now belongs to another one, or somebody stands in between",
        fix="ask the host's owner which of these; only if it was installed anew: "
        f"ssh-keygen {given}-R {shlex.quote(name.rpartition('@')[2])}  and log in once by hand",
    )


def _explain_denied(name: str, lines: list[str], ssh: str, config: Path | None) -> LabError:
    agent = bool(os.environ.get("SSH_AUTH_SOCK"))
    keys = sorted(path.stem for path in Path.home().glob(".ssh/id_*.pub"))
    have = f"the key files {', '.join(keys)}" if keys else "no key file in ~/.ssh"
    return LabError(
        f"{name[:60]} does not accept any of your keys.",
        where=_shorten(lines),
        cause=f"here are {have} and {'an' if agent else 'no'} ssh agent; a password is never asked for",
        fix=("" if keys else "ssh-keygen -t ed25519, then ") + ssh.replace("ssh ", "ssh-copy-id ", 1),
    )


def _explain_config(name: str, lines: list[str], ssh: str, config: Path | None) -> LabError:
    return LabError(
        "ssh does not accept its configuration.",
        where=config or "~/.ssh/config",
        cause=_shorten(lines[:1]),
        fix=f"mend that line, then try by hand: {ssh} true",
    )
