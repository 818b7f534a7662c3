"""`make setup` on a toy lock: cut off, moved, broken, offline, in a folder with a space in its name."""

import hashlib
import http.server
import os
import re
import runpy
import shutil
import subprocess
import threading

import pytest

import setup_venv

# A build backend of one function, so that nothing has to be fetched; the toy package is made with the same one.
BACKEND = """
import zipfile

def write_wheel(folder, name, version):
    info = f"{name}-{version}.dist-info"
    path = f"{folder}/{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path.rpartition("/")[2]

def build_editable(folder, config_settings=None, metadata_directory=None):
    return write_wheel(folder, "lab_utils", "0.1.0")
"""


@pytest.fixture
def checkout(root, tmp_path):
    """A checkout of the set-up's own files, with a toy lock, in a folder with a space in its name."""
    folder = tmp_path / "the labs"
    folder.mkdir()
    (folder / "course").mkdir()
    for name in ("Makefile", "setup_venv.py", "course/jupyterlab.json"):
        shutil.copy(root / name, folder / name)
    (folder / "backend.py").write_text(BACKEND)
    (tmp_path / "wheels").mkdir()
    write_wheel = runpy.run_path(str(folder / "backend.py"))["write_wheel"]
    toy = tmp_path / "wheels" / write_wheel(tmp_path / "wheels", "toy", "1.0")
    digest = hashlib.sha256(toy.read_bytes()).hexdigest()
    (folder / "requirements.lock").write_text(f"toy==1.0 --hash=sha256:{digest}\n")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "lab-utils"\nversion = "0.1.0"\n'
    )
    return folder


def make_setup(folder, **more):
    """Runs `make setup` without a network."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder.parent / "wheels")} | more
    run = subprocess.run(["make", "setup"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return run.returncode, run.stdout + run.stderr


def site_packages(folder):
    (found,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    return found


@pytest.mark.drill
def test_set_up_once_repeat_in_no_time_and_mend_what_was_cut_off_or_broken_or_moved(checkout):
    code, out = make_setup(checkout)
    assert code == 0, out
    assert (site_packages(checkout) / "toy.py").exists()
    assert "Nothing to be done" in make_setup(checkout)[1]

    (site_packages(checkout) / "half").touch()  # what a killed pip may leave
    (checkout / ".venv" / "ready").unlink()
    code, out = make_setup(checkout)
    assert code == 0, out
    assert not (site_packages(checkout) / "half").exists()

    python = checkout / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python")  # the Python that it was made with is gone
    code, out = make_setup(checkout)
    assert code == 0, out
    assert "Nothing to be done" in make_setup(checkout)[1]

    moved = checkout.rename(checkout.parent / "elsewhere")
    code, out = make_setup(moved)
    assert code == 0, out
    assert (moved / ".venv" / "ready").read_text() == f"{moved}\n"


@pytest.mark.drill
def test_an_update_without_a_network_leaves_the_environment_as_it_was(checkout):
    assert make_setup(checkout)[0] == 0
    (site_packages(checkout) / "kept").touch()
    lock = (checkout / "requirements.lock").read_text()
    (checkout / "requirements.lock").write_text(lock + f"not-there==1.0 --hash=sha256:{'0' * 64}\n")
    later = (checkout / ".venv" / "ready").stat().st_mtime + 10
    os.utime(checkout / "requirements.lock", (later, later))
    for _ in range(2):
        code, out = make_setup(checkout)
        assert code != 0
        assert ".venv is as it was" in out
        assert (site_packages(checkout) / "kept").exists()
    (checkout / "requirements.lock").write_text(lock)
    assert make_setup(checkout)[0] == 0
    assert (site_packages(checkout) / "kept").exists()


def test_somebody_elses_environment_is_not_touched(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "theirs").touch()
    code, out = make_setup(checkout)
    assert code != 0
    assert "was not made by these labs" in out
    assert (checkout / ".venv" / "theirs").exists()


def test_the_way_without_cuda_leaves_out_cuda_alone(root):
    text = (root / "requirements.lock").read_text()
    rest = setup_venv.without_cuda(text)
    names = [set(re.findall(r"^([a-z][\w.-]*)==", lock, flags=re.MULTILINE)) for lock in (text, rest)]
    gone = names[0] - names[1]
    assert {"torch", "torchvision", "triton"} <= gone
    assert all(name.startswith(("nvidia-", "cuda-")) for name in gone - {"torch", "torchvision", "triton"})
    assert {"numpy", "tensorboard", "torch"} - names[1] == {"torch"}
    assert rest.count("--hash") > 1000 and "sha256" in rest


class Index:
    """A package index on this machine, whose page may state anything about a file, and its address."""

    def __init__(self, folder):
        self.folder, self.pages, self.asked = folder, {}, []
        folder.mkdir()
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                index.asked.append(self.path)
                name = self.path.strip("/").rpartition("/")[2].replace("%2B", "+")
                if target := index.pages.get("redirect"):
                    self.send_response(302)
                    self.send_header("Location", target)
                    self.end_headers()
                    return
                page = index.pages.get(name)
                content = page.encode() if page is not None else b""
                if page is None and (folder / name).is_file():
                    content = (folder / name).read_bytes()
                self.send_response(200 if content else 404)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/whl/cpu"

    def offer(self, checkout, version, *, state=True, local="+cpu"):
        """Builds both packages in a version and lists them; the page states their SHA-256, none, or another."""
        write_wheel = runpy.run_path(str(checkout / "backend.py"))["write_wheel"]
        for name in ("torch", "torchvision"):
            wheel = write_wheel(self.folder, name, version + local)
            digest = hashlib.sha256((self.folder / wheel).read_bytes()).hexdigest()
            fragment = f"#sha256={digest}" if state is True else state or ""
            link = f'<a href="/files/{wheel.replace("+", "%2B")}{fragment}">{wheel}</a><br/>\n'
            self.pages[name] = self.pages.get(name, "") + link


@pytest.fixture
def index(tmp_path):
    found = Index(tmp_path / "index")
    threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield found
    found.server.shutdown()
    found.server.server_close()


def pin(checkout, version):
    """Locks torch in a version, as the real lock does: with the hashes of another index's files."""
    lock = checkout / "requirements.lock"
    toy = re.search(r"^toy==.*$", lock.read_text(), flags=re.MULTILINE)[0]
    pins = [f"{name}=={version} --hash=sha256:{'0' * 64}" for name in ("torch", "torchvision")]
    lock.write_text("\n".join([toy, *pins]) + "\n")
    later = lock.stat().st_mtime + 10
    os.utime(lock, (later, later))


