"""Hosting without an engine: what is refused before anything starts, and what Compose and Caddy are given."""

import contextlib
import json
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from harness.containers import MACHINE, make_deployment
from harness.drawn import assert_explains

from hosting import commands, handout
from hosting.__main__ import CHANGES, main, parse_arguments
from hosting.compose import make_compose, write_files
from hosting.deployment import Deployment, merge_settings, read_deployment
from hosting.engine import Engine, find_engine
from hosting.settings import Settings, check_settings, load_settings, save_settings
from hosting.status import TeamStatus, read_status, show_status
from hosting.teams import Team, check_gpus, find_gpus, read_teams
from hosting.tokens import keep_tokens
from lab_common import LabError
from lab_common.files import hold_folder

RED, BLUE = Team("red", ("0", "1")), Team("blue-2")


@pytest.fixture
def write(tmp_path):
    def run(content, name="teams.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return run


BAD = {
    "empty": ("", "first line"),
    "a header alone": ("team,gpus\n", "1 to 30 teams"),
    "another column": ("team,gpus,colour\nred,0,1\n", "first line"),
    "semicolons": ("team;gpus\nred;0 1\n", "first line"),
    "GPUs with a comma": ("team,gpus\nred,0,1\n", "3 fields"),
    "an open quote": ('team,gpus\n"red,0\n', "cannot be read"),
    "not UTF-8": (b"team,gpus\nr\xe9d,0\n", "cannot be read"),
    "a path": ("team,gpus\n../red,0\n", "cannot be the name"),
    "a letter that looks like a": ("team,gpus\nteаm,0\n", "cannot be the name"),
    "33 characters": (f"team,gpus\n{'r' * 33},0\n", "cannot be the name"),
    "a path of the hub": ("team,gpus\nhub,0\n", "cannot be the name"),
    "another team's container": ("team,gpus\nred\nlabs-red\n", "cannot be the name"),
    "a team twice": ("team,gpus\nred,0\nred,1\n", "twice"),
    "too many teams": ("team,gpus\n" + "".join(f"t{n},\n" for n in range(31)), "not 31"),
}


@pytest.mark.parametrize("content, words", BAD.values(), ids=BAD)
def test_a_bad_list_of_teams_is_refused_in_words(write, content, words):
    with pytest.raises(LabError) as caught:
        read_teams(write(content))
    assert words in caught.value.what
    assert_explains(caught.value, "teams.csv")
    assert caught.value.what.isprintable(), "what came from the file is shown in ASCII"


def test_a_list_that_is_not_there_or_no_file(tmp_path):
    for path in (tmp_path / "absent.csv", tmp_path):
        with pytest.raises(LabError) as caught:
            read_teams(path)
        assert_explains(caught.value, str(path), "hosting/teams.example.csv")


def test_a_good_list_may_come_from_a_spreadsheet(write, root):
    assert read_teams(write("\ufeffTeam, GPUs\r\nred,00 1\r\n\r\nblue-2\r\n")) == [RED, BLUE]
    assert read_teams(write("gpus,team\nGPU-0e1c4b4e,x1\n"))[0].gpus == ("GPU-0e1c4b4e",)
    assert [team.variable for team in (RED, BLUE)] == ["TOKEN_RED", "TOKEN_BLUE_2"]
    assert len(read_teams(root / "hosting" / "teams.example.csv")) == 2


LISTED = """GPU 0: NVIDIA H100 (UUID: GPU-aa)
  MIG 3g.40gb     Device  0: (UUID: MIG-cc)
GPU 1: NVIDIA H100 (UUID: GPU-bb)
"""


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """An nvidia-smi that lists two GPUs, one of them with an instance."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] || exit 1\ncat <<'EOF'\n{LISTED}EOF\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return program


def test_gpus_are_those_that_nvidia_smi_lists(smi, tmp_path):
    there = find_gpus()
    assert there == {"0": "GPU-aa", "GPU-aa": "GPU-aa", "MIG-cc": "MIG-cc", "1": "GPU-bb", "GPU-bb": "GPU-bb"}
    check_gpus([RED, Team("mig", ("MIG-cc",))], there, path=tmp_path)
    with pytest.raises(LabError) as caught:
        check_gpus([RED, Team("green", ("7",))], there, path=tmp_path)
    assert_explains(caught.value, "green", "GPU 7", "it has 0, 1")
    with pytest.raises(LabError, match="given twice, to red and red"):
        check_gpus([Team("red", ("0", "0"))], there, path=tmp_path)
    same = [Team("a", ("1",)), Team("b", ("GPU-bb",))]
    with pytest.raises(LabError, match="given twice, to a and b"):
        check_gpus(same, there, path=tmp_path)
    check_gpus(same, there, path=tmp_path, share=True)
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert find_gpus() == {}


def test_tokens_are_made_once_kept_and_private(tmp_path):
    first = keep_tokens(tmp_path, [RED])
    both = keep_tokens(tmp_path, [RED, BLUE])
    assert both["red"] == first["red"] and len(set(both.values())) == 2
    assert all(len(token) == 48 for token in both.values())
    path = tmp_path / "tokens.env"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.stat().st_mtime_ns
    assert keep_tokens(tmp_path, [RED, BLUE]) == both and path.stat().st_mtime_ns == before
    assert keep_tokens(tmp_path, [BLUE]) == {"blue-2": both["blue-2"]}
    assert keep_tokens(tmp_path, [RED, BLUE]) == both, "a team that comes back has its token"
    renewed = keep_tokens(tmp_path, [RED, BLUE], renew="red")
    assert renewed["red"] != both["red"] and renewed["blue-2"] == both["blue-2"]


@pytest.mark.parametrize("line", ["TOKEN_RED=", "TOKEN_RED=abc", f"TOKEN_RED={'r' * 40}&x=1", "red"])
def test_a_bad_token_is_refused(tmp_path, line):
    path = tmp_path / "tokens.env"
    path.write_text(f"TOKEN_BLUE_2={'b' * 48}\n{line}\n")
    with pytest.raises(LabError) as caught:
        keep_tokens(tmp_path, [BLUE, RED])
    assert_explains(caught.value, "tokens.env, line 2")


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"tls": "none", "bind": "0.0.0.0"}, "read the teams' tokens"),
        ({"tls": "auto", "address": "10.0.0.1", "bind": "0.0.0.0"}, "public names only"),
        ({"tls": "auto", "address": "labs.example.org", "bind": "127.0.0.1"}, "public names only"),
        ({"tls": "/nowhere"}, "cert.pem"),
        ({"data": "/nowhere/at/all"}, "no packed data set"),
        ({"subdomains": True, "address": "10.0.0.1"}, "host names of their own"),
        ({"subdomains": True, "hub": True}, "host names of their own"),
    ],
)
def test_settings_that_are_unsafe_or_cannot_work_are_refused(bad, words):
    with pytest.raises(LabError) as caught:
        check_settings(Settings(**bad))
    assert words in caught.value.what
    assert_explains(caught.value)


def test_options_are_read_where_they_are_given(capsys):
    read = parse_arguments(
        ["up", "--memory=6gb", "--shm=512m", "--cpus=1.5", "--bind=::1", "--address=labs.example.org"]
    )
    assert (read.memory, read.shm, read.cpus, str(read.bind)) == (6 << 30, 512 << 20, 1.5, "::1")
    assert parse_arguments(["up", "--memory=auto", "--cpus=auto"]).memory == 0
    for bad in ("--memory=lots", "--cpus=0", "--bind=everywhere", "--address=https://labs.example.org", "--nodes=3"):
        with pytest.raises(SystemExit):
            parse_arguments(["up", bad])
        assert bad.partition("=")[0] in capsys.readouterr().err.splitlines()[-1]


def make_data(folder):
    pack = folder / "packed" / "cinic10"
    pack.mkdir(parents=True)
    for name in ("manifest.json", "train-images.npy"):
        (pack / name).touch()
        (pack / name).chmod(0o644)
    for place in (pack, pack.parent, folder):
        place.chmod(0o755)
    return pack


def test_data_that_the_teams_could_not_use_are_refused(tmp_path):
    given = Settings(data=str(tmp_path / "data"))
    pack = make_data(tmp_path / "data")
    check_settings(given)
    for path in (pack / "train-images.npy", pack, tmp_path / "data"):
        mode = path.stat().st_mode
        path.chmod(mode & ~0o005)
        with pytest.raises(LabError) as caught:
            check_settings(given)
        assert_explains(caught.value, "cannot read", str(path), "chmod -R a+rX")
        path.chmod(mode)
    check_settings(given)


def test_settings_are_kept_and_a_later_command_may_come_from_another_folder(tmp_path, monkeypatch):
    assert Settings(address="labs.example.org", port=443).url == "https://labs.example.org"
    assert Settings().url == "https://localhost:8443"
    assert Settings(tls="none", port=8080).url == "http://localhost:8080"
    with pytest.raises(LabError, match="No class was started"):
        load_settings(tmp_path)
    monkeypatch.chdir(tmp_path)
    made = merge_settings(tmp_path, {"teams": "teams.csv", "data": "data", "tls": "internal", "nodes": None})
    assert (made.teams, made.data, made.tls) == (f"{tmp_path}/teams.csv", f"{tmp_path}/data", "internal")
    save_settings(made, tmp_path)
    assert load_settings(tmp_path) == made
    assert merge_settings(tmp_path, {"hub": True}) == replace(made, hub=True, nodes=1)


def test_a_class_whose_data_or_gpus_have_gone_can_be_ended(smi, write, tmp_path):
    """A driver that was upgraded, a disk that was not mounted: that is when an instructor collects and ends."""
    docker = smi.with_name("docker")
    docker.write_text("#!/bin/sh\n")
    docker.chmod(0o755)
    given = {"teams": str(write("team,gpus\nred,0\n")), "data": str(tmp_path / "data")}
    make_data(tmp_path / "data")
    started = read_deployment(tmp_path, merge_settings(tmp_path, given), engine="docker")
    save_settings(started.settings, tmp_path)
    shutil.rmtree(tmp_path / "data")
    smi.write_text("#!/bin/sh\nexit 18\n")
    stored = load_settings(tmp_path)
    assert read_deployment(tmp_path, stored, engine="docker", starts=False) == started
    for mend, words in ((lambda: make_data(tmp_path / "data"), "data folder"), (lambda: smi.write_text(""), "GPU 0")):
        with pytest.raises(LabError, match=words):
            read_deployment(tmp_path, stored, engine="docker", renew="red")
        mend()
    assert read_deployment(tmp_path, stored, engine="docker", starts=False) == started, "the token is as it was"


def test_only_the_front_is_published_and_no_container_has_more_rights_than_it_needs(tmp_path, monkeypatch):
    deployment = make_deployment(tmp_path, [RED, BLUE], Settings(guarded=True))
    made = make_compose(deployment, "caddy")
    services = made["services"]
    red, blue, front, guard = (services[name] for name in ("red-node0", "blue-2-node0", "front", "guard"))
    assert red["networks"] == {"red": {"aliases": ["node0"]}} and list(blue["networks"]) == ["blue-2"]
    assert red["volumes"] == ["red-keys:/srv/keys", "red-work:/home/learner/work", "./tokens/red:/srv/token:ro"]
    assert red["environment"]["LAB_NODES"] == "node0,node1" and red["environment"]["LAB_GUARDED"] == "1"
    assert "env_file" not in json.dumps(made), "podman-compose puts what is in there on a command line"
    for lab in (red, blue, services["red-node1"]):
        assert "ports" not in lab and "privileged" not in lab and "network_mode" not in lab
        assert lab["cap_drop"] == ["ALL"] and "cap_add" not in lab
    assert front["ports"] == ["127.0.0.1:8443:8443"]
    assert front["cap_drop"] == ["ALL"] and front["cap_add"] == ["NET_BIND_SERVICE"]
    assert (guard["network_mode"], guard["cap_drop"], guard["cap_add"]) == ("host", ["ALL"], ["NET_ADMIN"])
    assert "volumes" not in guard and guard["read_only"] and guard["restart"] == "always"
    assert all("driver_opts" not in network for network in made["networks"].values())
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/podman/podman.sock")
    assert make_compose(deployment, "caddy")["networks"]["red"]["driver_opts"] == {"isolate": "true"}


def test_no_token_is_in_any_file_but_the_one_of_tokens(tmp_path):
    tokens = keep_tokens(tmp_path, [RED, BLUE])
    deployment = replace(make_deployment(tmp_path, [RED, BLUE]), tokens=tokens)
    write_files(deployment)
    save_settings(Settings(), tmp_path)
    sheet = handout.write_handout(tmp_path, [RED, BLUE], tokens, Settings())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    holders = {path for path in files for token in tokens.values() if token in path.read_text()}
    names = {"tokens.env", "handout.html", "tokens/red", "tokens/blue-2"}
    assert {str(path.relative_to(tmp_path)) for path in holders} == names
    # The container's user has to read its own; nobody else gets so far.
    assert stat.S_IMODE((tmp_path / "tokens").stat().st_mode) == 0o700
    assert stat.S_IMODE(sheet.stat().st_mode) == 0o600
    assert "https://localhost:8443/blue-2/" in sheet.read_text() and "GPUs: 2; nodes: 2" in sheet.read_text()
    write_files(replace(deployment, teams=[BLUE], tokens={"blue-2": tokens["blue-2"]}))
    assert not (tmp_path / "tokens" / "red").exists(), "a team that has left"


def test_gpus_are_given_by_their_ids_and_only_to_their_team(tmp_path):
    services = make_compose(make_deployment(tmp_path, [RED, BLUE]), "")["services"]
    given = {name: service["deploy"] for name, service in services.items() if "deploy" in service}
    assert list(given) == ["red-node0", "red-node1"]
    devices = [deploy["resources"]["reservations"]["devices"] for deploy in given.values()]
    assert [device["device_ids"] for (device,) in devices] == [["0", "1"], ["1"]]
    for (device,) in devices:
        assert device["capabilities"] == ["gpu"] and "count" not in device
    assert services["red-node0"]["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    one = make_compose(make_deployment(tmp_path, [Team("one", ("3",))], Settings(nodes=1)), "")["services"]
    assert list(one) == ["front", "one-node0"] and "deploy" in one["one-node0"]


def test_an_engine_is_named_that_is_missing_silent_or_without_compose(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match="docker info: not installed; podman info: not installed"):
        find_engine(tmp_path)
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\n[ $1 = info ] && echo 'Cannot connect' >&2 && exit 1\n")
    program.chmod(0o755)
    with pytest.raises(LabError, match="docker info: Cannot connect"):
        find_engine(tmp_path, wanted="docker")
    program.write_text("#!/bin/sh\n[ $1 = info ]\n")
    with pytest.raises(LabError, match="docker compose version: failed"):
        find_engine(tmp_path, wanted="docker")
    program.write_text("#!/bin/sh\nexit 0\n")
    assert find_engine(tmp_path).compose == ("docker", "compose")


def test_what_compose_said_is_told_and_logged(tmp_path):
    program = tmp_path / "compose"
    program.write_text('#!/bin/sh\necho "no space left on device" >&2\nexit 17\n')
    program.chmod(0o755)
    engine = Engine("docker", (str(program),), tmp_path)
    with pytest.raises(LabError) as caught:
        engine.run_compose("labs", [tmp_path / "compose.json"], "up", "-d")
    assert_explains(caught.value, "exit status 17", "no space left on device", "engine.log")
    assert "-p labs -f" in (tmp_path / "engine.log").read_text()


def test_the_command_line_refuses_before_it_starts_anything(write, tmp_path, capsys):
    state = ["--state", str(tmp_path / "state")]
    assert main([*state, "up", str(write("team,gpus\nred,99\n"))]) == 1
    assert "GPU 99, which this machine does not have" in capsys.readouterr().err
    assert main([*state, "up", str(write("team,gpus\nred\n")), "--tls", "none", "--bind", "0.0.0.0"]) == 1
    assert "read the teams' tokens" in capsys.readouterr().err
    assert main([*state, "status"]) == 1
    assert "No class was started here" in capsys.readouterr().err
    assert not list((tmp_path / "state").iterdir())


@pytest.mark.parametrize("command", sorted({*CHANGES} - {"build"}))
def test_one_command_at_a_time_changes_a_class(tmp_path, command, capsys):
    state, team = tmp_path / "state", ["red"] * (command in ("rotate", "reset", "restart"))
    state.mkdir()
    with hold_folder(state, "It is taken"):
        assert main(["--state", str(state), command, *team]) == 1
    assert "Another command is changing this class" in capsys.readouterr().err
    assert main(["--state", str(state), command, *team]) == 1
    assert "Another command" not in capsys.readouterr().err, "it ended with the command that held it"


def test_a_new_token_ends_what_ran_on_both_nodes(two, tmp_path):
    """A program on node1 can enter node0 by the keys of the nodes."""
    program = tmp_path / "engine"
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n')
    engine = replace(two.engine, compose=(str(program), "compose"))
    deployment = replace(make_deployment(tmp_path, two.teams), engine=engine)
    commands.rotate(deployment, two.teams[0])
    said = (tmp_path / "asked").read_text().splitlines()
    order = [line.rpartition(" up ")[2] or line for line in said if line.split()[0] in ("stop", "start", "compose")]
    assert order[0] == "stop -t 2 labs-red-node1" and order[-1] == "start labs-red-node1"
    assert order[1].endswith("-d red-node0") and len(order) == 3


def test_it_runs_without_the_packages_of_the_labs(root):
    """An instructor's machine has Python and an engine; nothing is installed for this."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'yaml', 'nbformat'])); import hosting.__main__"
    )
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path[0:0] = ['{root}']\n{code}"])
    assert ended.returncode == 0


