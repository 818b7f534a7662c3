"""The hub in its own container: two teams log in, get their containers, and cannot reach each other."""

from __future__ import annotations

import http.cookiejar
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest
from harness.containers import HUB_BASE, Hosted, assert_apart, bring_up, insecure, run

pytestmark = [pytest.mark.hosting, pytest.mark.drill]
WORK = "/home/learner/work/labs/ours.txt"


class Visitor:
    """A text-only browser: it keeps cookies, follows redirections, and fills in the login form."""

    def __init__(self, url: str) -> None:
        self.url, self.cookies = url, http.cookiejar.CookieJar()
        keeps = urllib.request.HTTPCookieProcessor(self.cookies)
        self._opener = urllib.request.build_opener(keeps, urllib.request.HTTPSHandler(context=insecure()))

    def get(self, path: str, form: dict | None = None) -> tuple[int, str, str]:
        """Returns status, address and text of the page at a path."""
        data = urllib.parse.urlencode(form).encode() if form else None
        try:
            answer = self._opener.open(urllib.request.Request(self.url + path, data=data), timeout=60)
        except urllib.error.HTTPError as refused:
            answer = refused
        with answer:
            return answer.status, answer.url.removeprefix(self.url), answer.read().decode(errors="replace")

    def log_in(self, team: str, token: str) -> tuple[int, str, str]:
        """Submits the login form; returns the next page."""
        page = self.get("/hub/login")[2]
        ticket = re.search(r'name="_xsrf"\s+value="([^"]+)"', page)[1]
        return self.get("/hub/login?next=", {"username": team, "password": token, "_xsrf": ticket})

    def wait_for_lab(self, team: str, seconds: float = 120.0) -> str:
        """Opens a team's path until its server answers; returns the final address."""
        end = time.monotonic() + seconds
        while True:
            status, where, page = self.get(f"/{team}/")
            if status == 200 and where.startswith(f"/user/{team}/lab"):
                return where.partition("?")[0]
            assert time.monotonic() < end, (status, where, page[-2000:])
            time.sleep(1)


@pytest.fixture(scope="module")
def hosted(podman, tmp_path_factory) -> Iterator[Hosted]:
    """A class of two teams with a hub, which has Podman's socket."""
    podman.build_hub()
    with podman.serve() as socket:
        podman.env.update(HUB_SOCKET=str(socket), HUB_BASE=HUB_BASE)
        with bring_up(podman, tmp_path_factory.mktemp("hub"), "--hub") as found:
            yield found


def visit(hosted: Hosted) -> Visitor:
    return Visitor(f"https://localhost:{hosted.port}")


@pytest.fixture(scope="module")
def visitors(hosted) -> dict[str, Visitor]:
    """Both teams, each logged in at its own server."""
    found = {team: visit(hosted) for team in ("red", "blue")}
    for team, visitor in found.items():
        status, where, page = visitor.log_in(team, hosted.token(team))
        assert status == 200 and "login" not in where, page[-2000:]
    for team, visitor in found.items():
        assert visitor.wait_for_lab(team) == f"/user/{team}/lab/tree/labs"
    return found


def test_nobody_has_a_container_before_the_first_login(hosted):
    assert set(hosted.started()) == {"labtest-front", "labtest-guard", "labtest-hub"}
    status, where, page = visit(hosted).get("/")
    assert status == 200 and where.startswith("/hub/login") and "Username: the name of your team." in page
    for team, token in (("red", ""), ("red", hosted.token("blue")), ("green", hosted.token("red")), ("admin", "admin")):
        status, _, page = visit(hosted).log_in(team, token)
        assert status == 403 and "Invalid username or password" in page
    assert set(hosted.started()) == {"labtest-front", "labtest-guard", "labtest-hub"}


def test_each_team_gets_its_container_and_refuses_the_other(hosted, visitors):
    nodes = {f"labtest-{team}-node0" for team in ("red", "blue")}
    assert set(hosted.started()) == {"labtest-front", "labtest-guard", "labtest-hub"} | nodes
    for team, other in (("red", "blue"), ("blue", "red")):
        visitor = visitors[team]
        status, _, body = visitor.get(f"/user/{team}/api/contents/labs")
        assert status == 200 and "00_start_here.ipynb" in body
        for path in ("lab", "api/contents", "tensorboard/"):
            status, _, body = visitor.get(f"/user/{other}/{path}")
            assert status == 403 and "00_start_here" not in body, (path, status)
        assert visitor.get(f"/hub/spawn/{other}")[0] in (403, 404)
        assert visitor.get(f"/hub/api/users/{other}")[0] in (403, 404)
    stranger = visit(hosted)
    assert stranger.get("/user/red/api/contents")[0] == 403
    assert stranger.get("/user/red/lab")[1].startswith("/hub/login")
    assert_apart(hosted, "red", "blue")


