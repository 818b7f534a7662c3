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
from harness.containers import MACHINE, make_setup
from harness.drawn import assert_explains

from hosting import __main__ as hosting_main
from hosting import commands, handout
from hosting.__main__ import main
from hosting.deployment import Deployment, open_deployment, parse_settings, read_deployment
from hosting.engine import Engine, find_engine
from hosting.files import (
    BASE,
    CADDY,
    GPUS,
    NODES,
    make_base,
    make_gpus,
    write_files,
    write_tokens,
)
from hosting.settings import Settings, check_settings, load_settings, save_settings
from hosting.status import Standing, read_status, show_status
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
    "empty": ("", "empty"),
    "a header alone": ("team,gpus\n", "No team"),
    "another column": ("team,gpus,colour\nred,0,1\n", "no column 'colour'"),
    "a column twice": ("team,team\nred,red\n", "twice"),
    "no column of teams": ("gpus\n0\n", "team is missing"),
    "semicolons": ("team;gpus\nred;0 1\n", "not separated by commas"),
    "GPUs with a comma": ("team,gpus\nred,0,1\n", "3 fields"),
    "an open quote": ('team,gpus\n"red,0\n', "no CSV"),
    "not UTF-8": (b"team,gpus\nr\xe9d,0\n", "not UTF-8"),
    "a zero byte": ("team,gpus\nr\0d,0\n", "not a text file"),
    "no name": ("team,gpus\n,0\n", "no name"),
    "a quote": ("team,gpus\nred'; rm -rf,0\n", "cannot be the name"),
    "a path": ("team,gpus\n../red,0\n", "cannot be the name"),
    "a letter that looks like a": ("team,gpus\nteаm,0\n", "cannot be the name"),
    "upper case": ("team,gpus\nRed,0\n", "cannot be the name"),
    "two hyphens": ("team,gpus\nred--1,0\n", "cannot be the name"),
    "200 characters": (f"team,gpus\n{'r' * 200},0\n", "200 characters"),
    "a team twice": ("team,gpus\nred,0\nred,1\n", "twice"),
    "a GPU of two teams": ("team,gpus\nred,0 1\nblue,1\n", "two teams, red and blue"),
    "a GPU of two teams, written with a zero": ("team,gpus\nred,1\nblue,01\n", "two teams"),
    "a GPU twice": ("team,gpus\nred,0 0\n", "twice"),
    "a negative GPU": ("team,gpus\nred,-1\n", "no GPU"),
    "too many teams": ("team,gpus\n" + "".join(f"t{n},\n" for n in range(31)), "31 teams"),
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
        assert_explains(caught.value, str(path), "cp hosting/teams.example.csv")


def test_a_good_list_may_come_from_a_spreadsheet(write):
    text = "\ufeffTeam, GPUs\r\n# the left bench\r\nred,0 1\r\n\r\nblue-2\r\n"
    assert read_teams(write(text)) == [RED, BLUE]
    uuid = "GPU-0e1c4b4e-0000-4a5b-9a5c-aaaaaaaaaaaa"
    assert read_teams(write(f"gpus,team\n{uuid},x1\n"))[0].gpus == (uuid,)
    assert read_teams(write("team,gpus\nred,0\nblue,0\n"), share=True)[1].gpus == ("0",)
    assert [team.variable for team in (RED, BLUE)] == ["TOKEN_RED", "TOKEN_BLUE_2"]


def test_the_example_is_a_good_list(root):
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
    same = [Team("a", ("1",)), Team("b", ("GPU-bb",))]
    with pytest.raises(LabError, match="given to two teams, a and b"):
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


