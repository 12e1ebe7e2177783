"""The Dockerfiles, as far as they can be read."""

import re
import tomllib

import pytest
import yaml

from tests.helm.chart import CHART, REPOSITORY

dockerfiles = pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (REPOSITORY / name).read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = [line.split(maxsplit=1) for line in lines]
    return [(pair[0], pair[1]) for pair in pairs]


@dockerfiles
def test_no_root_at_the_end(name: str) -> None:
    users = [value for kind, value in instructions(name) if kind == "USER"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())["security"]
    assert users == [f"{values['runAsUser']}:{values['runAsGroup']}"]


@dockerfiles
def test_what_is_fetched_is_pinned(name: str) -> None:
    [(_, base)] = [each for each in instructions(name) if each[1].startswith("PYTHON=")]
    assert re.fullmatch(r"PYTHON=python:3\.\d+-slim-\w+", base)
    froms = [value for kind, value in instructions(name) if kind == "FROM"]
    assert froms == ["${PYTHON} AS build", "${PYTHON}"]
    installs = [value for kind, value in instructions(name) if value.startswith("pip install")]
    assert installs[0] == "pip install torch==2.13.0"
    named = [value for value in installs if "==" not in value]
    assert named == ["pip install ."]


@dockerfiles
def test_no_address_and_no_secret(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    assert "://" not in text
    assert not re.search(r"(?i)(token|password|secret)\s*=", text)


@dockerfiles
def test_haproxy_is_where_the_chart_looks_for_it(name: str) -> None:
    path = "/usr/local/bin/shoal-haproxy"
    assert f"python -m cluster.haproxy {path}" in (REPOSITORY / name).read_text()
    assert path in (CHART / "templates" / "_pod.tpl").read_text()


def test_the_context_has_every_package_and_no_more() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert "*" in lines
    assert kept == {pattern.rstrip("*") for pattern in packages} | {
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }


def test_the_chart_is_of_this_version() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project["version"]