def test_a_team_s_container_is_held_to_its_share_and_kept_from_the_metadata(hosted, visitors):
    shares = json.loads((hosted.state / "shares.json").read_text())["teams"]
    for team in visitors:
        found = hosted.podman.inspect(f"labtest-{team}-node0")
        (share,) = shares[team]
        host = found["HostConfig"]
        assert host["Memory"] == share["memory"] > 1 << 30 and host["PidsLimit"] == share["processes"]
        assert host["CpuQuota"] == 100_000 * share["cpus"] and host["CpuPeriod"] == 100_000
        assert host["LogConfig"]["Size"] == "10MB" and "LAB_GUARDED=1" in found["Config"]["Env"]
    assert "to 169.254.0.0/16 prohibit" in run("ip", "rule").stdout


def test_no_secret_of_the_hub_was_on_a_command_line(hosted):
    """podman-compose puts variables, and the contents of variable files, on its command lines."""
    kept = (hosted.state / "hub" / "secrets.env").read_text().split()
    told = json.dumps(hosted.podman.inspect("labtest-hub"))
    assert len(kept) == 2 and not any(line.partition("=")[2] in told for line in kept)


def test_the_hub_may_be_started_anew_under_the_teams(hosted, visitors):
    before = {name: when for name, when in hosted.started().items() if "node0" in name}
    hosted.podman.call("restart", "-t", "5", "labtest-hub")
    hosted.host("up")
    assert visitors["red"].wait_for_lab("red") == "/user/red/lab/tree/labs"
    assert {name: when for name, when in hosted.started().items() if "node0" in name} == before


def test_status_names_the_teams_servers(hosted, visitors):
    said = hosted.host("status").stdout
    for team in visitors:
        assert re.search(rf"^{team} +running +yes", said, re.M), said


def test_a_new_token_is_the_only_one_that_logs_in(hosted, visitors):
    old = hosted.token("red")
    hosted.host("rotate", "red")
    assert hosted.token("red") != old
    assert visit(hosted).log_in("red", old)[0] == 403
    again = visit(hosted)
    # Its server may still ask at the address that the hub had before it was started anew; then it answers 500.
    assert again.log_in("red", hosted.token("red"))[1].startswith("/user/red/")
    assert again.wait_for_lab("red") == "/user/red/lab/tree/labs"
    kept = json.loads((hosted.state / "hub" / "teams.json").read_text())
    assert old not in json.dumps(kept) and len(kept["red"]["sha256"]) == 64


def test_work_is_the_same_with_accounts_and_without(hosted, visitors):
    hosted.podman.ask("labtest-red-node0", "sh", "-c", f"echo kept > {WORK}")
    hosted.host("up", "--no-hub")
    assert hosted.podman.ask("labtest-red-node0", "cat", WORK) == "kept"
    assert "labtest-hub" not in hosted.started()
    hosted.host("up", "--hub")
    assert set(hosted.started()) == {"labtest-front", "labtest-guard", "labtest-hub"}
    red = visit(hosted)
    red.log_in("red", hosted.token("red"))
    red.wait_for_lab("red")
    assert hosted.podman.ask("labtest-red-node0", "cat", WORK) == "kept"


def test_collect_says_how_to_reach_a_team_that_is_not_there(hosted, visitors, tmp_path):
    hosted.podman.ask("labtest-red-node0", "sh", "-c", f"echo kept > {WORK}")
    # As the hub does with one that is idle.
    hosted.podman.call("rm", "-f", "-t", "1", "labtest-blue-node0", check=False)
    command = ("collect", "--into", tmp_path / "in")
    refused = hosted.host(*command, check=False)
    assert refused.returncode == 1 and "1 of 2 teams could not be collected whole: blue." in refused.stderr
    assert (tmp_path / "in" / "red" / "work" / "labs" / "ours.txt").read_text() == "kept\n"
    fix = re.search(r"python3 -m hosting (up .*), and `collect` again", refused.stderr)[1]
    hosted.host(*fix.split())
    hosted.host(*command)
    assert all((tmp_path / "in" / team / "report.html").exists() for team in ("red", "blue"))