@pytest.mark.parametrize(
    "line, words",
    [
        ("TOKEN_RED=", "is empty"),
        ("TOKEN_RED=abc", "3 characters"),
        (f"TOKEN_RED={'r' * 40}&x=1", "signs that a URL would change"),
        (f"TOKEN_RED={'b' * 48}", "the same token"),
    ],
)
def test_a_bad_token_is_refused(tmp_path, line, words):
    path = tmp_path / "tokens.env"
    path.write_text(f"TOKEN_BLUE_2={'b' * 48}\n{line}\n")
    path.chmod(0o600)
    with pytest.raises(LabError, match=words):
        keep_tokens(tmp_path, [BLUE, RED])
    path.chmod(0o644)
    with pytest.raises(LabError, match="Others can read"):
        keep_tokens(tmp_path, [BLUE])


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"address": "https://labs.example.org"}, "no host name"),
        ({"bind": "everywhere"}, "no IP address"),
        ({"tls": "none", "bind": "0.0.0.0"}, "read the teams' tokens"),
        ({"tls": "auto", "address": "10.0.0.1", "bind": "0.0.0.0"}, "public names only"),
        ({"tls": "auto", "address": "labs.example.org", "bind": "127.0.0.1"}, "public names only"),
        ({"tls": "/nowhere"}, "cert.pem"),
        ({"port": 0}, "no such port"),
        ({"nodes": 3}, "one or two"),
        ({"data": "/nowhere/at/all"}, "not there"),
        ({"shm": "lots"}, "no size"),
        ({"memory": "100mb"}, "less than JupyterLab needs"),
        ({"cpus": "0"}, "no number"),
        ({"project": "../labs"}, "odd name"),
        ({"subdomains": True, "address": "10.0.0.1"}, "host names of their own"),
        ({"subdomains": True, "hub": True}, "host names of their own"),
    ],
)
def test_settings_that_are_unsafe_or_cannot_work_are_refused(bad, words):
    with pytest.raises(LabError) as caught:
        check_settings(Settings(**bad))
    assert words in caught.value.what
    assert_explains(caught.value)


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
    (pack / "manifest.json").unlink()
    with pytest.raises(LabError) as caught:
        check_settings(given)
    assert_explains(caught.value, "no packed data set", "fetch cinic10")


def test_settings_are_kept_and_a_broken_file_is_told(tmp_path):
    public = Settings(address="labs.example.org", port=443, bind="0.0.0.0", tls="auto")
    assert check_settings(public).url == "https://labs.example.org"
    assert Settings().url == "https://localhost:8443"
    assert Settings(tls="none", port=8080).url == "http://localhost:8080"
    with pytest.raises(LabError, match="No class was started"):
        load_settings(tmp_path)
    save_settings(public, tmp_path)
    assert load_settings(tmp_path) == public
    assert parse_settings(tmp_path, {"nodes": 1, "port": None}).nodes == 1
    for text in ("{", "[]", '{"port": "many"}'):
        (tmp_path / "settings.json").write_text(text)
        for read in (load_settings, lambda folder: parse_settings(folder, {"nodes": 2})):
            with pytest.raises(LabError, match="cannot be read"):
                read(tmp_path)


def test_a_class_whose_data_or_gpus_have_gone_can_be_ended(smi, write, tmp_path):
    """A driver that was upgraded, a disk that was not mounted: that is when an instructor collects and ends."""
    docker = smi.with_name("docker")
    docker.write_text("#!/bin/sh\n")
    docker.chmod(0o755)
    given = {"teams": str(write("team,gpus\nred,0\n")), "data": str(tmp_path / "data")}
    make_data(tmp_path / "data")
    started = read_deployment(tmp_path, parse_settings(tmp_path, given), engine="docker")
    save_settings(started.settings, tmp_path)
    shutil.rmtree(tmp_path / "data")
    smi.write_text("#!/bin/sh\nexit 18\n")
    assert open_deployment(tmp_path, engine="docker") == started
    for mend, words in ((lambda: make_data(tmp_path / "data"), "data folder"), (lambda: smi.write_text(""), "GPU 0")):
        for refused in (
            lambda: open_deployment(tmp_path, engine="docker", renew="red"),
            lambda: read_deployment(tmp_path, parse_settings(tmp_path, {}), engine="docker"),
        ):
            with pytest.raises(LabError, match=words):
                refused()
        mend()
    assert open_deployment(tmp_path, engine="docker") == started, "the token is as it was"


