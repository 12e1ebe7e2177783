"""`shoal config` from the outside: exit codes, what is printed, and how little it loads."""

import json
import subprocess
import sys
import time

import pytest

from configs.load import load, parse
from configs.shoal import ShoalConfig

_RUN = """
import sys
from cluster.cli import main
try:
    main()
finally:
    heavy = {"ray", "torch", "transformers", "zmq", "fastapi"} & set(sys.modules)
    if heavy:
        print("LOADED", heavy, file=sys.stderr)
"""


def shoal(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, and fails if that loaded what is heavy."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, "config", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "LOADED" not in done.stderr
    return done


@pytest.fixture
def bad(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("models:\n- name: a\n  replicas: 0\nroutr: {}\n")
    return str(path)


@pytest.mark.parametrize("arguments", [("show",), ("check", "cluster"), ("schema",)])
def test_quick(arguments):
    began_s = time.monotonic()
    done = shoal(*arguments)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began_s < 2


def test_show_prints_the_whole_tree():
    assert parse(shoal("show", "cluster").stdout, "out") == load("cluster")
    assert parse(shoal("show").stdout, "out") == load("local-cpu")
    as_json = shoal("show", "cluster", "--json").stdout
    assert ShoalConfig.model_validate_json(as_json) == load("cluster")
    assert json.loads(as_json)["models"][0]["supervision"]["restart_window_s"] == 600.0


def test_show_of_a_bad_file(bad):
    done = shoal("show", bad)
    assert done.returncode == 1
    assert "bad.yaml:3: models[0].replicas" in done.stderr
    assert done.stdout == ""


def test_check(bad):
    done = shoal("check", "single-gpu")
    assert (done.returncode, done.stdout) == (0, "single-gpu: valid, 1 model: default\n")
    done = shoal("check", bad)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"{bad}:3: models[0].replicas: must be at least 1, got 0",
        f"{bad}:4: routr: unknown key; did you mean router?",
        "2 problems",
    ]


def test_check_as_json(bad):
    good = json.loads(shoal("check", "cluster", "--json").stdout)
    assert good == {"ok": True, "config": "cluster", "models": ["default"], "problems": []}
    done = shoal("check", bad, "--json")
    assert done.returncode == 1
    outcome = json.loads(done.stdout)
    assert outcome["ok"] is False
    assert [(each["line"], each["path"]) for each in outcome["problems"]] == [
        (3, "models[0].replicas"),
        (4, "routr"),
    ]


def test_wrong_usage():
    assert shoal("check").returncode == 2
    assert shoal("chekc").returncode == 2


def test_schema():
    schema = json.loads(shoal("schema").stdout)
    port = schema["$defs"]["IngressConfig"]["properties"]["port"]
    assert (port["minimum"], port["maximum"], port["change"]) == (1, 65535, "restart")
    assert shoal("schema", "--table").stdout.startswith("| field |")