def test_the_status_is_a_line_per_team():
    rows = [
        TeamStatus(RED, ("running", "exited"), True, "12 MB (9 GB free)", "0:3/3 2:1/3"),
        TeamStatus(BLUE, ("absent", "absent"), False),
    ]
    header, red, blue = show_status(rows).splitlines()
    assert red.split("  ")[0] == "red" and "running exited" in red and "yes" in red and "12 MB (9 GB free)" in red
    assert "0:3/3 2:1/3" in red and red.endswith("0 1")
    assert "NO" in blue and "none yet" not in blue and blue.endswith("none")
    assert header.index("containers") == red.index("running") == blue.index("absent")


GOOD = {"used": 12_000_000, "free": 9_000_000_000, "labs": [[3, 3], [0, 4]]}
ANSWERS = {
    "a list": "[]",
    "nothing": "",
    "terminal escapes": "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m",
    "10,000 deep": "[" * 10_000 + "]" * 10_000,
    "no labs": json.dumps(GOOD | {"labs": None}),
    "numbers as text": json.dumps(GOOD | {"labs": [["\x1b[2J", 3]]}),
    "more solved than there are": json.dumps(GOOD | {"labs": [[4, 3]]}),
    "a thousand labs": json.dumps(GOOD | {"labs": [[1, 3]] * 1000}),
    "not a number": json.dumps(GOOD | {"free": float("nan")}),
    "thousands of digits": json.dumps(GOOD).replace("12000000", "9" * 5000),
    "without end": "endless",
}


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A class of two teams; what red's container prints is in the file ``answer``, and blue's answers well."""
    program = tmp_path / "engine"
    program.write_text(f"""#!/bin/sh
