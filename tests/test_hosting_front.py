"""The front in a container, before an authority that gives certificates as Let's Encrypt does (ACME, RFC 8555)."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

import pytest
from harness.containers import FRONT, PROJECT, make_deployment
from harness.jobs import wait_for

from hosting.compose import CADDY, FRONT_PORT, make_caddyfile, make_front
from hosting.settings import Settings, check_settings
from hosting.teams import Team

pytestmark = [pytest.mark.hosting, pytest.mark.drill]
NAME, NETWORK = "labs.example.org", f"{PROJECT}-acme"
# Caddy has one, too.
AUTHORITY = """{
	admin off
	auto_https disable_redirects
	skip_install_trust
	storage file_system /data
	https_port 9443
}
https://authority:9443 {
	tls internal
	acme_server
}
"""
SIGNER = "pki/authorities/local/root.crt"


@pytest.fixture
def gateway(podman):
    """This machine's address on its own network, at which containers there find the ports that it publishes."""
    podman.call("network", "rm", "-f", NETWORK, check=False)
    podman.call("network", "create", NETWORK)
    yield podman.inspect(NETWORK)["subnets"][0]["gateway"]
    podman.call("rm", "-f", "-t", "0", f"{NETWORK}-front", f"{NETWORK}-authority", check=False)
    podman.call("network", "rm", "-f", NETWORK)


def find_names(address: str, signer: Path) -> tuple:
    """The names in the certificate at port 443, where the authority signed it for NAME; none where it did not."""
    with contextlib.suppress(OSError), socket.create_connection((address, 443), 5) as plain:
        context = ssl.create_default_context(cafile=signer)
        with context.wrap_socket(plain, server_hostname=NAME) as secure:
            return secure.getpeercert()["subjectAltName"]
    return ()


def test_a_certificate_comes_by_port_443_alone(podman, gateway, tmp_path):
    """No other port has to be open to the authority, as the guide says."""
    settings, team = Settings(address=NAME, port=443, bind="0.0.0.0", tls="auto"), Team("red")
    check_settings(settings)
    text = make_caddyfile([team], settings)
    command = make_front(make_deployment(tmp_path, [team], settings), text)["command"]
    ask = f"\tacme_ca https://authority:9443/acme/local/directory\n\tacme_ca_root /authority/{SIGNER}\n"
    data = tmp_path / "data"
    for name, written in (("authority", AUTHORITY), ("front", text.replace("{\n", "{\n" + ask, 1)), ("data", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / CADDY).write_text(written)

    def start(name, *options):
        mine = (f"--network={NETWORK}", f"--network-alias={name}", f"-v={tmp_path / name}:/etc/caddy:ro")
        podman.call("run", "-d", f"--name={NETWORK}-{name}", *mine, *options, FRONT, *command)

    start("authority", f"--add-host={NAME}:{gateway}", f"-v={data}:/data")
    wait_for((data / SIGNER).exists, 30.0)
    start("front", f"-p={gateway}:443:{FRONT_PORT}", f"-v={data}:/authority:ro")
    wait_for(lambda: find_names(gateway, data / SIGNER) == (("DNS", NAME),), 60.0)
