import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from course import environment
from lab_common import LabError, cores, nvidia
from lab_utils import machine
from lab_utils.machine import facts

INTEL = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8488C CPU @ 2.40GHz
flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: another
flags\t\t: fpu
"""

# Of a Graviton 3: Linux tells no name there.
ARM = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd {features} crc32
CPU implementer\t: 0x41
CPU part\t: 0xd40
CPU revision\t: 1
"""
# What `sysctl machdep.cpu.brand_string hw.optional` prints.
MAC = """machdep.cpu.brand_string: {name}
hw.optional.floatingpoint: 1
hw.optional.arm.AdvSIMD: 1
hw.optional.arm.FEAT_FP16: 1
hw.optional.arm.FEAT_BF16: {bf16}
hw.optional.arm.SME_B16F32: {matrix}
"""


def put_first(folder: Path | str) -> str:
    """A PYTHONPATH on which a folder comes before what is there already."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def run_check(folder: Path, **settings: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "course.environment"]
    env = {**os.environ, **settings}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=env)


@pytest.fixture
def broken_pair(tmp_path):
    """A folder for PYTHONPATH with a torchvision that fails as one built for another torch does."""
    package = tmp_path / "broken" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")\n')
    return str(package.parent)


def test_the_check_is_green_here(tmp_path):
    child = run_check(tmp_path)
    assert child.returncode == 0, child.stdout + child.stderr
    lines = child.stdout.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("[ok]   ") for line in lines)
    assert "go together" in child.stdout
    assert str(Path.home()) + "/" not in child.stdout


def test_a_mismatched_pair_is_named_with_its_fix(tmp_path, broken_pair):
    child = run_check(tmp_path, PYTHONPATH=put_first(broken_pair))
    assert child.returncode == 1
    failed = re.search(r"\[fail\] (torch \S+ and torchvision \S+ do not go together.*)\n +fix: (.*)", child.stdout)
    assert failed, child.stdout
    assert "operator torchvision::nms does not exist" in failed[1]
    assert failed[2] == environment.choose_repair()
    assert child.stdout.count("[fail]") == 1


def test_with_a_mismatched_pair_the_package_still_imports(tmp_path, broken_pair):
    code = (
        "import lab_utils as labs\ntry:\n    labs.load_torchvision()\nexcept labs.LabError as error:\n    print(error)"
    )
    env = {**os.environ, "PYTHONPATH": put_first(broken_pair)}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert child.returncode == 0, child.stderr
    first, *rest = child.stdout.splitlines()
    assert re.fullmatch(r"torch \S+ and torchvision \S+ do not go together\.", first)
    assert any(line.startswith("  fix: ") for line in rest)


def test_a_torch_that_dies_at_import_is_a_fail_and_not_a_crash(tmp_path):
    (tmp_path / "torch.py").write_text("import os, sys\nsys.stderr.write('Illegal instruction')\nos._exit(4)\n")
    child = run_check(tmp_path, PYTHONPATH=put_first(tmp_path))
    assert child.returncode == 1
    assert "do not go together: Illegal instruction" in child.stdout


def test_a_gpu_that_torch_cannot_use_is_a_fail(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    without_cuda = environment.check_gpu({"torch": "2.14.1+cpu", "cuda": None, "gpus": 0})
    assert not without_cuda.ok
    assert "a build without CUDA" in without_cuda.what
    assert "make setup" in without_cuda.fix
    old_driver = environment.check_gpu({"torch": "2.14.1+cu130", "cuda": "13.0", "gpus": 0})
    assert not old_driver.ok
    assert "driver" in old_driver.fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment.check_gpu({"torch": "2.14.1+cu130", "cuda": "13.0", "gpus": 0}).ok
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    program.write_text("#!/bin/sh\nexit 9\n")  # a driver that answers with an error, as without a card
    assert environment.check_gpu({"torch": "2.14.1+cpu", "cuda": None, "gpus": 0}).ok


def test_why_nvidia_smi_gave_no_answer_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="there is no nvidia-smi"):
        nvidia.run_smi("-L")
    program = tmp_path / "nvidia-smi"
    for text, told in {
        "echo 'Failed to initialize NVML'; echo more; exit 18": "^Failed to initialize NVML$",
        "echo 'no such option' >&2; exit 2": "^no such option$",
        "exec /bin/sleep 5": r"^nvidia-smi did not answer within 0\.3 s$",
    }.items():
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        with pytest.raises(OSError, match=told):
            nvidia.query_smi("gpu=index", seconds=0.3)
    program.write_text('#!/bin/sh\necho "0, ${1#--} , $#"; echo; echo "a warning" >&2\n')
    assert nvidia.query_smi("gpu=index") == [["0", "query-gpu=index", "2"]]


def test_the_repair_is_for_the_environment_that_is_running(monkeypatch, tmp_path):
    monkeypatch.setattr("lab_utils.checkout", lambda: tmp_path)
    for prefix, told in ((tmp_path / ".venv", True), (tmp_path / "conda", False)):
        monkeypatch.setattr(sys, "prefix", str(prefix))
        assert ("rm -rf .venv" in environment.choose_repair()) == told


def test_too_little_memory_disk_or_shared_memory_fails(monkeypatch, tmp_path):
    sizes = {"total": 2 * 2**30, "available": 2 * 2**30}
    monkeypatch.setattr(environment, "measure_memory", lambda: sizes["total"])
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=sizes["available"]))
    assert "at least 4 GiB" in (found := environment.check_memory()).fix and not found.ok
    sizes["total"] = 4 * 2**30
    assert "shut down the kernels" in (found := environment.check_memory()).fix and not found.ok
    assert "4.0 GiB of memory" in found.what and "of the machine's 2.0 GiB are free" in found.what
    sizes["available"] = 3 * 2**30
    assert environment.check_memory().ok
    monkeypatch.setenv("LAB_DATA", str(tmp_path / "not" / "yet" / "there"))
    assert environment.check_disk().ok
    monkeypatch.setattr(environment, "DISK_NEEDED", 2**60)
    verdict = environment.check_disk()
    assert not verdict.ok
    assert str(tmp_path) not in verdict.what + verdict.fix
    sized = type("Usage", (), {"total": 64 * 2**20})
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda folder: sized)
    assert environment.check_shared_memory(1, tmp_path).ok
    assert not environment.check_shared_memory(2, tmp_path).ok
    assert environment.check_shared_memory(2, tmp_path / "none").ok


def test_fast_bf16_is_told_by_the_processor_s_flags():
    found = replace(machine.describe(), cpu_features=("avx2", "amx_bf16"), gpus=())
    assert machine.has_fast_bf16(found)
    assert not machine.has_fast_bf16(replace(found, cpu_features=("avx2", "avx512f")))


def test_the_processor_s_name_and_flags_are_read(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(INTEL)
    name, features = facts.read_cpu(tmp_path / "cpuinfo")
    assert name == "Intel Xeon Platinum 8488C"
    assert features == ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    monkeypatch.setenv("PATH", "")
    assert facts.read_cpu(tmp_path / "none")[1] == ()


@pytest.mark.parametrize(("features", "fast"), [("asimdhp sve i8mm bf16", True), ("asimdhp", False), ("", False)])
def test_arm_processors_are_told(tmp_path, monkeypatch, capsys, features, fast):
    (tmp_path / "cpuinfo").write_text(ARM.format(features=features))
    (tmp_path / "lscpu").write_text("#!/bin/sh\necho 'Architecture:  aarch64'\necho 'Model name:    Neoverse-V1'\n")
    (tmp_path / "lscpu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    name, units = facts.read_cpu(tmp_path / "cpuinfo")
    assert name == "Neoverse-V1" and set(units) == {"asimd", *features.split()} - {"i8mm"}
    known = replace(machine.describe(), cpu=name, cpu_features=units, gpus=(), system="Linux aarch64")
    assert machine.has_fast_bf16(known) == fast
    monkeypatch.setattr(machine, "describe", lambda: known)
    machine.card()
    text = capsys.readouterr().out
    assert name in text and ("no unit for bf16" in text) != fast
    assert ("no unit for bf16 or fp16" in text) == (features == "")


@pytest.mark.parametrize(
    ("name", "bf16", "matrix", "fast"),
    [("Apple M1", 0, 0, False), ("Apple M4", 1, 1, True)],
)
def test_apple_processors_are_told(tmp_path, monkeypatch, name, bf16, matrix, fast):
    program = tmp_path / "sysctl"
    text = MAC.format(name=name, bf16=bf16, matrix=matrix)
    program.write_text(f'#!/bin/sh\n[ "$*" = "machdep.cpu.brand_string hw.optional" ] && printf "{text}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(facts.platform, "system", lambda: "Darwin")
    expected = ("asimd", "asimdhp", *["bf16"] * bf16, *["smeb16f32"] * matrix)
    assert facts.read_cpu() == (name, expected)
    known = replace(machine.describe(), cpu_features=expected, gpus=())
    assert machine.has_fast_bf16(known) == fast
    program.write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setattr(facts.platform, "processor", lambda: "arm")
    assert facts.read_cpu() == ("arm", ())


def test_a_container_s_limits_count(tmp_path):
    own = tmp_path / "own"
    own.write_text("4:memory:/job\n3:cpu,cpuacct:/job\n0::/slice/unit\n")
    for group, name, text in [
        ("slice/unit", "memory.max", "max"),
        ("slice", "memory.max", "8589934592"),
        ("slice", "cpu.max", "150000 100000"),
        ("slice/unit", "cpu.max", "max 100000"),
    ]:
        (tmp_path / "v2" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "v2" / group / name).write_text(text + "\n")
    assert facts.read_memory_limit(tmp_path / "v2", own) == 8 * 2**30
    assert cores.read_cpu_quota(tmp_path / "v2", own) == 1.5
    (tmp_path / "v1" / "memory" / "job").mkdir(parents=True)
    (tmp_path / "v1" / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert facts.read_memory_limit(tmp_path / "v1", own) is None
    (tmp_path / "v1" / "memory" / "job" / "memory.limit_in_bytes").write_text("4294967296\n")
    (tmp_path / "v1" / "cpu").mkdir()
    (tmp_path / "v1" / "cpu" / "cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "v1" / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert facts.read_memory_limit(tmp_path / "v1", own) == 4 * 2**30
    assert cores.read_cpu_quota(tmp_path / "v1", own) == 2.0
    assert facts.read_memory_limit(tmp_path / "none", own) is None
    assert cores.read_cpu_quota(tmp_path / "none", own) is None


def test_the_lower_of_machine_and_container_counts(monkeypatch):
    monkeypatch.setattr(facts, "read_memory_limit", lambda: 2**30)
    assert facts.measure_memory() == 2**30
    monkeypatch.setattr(facts, "read_memory_limit", lambda: 2**59)
    assert 2**30 < facts.measure_memory() < 2**59
    monkeypatch.setattr(cores, "read_cpu_quota", lambda: 0.5)
    assert facts.count_cores() == 1


def test_the_card_is_aligned_and_names_no_place(capsys):
    machine.card()
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) >= 8
    assert len({re.search(r"(?<=  )\S", line).start() for line in lines}) <= 2
    assert "GPU" in text
    assert "small (LAB_SCALE says so)" in text
    for secret in (str(Path.cwd()), os.environ["LAB_DATA"], os.environ["LAB_RUNS"], os.uname().nodename):
        assert secret not in text


def test_scale_follows_the_setting_then_the_device(monkeypatch):
    import torch

    monkeypatch.setenv("LAB_SCALE", "full")
    assert (machine.scale(), machine.scale_reason()) == ("full", "LAB_SCALE says so")
    monkeypatch.setenv("LAB_SCALE", "Small")
    with pytest.raises(LabError, match="LAB_SCALE") as caught:
        machine.scale()
    assert caught.value.fix == "export LAB_SCALE=small"
    monkeypatch.delenv("LAB_SCALE")
    for available, expected in ((False, "small"), (True, "full")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert machine.scale() == expected
        assert (machine.scale("cuda"), machine.scale("cpu")) == ("full", "small"), "the nodes' device, not this one's"
        assert machine.device() == torch.device("cuda", 0) if available else torch.device("cpu")
        assert ("no GPU" in machine.scale_reason()) == (not available)
