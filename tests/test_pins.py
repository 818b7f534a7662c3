"""pyproject.toml, requirements.lock, environment.yml and the installed environment agree."""

import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def read_lock(text: str) -> list[tuple[Requirement, list[str]]]:
    """Every requirement of a lock with its hashes."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    return [(Requirement(line.split("--hash=")[0].strip()), re.findall(r"--hash=(\S+)", line)) for line in lines]


@pytest.fixture(scope="module")
def lock(root):
    return read_lock((root / "requirements.lock").read_text())


@pytest.fixture(scope="module")
def project(root):
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def conda(root):
    return yaml.safe_load((root / "environment.yml").read_text())


def find_pins(lock) -> dict[str, list[str]]:
    pins = {}
    for requirement, _ in lock:
        pins.setdefault(canonicalize_name(requirement.name), []).append(str(requirement.specifier))
    return pins


def test_every_line_of_the_lock_is_exact_and_hashed(lock):
    assert len(lock) > 100
    for requirement, hashes in lock:
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), f"{requirement} is not exact"
        assert hashes, f"{requirement} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes), requirement


def test_the_lock_names_no_host(root):
    text = (root / "requirements.lock").read_text()
    assert "://" not in text
    assert not re.search(r"^\s*(-i|-f|--index|--extra-index|--find-links|--trusted)", text, flags=re.MULTILINE)


def test_the_lock_pins_every_direct_dependency_within_its_range(lock, project):
    pins = find_pins(lock)
    extras = project["optional-dependencies"].values()
    wanted = [Requirement(text) for text in [*project["dependencies"], *(text for extra in extras for text in extra)]]
    assert {"torch", "torchvision", "tensorboard"} <= {requirement.name for requirement in wanted}
    for requirement in wanted:
        found = pins.get(canonicalize_name(requirement.name))
        assert found, f"{requirement.name} is not in the lock"
        for pin in found:
            assert requirement.specifier.contains(pin.removeprefix("==")), (
                f"{requirement.name}{pin} is not {requirement}"
            )


def test_conda_takes_the_lock_itself(conda):
    # By taking the lock, hashes and all, instead of repeating it, the two cannot drift apart.
    assert conda["channels"] == ["conda-forge", "nodefaults"]
    plain = [entry for entry in conda["dependencies"] if isinstance(entry, str)]
    (through_pip,) = [entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict)]
    assert [entry.split("=")[0] for entry in plain] == ["python", "pip"]
    assert through_pip == ["-r requirements.lock"]
