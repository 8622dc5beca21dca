"""The project's own files agree with each other: version, pins, gate, public names."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import rorqual

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    matches = [re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line) for line in lines if not line.startswith("#")]
    assert all(matches), "a constraint is a bare name==version: no URL, no hash, no local suffix"
    return {canonicalize_name(match[1]): Version(match[2]) for match in matches if match}


def test_version_is_one() -> None:
    assert rorqual.__version__ == PROJECT["version"]


@pytest.mark.parametrize("text", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])
def test_set_up_requirements_are_pinned_within_their_range(text: str) -> None:
    requirement = Requirement(text)
    pin = pins().get(canonicalize_name(requirement.name))
    assert pin is not None, f"constraints.txt has no {requirement.name}"
    assert pin in requirement.specifier


def test_torch_stays_below_the_next_unseen_release() -> None:
    torch = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    assert "2.13.0" in torch.specifier
    assert "2.14.0" not in torch.specifier
    assert Version("3.11") in Requirement(f"python{PROJECT['requires-python']}").specifier


def test_import_is_light() -> None:
    script = "import sys, rorqual; print(sorted({'torch', 'numba', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "10000 None"), ({"GOMP_SPINCOUNT": "7"}, "7 None"), ({"OMP_WAIT_POLICY": "active"}, "None active")],
)
def test_threads_wait_briefly_unless_the_environment_says_how(given: dict[str, str], found: str) -> None:
    names = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
    script = f"import os, rorqual; print(*(os.environ.get(name) for name in {names}))"
    env = {name: value for name, value in os.environ.items() if name not in names} | given
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == found + "\n", done.stderr


@pytest.mark.parametrize("name", rorqual.__all__)
def test_public_names_load(name: str) -> None:
    assert getattr(rorqual, name) is not None
    assert name in dir(rorqual)


def test_unknown_name_lists_the_public_ones() -> None:
    with pytest.raises(AttributeError, match=r"lod.*ModelConfig.*load"):
        _ = rorqual.lod


@pytest.mark.parametrize("target", ["demo", "test", "test-all", "bench", "serve", "setup", "warm", "check"])
def test_makefile_has_the_targets(target: str) -> None:
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


def test_serve_runs_the_verb_with_options_of_the_users() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "serve", "SERVE=--port 0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ".venv/bin/rorqual serve --port 0"


@pytest.mark.parametrize("script", [".ci/run", "scripts/check", "scripts/setup.sh"])
def test_scripts_stop_at_the_first_failure(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & stat.S_IXUSR
    assert "set -euo pipefail" in path.read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n", path], timeout=60).returncode == 0


def test_the_gate_is_one() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").split("\n")
    assert "make test" in ci
    assert re.search(r"^test:.*\n\tbash scripts/check$", MAKEFILE, re.MULTILINE)


FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >> calls
case "$*" in *"$FAILS"*) exit 1 ;; esac
"""


@pytest.mark.parametrize(
    ("fails", "gate", "calls"),
    [
        ("-m ruff check", "lint", 1),
        ("-m ruff format", "format", 2),
        ("-m mypy", "types", 3),
        ("tests/test_layering.py", "layering", 4),
        ("--durations=10", "tests", 5),
        ("nothing of the kind", None, 5),
    ],
)
def test_check_names_the_gate_that_failed(fails: str, gate: str | None, calls: int, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "check").write_bytes((ROOT / "scripts" / "check").read_bytes())
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON, encoding="utf-8")
    python.chmod(0o755)
    environment = {**os.environ, "FAILS": fails}
    done = subprocess.run(
        ["bash", "scripts/check"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (1 if gate else 0)
    assert (f"check: the gate '{gate}' failed" in done.stderr) == (gate is not None)
    assert len((tmp_path / "calls").read_text(encoding="utf-8").splitlines()) == calls


def test_license_is_mit() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.startswith("MIT License")
    assert "The Rorqual authors" in text
    assert PROJECT["license"] == "MIT"