def find_torch(checkout):
    return sorted(path.name for path in site_packages(checkout).glob("torch*.dist-info"))


@pytest.fixture
def setup(checkout, monkeypatch):
    """The functions of a toy checkout's own setup_venv.py."""
    monkeypatch.syspath_prepend(str(checkout))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return runpy.run_path(str(checkout / "setup_venv.py"))


@pytest.fixture
def local(index, monkeypatch):
    """What makes `make setup TORCH=cpu` use the index on this machine."""
    found = {"TORCH": "cpu", "TORCH_CPU_INDEX": index.url, "PIP_INDEX_URL": index.url, "PIP_NO_INDEX": ""}
    found["PIP_NO_CACHE_DIR"] = "1"
    for name, value in (found | {"NO_PROXY": "127.0.0.1"}).items():
        monkeypatch.setenv(name, value)
    return found


@pytest.mark.drill
def test_builds_without_cuda_are_installed_with_hashes_only(checkout, index, local, setup, capfd):
    """From what is stored, else from what the index states and was remembered; never without."""
    index.offer(checkout, "1.0")
    pin(checkout, "1.0")
    code, out = make_setup(checkout, **local)
    assert code == 0, out
    assert find_torch(checkout) == ["torch-1.0+cpu.dist-info", "torchvision-1.0+cpu.dist-info"]
    assert "no hashes of torch==1.0 and torchvision==1.0 without CUDA are stored here" in out
    remembered = checkout / ".torch-cpu.lock"
    assert remembered.read_text().count("--hash=sha256:") == 2

    def install(version):
        for path in site_packages(checkout).glob("torch*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        index.asked.clear()
        setup["install_cpu_builds"]([f"{name}=={version}" for name in ("torch", "torchvision")])

    # Another file of the same name is refused, whatever the index states about it now.
    index.pages.clear()
    backend = checkout / "backend.py"
    backend.write_text(backend.read_text().replace('.py", "")', '.py", "evil")'))
    index.offer(checkout, "1.0")
    with pytest.raises(subprocess.CalledProcessError):
        install("1.0")
    said = "".join(capfd.readouterr())
    assert "DO NOT MATCH THE HASHES" in said and ".torch-cpu.lock" in said
    # What differs from what the index states.
    index.offer(checkout, "1.1", state=f"#sha256={'1' * 64}")
    with pytest.raises(subprocess.CalledProcessError):
        install("1.1")
    assert "DO NOT MATCH THE HASHES" in "".join(capfd.readouterr())
    assert find_torch(checkout) == [] and "1.1" not in remembered.read_text()
    # What an index states nothing about is not even fetched, until its hash is stored here.
    index.offer(checkout, "1.2", state=None)
    with pytest.raises(setup["RefusedError"], match=r"states no SHA-256 of torch==1\.2\. .* make setup"):
        install("1.2")
    assert index.asked == ["/whl/cpu/torch/"]
    files = {name: index.folder / f"{name}-1.2+cpu-py3-none-any.whl" for name in ("torch", "torchvision")}
    hashes = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    lines = [f"{name}==1.2 --hash=sha256:{value}\n" for name, value in hashes.items()]
    (checkout / "requirements-cpu.lock").write_text("".join(lines))
    capfd.readouterr()
    install("1.2")
    assert find_torch(checkout) == ["torch-1.2+cpu.dist-info", "torchvision-1.2+cpu.dist-info"]
    assert "no hashes" not in "".join(capfd.readouterr())


def test_a_lock_of_the_builds_without_cuda_has_every_platform_and_no_other_build(checkout, index, setup, monkeypatch):
    for local in ("+cpu", "", "+cu130", "+cpu.cxx11.abi"):
        index.offer(checkout, "1.0", local=local)
    index.offer(checkout, "1.0.1")
    pin(checkout, "1.0")
    monkeypatch.setenv("TORCH_CPU_INDEX", index.url)
    setup["main"](["lock-cpu"])
    text = (checkout / "requirements-cpu.lock").read_text()
    for name in ("torch", "torchvision"):
        wanted = {
            hashlib.sha256((index.folder / f"{name}-1.0{local}-py3-none-any.whl").read_bytes()).hexdigest()
            for local in ("+cpu", "")
        }
        (entry,) = re.findall(rf"^{name}==1\.0 \\\n((?:    --hash=sha256:\w+(?: \\)?\n)+)", text, flags=re.MULTILINE)
        assert set(re.findall(r"sha256:(\w+)", entry)) == wanted
    assert "://" not in text


@pytest.mark.drill
@pytest.mark.parametrize(
    "page", [None, "", "<html>log in</html>", "x" * 10**6, '<a href="http://[/torch-1.0-x.whl#sha256=">']
)
def test_an_index_that_cannot_be_used_is_named(checkout, index, setup, monkeypatch, page):
    pin(checkout, "1.0")
    if page is not None:
        index.pages["torch"] = page
    monkeypatch.setenv("TORCH_CPU_INDEX", index.url)
    with pytest.raises(SystemExit) as caught:
        setup["main"](["lock-cpu"])
    assert index.url in str(caught.value) and "torch" in str(caught.value)
    assert not (checkout / "requirements-cpu.lock").exists()


UNSAFE = ["http://192.0.2.1/whl/cpu", "ftp://127.0.0.1/whl", "http://127.0.0.1.example/whl"]


@pytest.mark.drill
@pytest.mark.parametrize(
    ("url", "way"),
    [("whl/cpu", "named"), *((url, way) for url in UNSAFE for way in ("named", "redirected"))],
)
def test_an_index_that_anybody_on_the_way_can_change_is_refused(checkout, index, setup, monkeypatch, url, way):
    """Hashes from such a page would say nothing."""
    pin(checkout, "1.0")
    if way == "redirected":
        index.pages["redirect"] = url
    monkeypatch.setenv("TORCH_CPU_INDEX", url if way == "named" else index.url)
    with pytest.raises(SystemExit) as caught:
        setup["main"](["lock-cpu"])
    assert "https://" in str(caught.value) and url in str(caught.value)