def test_a_later_command_may_come_from_another_folder(tmp_path, monkeypatch):
    make_data(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    made = parse_settings(tmp_path, {"teams": "teams.csv", "data": "data", "tls": "internal"})
    assert (made.teams, made.data, made.tls) == (f"{tmp_path}/teams.csv", f"{tmp_path}/data", "internal")


def test_only_the_front_is_published_and_no_container_has_more_rights_than_it_needs():
    base = make_base([RED, BLUE], Settings(), "caddy", make_setup([RED, BLUE]))
    red, blue, front = (base["services"][name] for name in ("red-node0", "blue-2-node0", "front"))
    assert red["networks"] == {"red": {"aliases": ["node0"]}} and list(blue["networks"]) == ["blue-2"]
    assert red["volumes"] == ["red-work:/home/learner/work", "./tokens/red:/srv/token:ro"]
    assert "env_file" not in json.dumps(base), "podman-compose puts what is in there on a command line"
    for lab in (red, blue):
        assert "ports" not in lab and "privileged" not in lab and "network_mode" not in lab
        assert lab["cap_drop"] == ["ALL"] and "cap_add" not in lab
    assert front["ports"] == ["127.0.0.1:8443:8443"]
    assert front["cap_drop"] == ["ALL"] and front["cap_add"] == ["NET_BIND_SERVICE"]
    assert all("driver_opts" not in network for network in base["networks"].values())
    podman = make_base([RED], Settings(), "caddy", make_setup([RED], podman=True))
    assert podman["networks"]["red"]["driver_opts"] == {"isolate": "true"}


def test_no_token_is_in_any_file_but_the_one_of_tokens(tmp_path):
    tokens = keep_tokens(tmp_path, [RED, BLUE])
    write_files(tmp_path, [RED, BLUE], Settings(), make_setup([RED, BLUE], tokens=tokens))
    save_settings(Settings(), tmp_path)
    sheet = handout.write_handout(tmp_path, [RED, BLUE], tokens, Settings())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    holders = {path for path in files for token in tokens.values() if token in path.read_text()}
    names = {"tokens.env", "handout.html", "tokens/red", "tokens/blue-2"}
    assert {str(path.relative_to(tmp_path)) for path in holders} == names
    # The container's user has to read its own; nobody else gets so far.
    assert stat.S_IMODE((tmp_path / "tokens").stat().st_mode) == 0o700
    assert stat.S_IMODE(sheet.stat().st_mode) == 0o600
    assert "https://localhost:8443/blue-2/" in sheet.read_text() and "2 GPUs; two nodes" in sheet.read_text()


def test_gpus_are_given_by_their_ids_and_only_to_their_team():
    overlay = make_gpus([RED, BLUE], Settings())["services"]
    assert list(overlay) == ["red-node0", "red-node1"]
    devices = [node["deploy"]["resources"]["reservations"]["devices"] for node in overlay.values()]
    assert [device["device_ids"] for (device,) in devices] == [["0", "1"], ["1"]]
    for (device,) in devices:
        assert device["capabilities"] == ["gpu"] and "count" not in device
    assert overlay["red-node0"]["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    one = make_gpus([Team("one", ("3",))], Settings(nodes=1))["services"]
    assert list(one) == ["one-node0"]


def test_files_are_written_when_they_change_and_no_other(tmp_path):
    def write(teams, settings=None, image_id="one"):
        found = write_files(tmp_path, teams, settings or Settings(), make_setup(teams, settings, image_id=image_id))
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        return [path.name for path in found], {path.name: path.stat().st_mtime_ns for path in files}

    names, times = write([RED, BLUE])
    assert names == [BASE, NODES, GPUS]
    assert write([RED, BLUE]) == (names, times)
    assert write([RED, BLUE], image_id="another")[1] != times, "an image that was built anew"
    names, fewer = write([BLUE], Settings(nodes=1))
    assert names == [BASE] and set(fewer) == {BASE, CADDY, "blue-2"}, "nothing of before stays, no token either"


def test_an_engine_is_named_that_is_missing_silent_or_without_compose(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match="docker is not installed; podman is not installed"):
        find_engine(tmp_path)
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\n[ $1 = info ] && echo 'Cannot connect' >&2 && exit 1\n")
    program.chmod(0o755)
    with pytest.raises(LabError, match="docker info: Cannot connect"):
        find_engine(tmp_path, wanted="docker")
    program.write_text("#!/bin/sh\n[ $1 = info ]\n")
    with pytest.raises(LabError, match="docker has no Compose"):
        find_engine(tmp_path, wanted="docker")
    program.write_text("#!/bin/sh\nexit 0\n")
    assert find_engine(tmp_path).compose == ("docker", "compose")


def test_what_compose_said_is_told_and_logged(tmp_path):
    program = tmp_path / "compose"
    program.write_text('#!/bin/sh\necho "$PROJECT"\necho "no space left on device" >&2\nexit 17\n')
    program.chmod(0o755)
    engine = Engine("docker", (str(program),), tmp_path)
    with pytest.raises(LabError) as caught:
        engine.run_compose([tmp_path / BASE], "up", "-d", variables={"PROJECT": "by the environment"})
    assert_explains(caught.value, "exit status 17", "no space left on device", "engine.log")
    log = (tmp_path / "engine.log").read_text()
    assert "by the environment\n" in log and "-f" in log


def test_the_command_line_refuses_before_it_starts_anything(write, tmp_path, capsys):
    state = ["--state", str(tmp_path / "state")]
    assert main([*state, "up", str(write("team,gpus\nred,99\n"))]) == 1
    assert "GPU 99, which this machine does not have" in capsys.readouterr().err
    assert main([*state, "up", str(write("team,gpus\nred\n")), "--tls", "none", "--bind", "0.0.0.0"]) == 1
    assert "read the teams' tokens" in capsys.readouterr().err
    assert main([*state, "status"]) == 1
    assert "No class was started here" in capsys.readouterr().err
    assert main([*state, "up", str(write("team,gpus\nred\nlabs-red\n"))]) == 1
    assert "labs-red can be taken for another team's container" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("command", hosting_main.CHANGES)
def test_one_command_at_a_time_changes_a_class(tmp_path, command, capsys):
    state, team = tmp_path / "state", ["red"] * (command in ("rotate", "reset", "restart"))
    state.mkdir()
    (state / "kept").touch()
    with hold_folder(state, "It is taken"):
        assert main(["--state", str(state), command, *team]) == 1
    assert "Another command is changing this class" in capsys.readouterr().err
    assert main(["--state", str(state), command, *team]) == 1
    assert "Another command" not in capsys.readouterr().err, "it ended with the command that held it"


def test_a_folder_in_place_of_a_token_is_mended(tmp_path):
    """Docker makes one if a file that it is to mount is missing."""
    for name in ("red", "green"):
        (tmp_path / "tokens" / name).mkdir(parents=True)
    write_tokens(tmp_path / "tokens", {"red": "r" * 48})
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["red"]
    assert (tmp_path / "tokens" / "red").read_text() == "r" * 48


def test_a_new_token_ends_what_ran_on_both_nodes(two, tmp_path):
    """A program on node1 can enter node0 by the keys of the nodes."""
    program = tmp_path / "engine"
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n')
    deployment = replace(two, tokens={"red": "r" * 48, "blue": "b" * 48}, shares=make_setup(two.teams).shares)
    deployment = replace(deployment, engine=replace(two.engine, compose=(str(program), "compose")))
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
    labs = ((3, 3), (0, 4), (1, 3))
    rows = [
        Standing(RED, ("running", "exited"), True, ("GPU 0: 97 %, 100 of 81559 MiB",), 12_000_000, 9 * 10**9, labs),
        Standing(BLUE, ("absent", "absent"), False),
    ]
    header, red, blue = show_status(rows).splitlines()
    assert red.split("  ")[0] == "red" and "running exited" in red and "yes" in red and "12 MB (9 GB free)" in red
    assert "0:3/3 2:1/3" in red and "97 %" in red
    assert "NO" in blue and "none yet" in blue and blue.endswith("none")
    assert header.index("containers") == red.index("running") == blue.index("absent")


GOOD = {"used": 12_000_000, "free": 9_000_000_000, "labs": [[3, 3], [0, 4]]}
ANSWERS = {
    "a list": "[]",
    "nothing": "",
    "terminal escapes": "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m",
    "10,000 deep": "[" * 10_000 + "]" * 10_000,
    "no labs": json.dumps(GOOD | {"labs": None}),
    "labs of three": json.dumps(GOOD | {"labs": [[1, 2, 3]]}),
    "numbers as text": json.dumps(GOOD | {"labs": [["\x1b[2J", 3]]}),
    "more solved than there are": json.dumps(GOOD | {"labs": [[4, 3]]}),
    "a thousand labs": json.dumps(GOOD | {"labs": [[1, 3]] * 1000}),
    "used as text": json.dumps(GOOD | {"used": "\x1b[2J"}),
    "not a number": json.dumps(GOOD | {"free": float("nan")}),
    "true": json.dumps(GOOD | {"used": True}),
    "thousands of digits": json.dumps(GOOD).replace("12000000", "9" * 5000),
    "without end": "endless",
    "half a character": '{"used": "\\ud800"}',
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
    assert said.returncode == -9 and not said.stdout and "bytes" in said.stderr
    said = engine.ask("sleep", timeout=0.5)
    assert said.returncode == 124 and "no answer within 0.5 s" in said.stderr
    assert time.monotonic() - begun < 20


def test_what_a_terminal_would_obey_is_not_printed(two, tmp_path, monkeypatch, capsys):
    """In an error, in what went well, and in the log that an error names."""
    evil = "\x1b[2J\x1b]0;owned\x07\u202e"

    def fail(chosen):
        raise LabError("It failed.", where=evil, cause=evil, fix=evil)

    monkeypatch.setattr("hosting.__main__.run", fail)
    assert main(["status"]) == 1
    said = capsys.readouterr()
    assert "It failed." in said.err and "\x1b" not in said.err and "\u202e" not in said.err
    (tmp_path / "answer").write_text(f"{evil} in the log\n" * 3)
    assert evil in commands.read_logs(two, "labs-red-node0"), "it is cleaned where it is printed"
    hosting_main.say(commands.read_logs(two, "labs-red-node0"))
    said = capsys.readouterr().out
    assert said.count("in the log") == 3 and "\x1b" not in said and "\u202e" not in said
    for name in ("--follow", "labs-../x", "other"):
        with pytest.raises(LabError, match="no log of"):
            commands.read_logs(two, name)
    two.engine.run("logs", "labs-red-node0")
    log = (tmp_path / "engine.log").read_text()
    assert log.count("in the log") == 3 and "\x1b" not in log and "\u202e" not in log


WELL = b'HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n{"version": "2.21"}'
PAGES = {
    "well": WELL,
    "a number": b"HTTP/1.1 200 OK\r\n\r\n5",
    "10,000 deep": b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 10_000,
    "no HTTP": b"\x1b[2J",
    "elsewhere": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:%d/hit\r\n\r\n",
    "without end": b"endless",
    "drop by drop": b"drip",
}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_whatever_a_team_s_server_answers_it_is_up_or_it_is_not(monkeypatch, page):
    """A team can put any server in JupyterLab's place; `status` and `up` ask it through the front."""
    monkeypatch.setattr("hosting.commands.PAGE_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, asked, ended = server.getsockname()[1], [], threading.Event()
        server.settimeout(20)

        def serve():
            with contextlib.suppress(OSError):
                while not ended.is_set():
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        asked.append(connection.recv(4096))
                        connection.sendall(
                            page.replace(b"%d", b"%d" % port) if len(page) > 9 else b"HTTP/1.1 200 OK\r\n\r\n"
                        )
                        while page in (b"endless", b"drip") and not ended.wait(0.002 if page == b"drip" else 0):
                            connection.sendall(b"x" * (1 if page == b"drip" else 1 << 16))

        thread = threading.Thread(target=serve)
        thread.start()
        begun = time.monotonic()
        try:
            assert commands.is_served(Settings(tls="none", port=port), Team("red")) is (page == WELL)
            # What comes fast is given up at its length, and what comes slowly at its time.
            assert time.monotonic() - begun < (5 if page == b"drip" else 1.5)
            assert len(asked) == 1 and asked[0].startswith(b"GET /red/api "), "it is not sent elsewhere"
        finally:
            ended.set()
            socket.create_connection(("127.0.0.1", port)).close()
            thread.join()
