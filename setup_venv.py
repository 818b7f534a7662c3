"""Makes, updates or repairs .venv/ with the exact versions of requirements.lock; every target of the Makefile calls it.

Needs nothing but the standard library. ``.venv/ready`` is written last and holds the folder for which the environment
was made: where it is missing, a set-up was cut off, and where it says something else, the folder was moved. Both ask
for a new environment, for pip takes a half-copied package for a whole one. An update that fails on its own, without a
network, say, leaves the environment as it was.

Every file is checked against a SHA-256 before it is installed. Those of TORCH=cpu are not PyPI's files, so that the
lock says nothing about them: their hashes are in ``requirements-cpu.lock``, which ``make lock`` writes. While it is
missing or of other versions, the index itself is asked for them, over TLS, and what it stated at the first set-up is
remembered in ``.torch-cpu.lock``.
"""

import html.parser
import http.client
import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
READY, UPDATING = VENV / "ready", VENV / "updating"
PYTHON = VENV / "bin" / "python"
# Where TORCH=cpu finds builds of the same versions without CUDA, and what only the builds with CUDA want.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_LOCK, REMEMBERED = ROOT / "requirements-cpu.lock", ROOT / ".torch-cpu.lock"
PAGE_BYTES = 2**26
CUDA_PARTS = ("torch==", "torchvision==", "triton==", "nvidia-", "cuda-")


class RefusedError(Exception):
    """Why the builds without CUDA are not installed, and what to do."""


def is_usable() -> bool:
    """Whether the environment is whole, was made for this folder, and its Python still runs."""
    try:
        whole = READY.read_text(encoding="utf-8").strip() == str(ROOT)
        return whole and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def clear(folder: Path) -> None:
    """Makes an empty folder in the place of an unusable environment of ours."""
    mine = folder / "made-by-the-labs"
    if folder.is_symlink():
        sys.exit(f"{folder} is a link. Remove the link (rm {folder}), then run make again.")
    if folder.exists() and not mine.exists():
        sys.exit(f"{folder} was not made by these labs. Move it away, then run make again.")
    (folder / "ready").unlink(missing_ok=True)  # before all else: what is half removed must not be taken for whole
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mine.touch()  # at once, so that a set-up that is cut off here can be told from somebody's own folder


def make_environment() -> None:
    """Makes an empty environment in the place of an unusable one of ours."""
    clear(VENV)
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)


def without_cuda(lock: str) -> str:
    """The lock without the packages that come from CPU_INDEX, or that only CUDA wants."""
    entries = re.split(r"^(?=[A-Za-z])", lock, flags=re.MULTILINE)
    return "".join(entry for entry in entries if not entry.startswith(CUDA_PARTS))


def find_pins(lock: str) -> list[str]:
    """The exact versions of what comes from CPU_INDEX."""
    return re.findall(r"^(?:torch|torchvision)==[\d.]+", lock, flags=re.MULTILINE)


def find_index() -> str:
    """The address of the index of builds without CUDA."""
    return os.environ.get("TORCH_CPU_INDEX") or CPU_INDEX


def require_safe(url: str) -> None:
    """Refuses an address whose answer somebody on the way can change."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1")):
        raise RefusedError(f"The index of TORCH=cpu has to begin with https://, and {url} does not.")


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, file, code, message, headers, url):
        require_safe(url)
        return super().redirect_request(request, file, code, message, headers, url)


class _Links(html.parser.HTMLParser):
    """Collects the addresses of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.found += [value for name, value in attributes if tag == "a" and name == "href" and value]


