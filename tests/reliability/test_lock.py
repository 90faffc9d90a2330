"""The lock and the constraints name the same versions, and every package that the tests need has its hashes."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .conftest import ROOT

LOCK = ROOT / "requirements.lock"
WITHOUT = {"torch", "accelerate", "gguf"}
"""torch is built once for each kind of machine; the other two belong to judges, which `make test` does not install."""


def locked() -> dict[str, list[tuple[str, list[str]]]]:
    """Versions and hashes by package; several versions where Pythons or platforms differ."""
    found: dict[str, list[tuple[str, list[str]]]] = {}
    lines = LOCK.read_text().replace("\\\n", " ").splitlines()
    for line in (line for line in lines if line and not line.startswith("#")):
        words, *hashes = line.split("--hash=")
        requirement = Requirement(words)
        (version,) = requirement.specifier
        assert version.operator == "==", line
        found.setdefault(canonicalize_name(requirement.name), []).append((version.version, [h.strip() for h in hashes]))
    return found


def constrained() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def wanted() -> set[str]:
    """What the core and the extra `dev` ask for by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names, groups = set(), [project["dependencies"], project["optional-dependencies"]["dev"]]
    while groups:
        for requirement in map(Requirement, groups.pop()):
            if requirement.name == "cdlm":
                groups += [project["optional-dependencies"][extra] for extra in requirement.extras]
            else:
                names.add(canonicalize_name(requirement.name))
    return names


def test_the_lock_and_the_constraints_agree(tried) -> None:
    packages, pinned = locked(), constrained()
    differ = {name: packages[name] for name in pinned.keys() & packages.keys() if packages[name][0][0] != pinned[name]}
    assert not differ, f"run: make lock ({differ})"
    assert all(len(packages[name]) == 1 for name in pinned.keys() & packages.keys())
    assert pinned.keys() - packages.keys() == WITHOUT
    assert wanted() - packages.keys() == {"torch"}
    tried("a version in the lock and another in the constraints", len(pinned), "a test fails")


def test_every_package_of_the_lock_has_hashes(tried) -> None:
    packages = locked()
    for name, versions in packages.items():
        for _, hashes in versions:
            assert hashes, name
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes), name
    tried("a package without a hash", len(packages), "a test fails")


def test_the_lock_names_no_place_to_download_from() -> None:
    """Where packages come from is the business of who installs them; what they are is not."""
    text = LOCK.read_text()
    assert "://" not in text
    assert "index" not in text
    assert "find-links" not in text