case "$*" in
  inspect*) echo running;;
  *labs-red-*) if grep -q '^endless' {tmp_path}/answer; then yes '['; else cat {tmp_path}/answer; fi;;
  *) echo '{json.dumps(GOOD)}';;
esac""")
    program.chmod(0o755)
    monkeypatch.setattr("hosting.status.is_served", lambda settings, team: True)
    engine = Engine(str(program), (), tmp_path)
    return Deployment(tmp_path, Settings(), [Team("red"), Team("blue")], {}, engine, MACHINE, {})


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_team_s_odd_answer_is_named_and_the_others_are_shown(two, tmp_path, answer):
    (tmp_path / "answer").write_text(answer, errors="surrogatepass")
    standings = read_status(two)
    said = show_status(standings)
    red, blue = said.splitlines()[1:]
    assert "odd answer" in red and "running" in red and blue.startswith("blue") and "12 MB (9 GB free)" in blue
    assert "odd" not in blue and "0:3/3" in blue
    assert all(line.isprintable() for line in said.splitlines()) and max(map(len, said.splitlines())) < 200


def test_answers_are_read_up_to_a_bound_of_bytes_and_time(tmp_path):
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\n$1 600 &\n$1 600\n")
    program.chmod(0o755)
    engine, begun = Engine(str(program), (), tmp_path), time.monotonic()
    said = engine.ask("yes", timeout=60)
    assert said.returncode == -9 and len(said.stdout) == 1 << 20 and "bytes" in said.stderr
    said = engine.ask("sleep", timeout=0.5)
    assert said.returncode == -9 and "no answer within 0.5 s" in said.stderr
    assert time.monotonic() - begun < 20


def test_what_a_terminal_would_obey_is_not_printed(two, tmp_path, monkeypatch, capsys):
    """In an error, and in what went well."""
    evil = "\x1b[2J\x1b]0;owned\x07\u202e"

    def fail(chosen):
        raise LabError("It failed.", where=evil, cause=evil, fix=evil)

    monkeypatch.setattr("hosting.__main__.run", fail)
    assert main(["status"]) == 1
    said = capsys.readouterr()
    assert "It failed." in said.err and "\x1b" not in said.err and "\u202e" not in said.err
    (tmp_path / "answer").write_text(f"{evil} in the log\n" * 3)
    assert evil in commands.read_logs(two, "labs-red-node0"), "it is cleaned where it is printed"
    commands.say(commands.read_logs(two, "labs-red-node0"))
    said = capsys.readouterr().out
    assert said.count("in the log") == 3 and "\x1b" not in said and "\u202e" not in said
    for name in ("--follow", "labs-../x", "other"):
        with pytest.raises(LabError, match="no log of"):
            commands.read_logs(two, name)


PAGES = {
    "well": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "no HTTP": b"\x1b[2J",
    "elsewhere": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/hit\r\n\r\n",
    "drop by drop": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000,
}


@pytest.mark.parametrize("kind", PAGES)
def test_whatever_a_team_s_server_answers_it_is_up_or_it_is_not(monkeypatch, kind):
    """A team can put any server in JupyterLab's place; `status` and `up` ask it through the front."""
    monkeypatch.setattr("hosting.commands.PAGE_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                assert connection.recv(4096).startswith(b"GET /red/api ")
                drops = kind == "drop by drop"
                for number in range(0, len(PAGES[kind]), 1 if drops else 100):
                    connection.sendall(PAGES[kind][number : number + (1 if drops else 100)])
                    time.sleep(0.1 * drops)

        thread = threading.Thread(target=serve)
        thread.start()
        begun, port = time.monotonic(), server.getsockname()[1]
        assert commands.is_served(Settings(tls="none", port=port), Team("red")) is (kind == "well")
        assert time.monotonic() - begun < 5
        thread.join()
