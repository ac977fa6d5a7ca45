"""Servers that are not what they should be."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STOP = 7
"""The stop token of their answers."""


@contextmanager
def answering(*answers: tuple[int, bytes], delay: float = 0) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives these (status, body) answers in turn, the last for ever; and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status, body = answers[min(len(asked), len(answers)) - 1]
            time.sleep(delay)
            if status == 0:  # hang up without a word
                return
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(
    ids: Any = (5, 6, STOP), logprobs: Any = (-1.0, -0.5, 0.0), reason: str = "stop", spans: Any = None
) -> bytes:
    """An answer of vLLM's shape, as bytes; python's json writes NaN as vLLM would never."""
    content = [{"token_id": token, "logprob": logprob} for token, logprob in zip(ids, logprobs, strict=False)]
    choice = {"index": 0, "token_ids": list(ids), "finish_reason": reason, "logprobs": {"content": content}}
    return json.dumps({"choices": [choice | {"weight_versions": spans}]}).encode()


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}
