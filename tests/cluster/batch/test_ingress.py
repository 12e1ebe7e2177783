"""A batch through the real HTTP application and a real engine process."""

import json
from pathlib import Path

from tests.cluster.batch.conftest import ids_of, lines_of, row, run
from tests.cluster.conftest import MODEL_ALIAS, MODEL_NAME, Served


def test_a_batch_against_the_ingress(files: tuple[Path, Path], served: Served) -> None:
    options = {"max_tokens": 5, "seed": 1, "ignore_eos": True}
    prompts = [
        row(f"text-{number}", body={"model": MODEL_NAME, "prompt": f"Hello {number}", **options})
        for number in range(40)
    ]
    messages = [{"role": "user", "content": "Hi"}]
    chats = [
        row(
            f"chat-{number}",
            url="/v1/chat/completions",
            body={"model": MODEL_ALIAS, "messages": messages, **options},
        )
        for number in range(40)
    ]
    wrong = [
        row("unknown", body={"model": "unknown", "prompt": "x"}),
        row("wrong", body={"model": MODEL_NAME, "prompt": "x", "temperature": 9}),
    ]
    files[0].write_text("".join([*prompts, *chats, *wrong]))
    tally = run(files, served.url)
    assert (tally.succeeded, tally.failed, tally.retries) == (80, 2, 0)
    assert tally.completion_tokens == 80 * 5
    lines = {line["custom_id"]: line["response"] for line in lines_of(files[1])}
    assert set(ids_of(files[1]).values()) == {1}
    assert len(lines) == 82
    assert lines["text-0"]["body"]["choices"][0]["text"]
    assert lines["text-0"]["request_id"].startswith("cmpl-")
    answers = {json.dumps(lines[f"chat-{number}"]["body"]["choices"]) for number in range(40)}
    assert len(answers) == 1, "the same seed, the same answer"
    assert (lines["unknown"]["status_code"], lines["wrong"]["status_code"]) == (404, 400)
    served.wait_idle()
