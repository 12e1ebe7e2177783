"""Runs inside vLLM's environment: one `LLM`, driven over stdin and stdout.

Invariant: nothing of Shoal is imported, and stdout carries one JSON object a line and nothing else:
`{"ready": true}` once the model is loaded, then for each line `{"prompts", "output_tokens"}` of
stdin `{"seconds", "counts"}`, or `{"error": text}`. It ends when stdin does.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    # Whatever a library prints goes to stderr.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields) + "\n")

    try:
        from vllm import LLM, SamplingParams

        engine = LLM(**json.loads(sys.argv[1]))
        reply(ready=True)
        for line in sys.stdin:
            request = json.loads(line)
            sampling = SamplingParams(
                temperature=0.0, max_tokens=request["output_tokens"], ignore_eos=True
            )
            prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
            began_s = time.perf_counter()
            outputs = engine.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - began_s
            reply(seconds=seconds, counts=[len(each.outputs[0].token_ids) for each in outputs])
    except Exception as error:
        reply(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
