"""A registry over HTTP, for tests: what it answers, and with which images, is the test's to say."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HERE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
ELSEWHERE = "arm64" if HERE == "amd64" else "amd64"
PATIENCE = 60
"""Seconds for which a silent registry stays silent, unless it closes before."""
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
REFUSALS = {
    404: ("MANIFEST_UNKNOWN", "manifest unknown"),
    401: ("UNAUTHORIZED", "unauthorized"),
    429: ("TOOMANYREQUESTS", "You have reached your pull rate limit."),
    500: ("UNKNOWN", "something broke"),
}


class Registry:
    """A registry that has every image: one layer, which holds a file that names it."""

    def __init__(self) -> None:
        self.arch = HERE
        self.layer: bytes | None = None  # a tar to be every image's layer instead
        self.answers: list[int] = []  # statuses of the next pulls
        self.always = 200  # status of those after them
        self.silent = ""  # requests for such a part are never answered: "manifests", "blobs"
        self.asked: list[str] = []  # images whose manifest was asked for, in order
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.closing = threading.Event()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if self.silent and self.silent in request.path:
            self.closing.wait(PATIENCE)
        image, _, reference = request.path.removeprefix("/v2/").rpartition("/")
        if not image:
            self.send(request, 200, "application/json", b"{}")
        elif image.endswith("/blobs"):
            self.send(request, 200, "application/octet-stream", self.blobs[reference])
        else:
            self.asked.append(image.removesuffix("/manifests"))
            status = self.answers[0] if self.answers else self.always
            if request.command == "GET" and self.answers:  # a pull is a HEAD, and then a GET in any case
                self.answers.pop(0)
            if status == 200:
                name = image.removesuffix("/manifests")
                if name not in self.manifests:
                    self.manifests[name] = self.manifest(name)
                self.send(request, 200, MANIFEST, self.manifests[name])
            else:
                code, message = REFUSALS[status]
                body = json.dumps({"errors": [{"code": code, "message": message}]}).encode()
                self.send(request, status, "application/json", body)

    def send(self, request: BaseHTTPRequestHandler, status: int, kind: str, body: bytes) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        if kind == MANIFEST:
            request.send_header("Docker-Content-Digest", digest(body))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def manifest(self, image: str) -> bytes:
        archive = self.layer or _naming(image)
        rootfs = {"type": "layers", "diff_ids": [digest(archive)]}
        config = {"architecture": self.arch, "os": "linux", "config": {"Cmd": ["/name"]}, "rootfs": rootfs}
        parts = {
            "config": ("application/vnd.docker.container.image.v1+json", json.dumps(config).encode()),
            "layer": (
                "application/vnd.docker.image.rootfs.diff.tar.gzip",
                gzip.compress(archive, compresslevel=0, mtime=0),
            ),
        }
        found = {}
        for part, (kind, blob) in parts.items():
            self.blobs[digest(blob)] = blob
            found[part] = {"mediaType": kind, "size": len(blob), "digest": digest(blob)}
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": found["config"]}
        return json.dumps({**manifest, "layers": [found["layer"]]}).encode()


def _naming(image: str) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo("name")
        entry.size = len(image)
        tar.addfile(entry, io.BytesIO(image.encode()))
    return archive.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@contextmanager
def serving() -> Iterator[Registry]:
    registry = Registry()
    thread = threading.Thread(target=registry.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield registry
    finally:
        registry.closing.set()
        registry.server.shutdown()
        thread.join()
        registry.server.server_close()