def read_page(url: str) -> str:
    """Reads a page of an index; besides the system's authorities, pip's own are trusted, as pip does."""
    require_safe(url)
    context = ssl.create_default_context()
    for file in VENV.glob("lib/python*/site-packages/pip/_vendor/certifi/cacert.pem"):
        context.load_verify_locations(file)
    opener = urllib.request.build_opener(_Redirects, urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(urllib.request.Request(url, headers={"Accept": "text/html"}), timeout=60) as answer:
            return answer.read(PAGE_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RefusedError(f"The index {url} cannot be read: {str(error)!a}") from error


def read_hashes(index: str, pin: str) -> list[str]:
    """Every SHA-256 that an index states of the files of one version, for all platforms, with or without +cpu."""
    name, _, version = pin.partition("==")
    url = f"{index.rstrip('/')}/{name}/"
    links = _Links()
    links.feed(read_page(url))
    hashes, files = set(), 0
    for link in links.found:
        address, _, fragment = link.partition("#")
        file = urllib.parse.unquote(address).rpartition("/")[2]
        if re.fullmatch(rf"{name}-{re.escape(version)}(\+cpu)?-[^+]+\.whl", file):
            files += 1
            hashes |= set(re.findall(r"^sha256=([0-9a-f]{64})$", fragment))
    if not hashes:
        stated = "states no SHA-256 of" if files else "has no file of"
        raise RefusedError(f"The index {url} {stated} {pin}. The build with CUDA runs without a GPU, too: make setup")
    return sorted(hashes)


def lock_cpu_builds(pins: list[str]) -> str:
    """The requirements of the builds without CUDA, with the hashes that the index states."""
    lines = ["# The builds without CUDA: what their index stated. Made by `make lock`, or by the first TORCH=cpu."]
    for pin in pins:
        hashes = [f"    --hash=sha256:{value}" for value in read_hashes(find_index(), pin)]
        lines.append(" \\\n".join([pin, *hashes]))
    return "\n".join(lines) + "\n"


def install_cpu_builds(pins: list[str]) -> None:
    """Installs the builds without CUDA: with stored hashes, else with those that the index states."""
    known = [file for file in (CPU_LOCK, REMEMBERED) if file.exists() and find_pins(file.read_text("utf-8")) == pins]
    lock = known[0] if known else VENV / "torch-cpu.lock"
    require_safe(find_index())
    if not known:
        named = " and ".join(pins)
        print(f"Note: no hashes of {named} without CUDA are stored here (requirements-cpu.lock).", flush=True)
        print(f"They are taken from {find_index()}, and remembered in {REMEMBERED.name}.", flush=True)
        lock.write_text(lock_cpu_builds(pins), encoding="utf-8")
    try:
        install("--require-hashes", "--index-url", find_index(), "-r", lock)
    except subprocess.CalledProcessError:
        print(f"The hashes of the builds without CUDA are those in {lock}.", flush=True)
        raise
    if not known:
        lock.replace(REMEMBERED)  # whole or not at all


def install(*arguments: object, count: int = 0, python: Path = PYTHON) -> None:
    """Runs pip in the environment of a Python; versions and their needs are the lock's business, hence no dependencies.

    Says which of ``count`` packages it is at: on a terminal in one line, else in a line for every twentieth.
    """
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off", "--no-deps"]
    terminal, seen = sys.stdout.isatty(), 0
    with subprocess.Popen([*pip, *map(str, arguments)], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        for line in process.stdout:
            words = ""
            if found := re.match(r"(?:Collecting|Ignoring|Requirement already satisfied:) ([\w.-]+)", line):
                seen += 1
                words = f"{seen} of {count}: {found[1]}" if terminal or seen % 20 == 0 else ""
            elif line.startswith("Installing collected"):
                words = "all are here; unpacking them ..."
            if count and words:
                print(f"\r\033[K  {words}" if terminal else f"  {words}", end="" if terminal else "\n", flush=True)
    if count and terminal:
        print("\r\033[K", end="", flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, pip)


def install_all() -> None:
    """Installs the locked versions and then our own packages, as editable ones."""
    lock = ROOT / "requirements.lock"
    if os.environ.get("TORCH") == "cpu":
        text = lock.read_text(encoding="utf-8")
        install_cpu_builds(find_pins(text))
        lock = VENV / "without-cuda.lock"
        lock.write_text(without_cuda(text), encoding="utf-8")
    install("--require-hashes", "-r", lock, count=len(re.findall(r"^[\w.-]+==", lock.read_text("utf-8"), re.MULTILINE)))
    install("--no-build-isolation", "--editable", ROOT)
    settings = VENV / "share" / "jupyter" / "lab" / "settings"
    settings.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / "course" / "jupyterlab.json", settings / "overrides.json")


def write_cpu_lock() -> None:
    """Writes requirements-cpu.lock for the versions in requirements.lock."""
    try:
        text = lock_cpu_builds(find_pins((ROOT / "requirements.lock").read_text(encoding="utf-8")))
    except RefusedError as error:
        sys.exit(f"{error}\n{CPU_LOCK.name} is as it was.")
    draft = CPU_LOCK.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(CPU_LOCK)


def main(arguments: Sequence[str]) -> None:
    """Brings the environment up to date, and says so; ``lock-cpu`` writes requirements-cpu.lock instead."""
    if list(arguments) == ["lock-cpu"]:
        return write_cpu_lock()
    try:
        bring_up_to_date()
    except OSError as error:
        sys.exit(f"The environment cannot be made: {error.filename or ROOT}: {error.strerror}.")
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. Run make again to go on.")


def bring_up_to_date() -> None:
    """Installs into the environment that is there, or into a new one where there is none that can be used."""
    updating = is_usable()
    if not updating:
        make_environment()
        size = "" if os.environ.get("TORCH") == "cpu" else " and 6 GB"
        print(f"Setting up .venv (the first time about three minutes{size}) ...", flush=True)
    else:
        READY.rename(UPDATING)  # a rename keeps the file's time, by which make sees that there is something to do
        print("Updating .venv ...", flush=True)
    try:
        install_all()
    except (subprocess.CalledProcessError, RefusedError) as error:
        if updating:
            UPDATING.rename(READY)
        state = "as it was" if updating else "incomplete"
        why = error if isinstance(error, RefusedError) else "The packages could not be installed (pip says why above)."
        sys.exit(f"{why}\n.venv is {state}. Run make again to repeat it.")
    UPDATING.unlink(missing_ok=True)
    READY.write_text(f"{ROOT}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
