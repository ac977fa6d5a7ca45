"""Sandboxes in Docker containers.

The SDK creates, starts and removes containers, in worker threads. A tool call never goes through it: the
container's PID 1 is our supervisor, and calls travel over its own connection to this process
(:mod:`sandboxes.streams`, :mod:`sandboxes.wire`). The end of that is the end of the container, both
ways: when this process dies, the supervisor notices and takes every process in the sandbox with it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import docker
import requests
import trio
from docker.errors import APIError, DockerException
from docker.types import Mount, Ulimit

from sandboxes.binaries import binary
from sandboxes.isolation import MASKED_PATHS, READ_ONLY_PATHS, rlimits, shared_memory, sysctls
from sandboxes.protocol import (
    EngineUnavailable,
    ImageUnavailable,
    Limits,
    Sandbox,
    SandboxError,
    SandboxLost,
)
from sandboxes.reaper import OWNER_LABEL, RUN_LABEL, dead, owner_label, remove_orphans, remove_run
from sandboxes.seccomp import docker_profile
from sandboxes.streams import AttachStream, SocketStream, listening, meet
from sandboxes.wire import Session

T = TypeVar("T")

SUPERVISOR = "/.swe-env/init"
"""Where the supervisor appears in the container."""
CLIENT = "/.swe-env/client"
"""Where the socket of its client does, until it has connected."""
SDK_SECONDS = 60
"""Longest silence of the engine in one request [s]."""
TEARDOWN_SECONDS = 10.0
"""Longest that leaving a sandbox waits for its removal [s]; what is left then falls to the reaper."""
THREADS = 16
"""Containers created or removed at once. Starting is the engine's bottleneck; more only queue inside it."""


class DockerEngine:
    """A connection to a Docker engine: a :class:`sandboxes.protocol.Engine`. From :meth:`connect`."""

    def __init__(self, api: Any, address: str, run_id: str, supervisor: Path, sockets: Path) -> None:
        self._api = api
        self._address = address
        self._run_id = run_id
        self._supervisor = supervisor
        self._sockets = sockets
        self._limiter = trio.CapacityLimiter(THREADS)

    @classmethod
    @asynccontextmanager
    async def connect(cls, *, run_id: str) -> AsyncGenerator[DockerEngine]:
        """An engine for the sandboxes of one run; removes dead runs' containers first, this run's at the end.

        Honours `DOCKER_HOST` (a unix or plain tcp address of this machine's engine, because the supervisor
        is mounted from here). Raises :class:`EngineUnavailable`; `SandboxError` without a C compiler.
        """
        address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"

        def open_client() -> Any:
            client: Any = docker.APIClient(base_url=address, timeout=SDK_SECONDS, max_pool_size=2 * THREADS)
            client.ping()
            return client

        try:
            api = await trio.to_thread.run_sync(open_client)
        except (DockerException, requests.RequestException, OSError) as error:
            raise _unreachable(address) from error
        supervisor = await trio.to_thread.run_sync(binary, "supervisor")
        await remove_orphans(api)
        sockets = await trio.to_thread.run_sync(_folder_for_sockets, supervisor.parent)
        try:
            yield cls(api, address, run_id, supervisor, sockets)
        finally:
            with trio.move_on_after(TEARDOWN_SECONDS, shield=True):
                await remove_run(api, run_id)
            shutil.rmtree(sockets, ignore_errors=True)
            api.close()

    @asynccontextmanager
    async def sandbox(
        self,
        image: str,
        *,
        workdir: str,
        limits: Limits,
        env: Mapping[str, str] | None = None,
        network: bool = False,
    ) -> AsyncGenerator[Session]:
        """A started container of `image`, removed on exit (also when cancelled, at any point).

        `workdir` is created if the image lacks it; `env` is added to the image's. Raises
        :class:`ImageUnavailable`, :class:`EngineUnavailable`, or :class:`SandboxLost` when the engine could
        not start it.
        """
        name = f"swe-env-{secrets.token_hex(6)}"  # ours, so that it can be removed whatever create() said
        stream: SocketStream | AttachStream | None = None
        try:
            image_id = await self.image_id(image)
            client = self._sockets / name
            with listening(client) as listener:
                config = self._config(image, workdir, limits, dict(env or {}), client if listener else None)
                attached = stream = AttachStream(await self._thread(lambda: self._start(name, config), image))
                if listener is not None:
                    stream = await meet(listener, attached)
            born = time.time()

            async def why() -> str:
                return await self._why_gone(name, born, attached)

            yield Session(stream, id=name, image_id=image_id, workdir=workdir, why=why)
        finally:
            with trio.move_on_after(TEARDOWN_SECONDS, shield=True):
                if stream is not None:
                    await stream.aclose()
                await trio.to_thread.run_sync(
                    self._remove, name, abandon_on_cancel=True, limiter=self._limiter
                )

    async def commit(self, sandbox: Sandbox, *, tag: str, labels: Mapping[str, str]) -> str:
        """Make the sandbox's files an image `tag` and return its id. Processes are paused meanwhile."""
        # A container's labels pass to its image; with the owner's a stranger's container would be reaped.
        marks = {**labels, RUN_LABEL: "", OWNER_LABEL: ""}
        changes = [f"LABEL {json.dumps(key)}={json.dumps(value)}" for key, value in marks.items()]
        changes += ["ENTRYPOINT []", 'CMD ["sh"]', f"WORKDIR {sandbox.workdir}"]
        repository, _, version = tag.rpartition(":") if ":" in tag.rpartition("/")[2] else (tag, "", "latest")
        made = await self._thread(
            lambda: self._api.commit(sandbox.id, repository=repository, tag=version, changes=changes), tag
        )
        return str(made["Id"])

    async def image_id(self, name: str) -> str:
        """Content digest of an image that is here. Raises :class:`ImageUnavailable`."""
        return str((await self._thread(lambda: self._api.inspect_image(name), name))["Id"])

    async def image_labels(self, name: str) -> dict[str, str]:
        """Labels of an image that is here. Raises :class:`ImageUnavailable`."""
        image = await self._thread(lambda: self._api.inspect_image(name), name)
        return dict(image["Config"].get("Labels") or {})

    def _config(
        self, image: str, workdir: str, limits: Limits, env: dict[str, str], client: Path | None
    ) -> dict[str, Any]:
        mounted = {SUPERVISOR: self._supervisor, **({CLIENT: client} if client else {})}
        host = self._api.create_host_config(
            mounts=[Mount(at, str(path), type="bind", read_only=True) for at, path in mounted.items()],
            network_mode="none",
            # What the supervisor needs to be out of the commands' reach; they get none.
            cap_drop=["ALL"],
            cap_add=["SETUID", "SETGID", "KILL", "CHOWN"],
            security_opt=["no-new-privileges", f"seccomp={docker_profile()}"],
            sysctls=sysctls(limits),
            tmpfs={"/dev/shm": shared_memory(limits)},
            mem_limit=limits.memory,
            memswap_limit=limits.memory,
            nano_cpus=int(limits.cpus * 1e9),
            pids_limit=limits.pids,
            ulimits=[Ulimit(name=name, soft=value, hard=value) for name, value in rlimits(limits).items()],
            log_config={"Type": "none"},
            auto_remove=True,
        )
        # The engine's interface has these two, the SDK does not.
        host = {**host, "MaskedPaths": list(MASKED_PATHS), "ReadonlyPaths": list(READ_ONLY_PATHS)}
        config = self._api.create_container_config(
            image,
            [],
            entrypoint=[SUPERVISOR, *([CLIENT] if client else [])],
            user="0:0",
            working_dir=workdir,
            environment=env,
            stdin_open=True,
            tty=False,
            healthcheck={"test": ["NONE"]},
            labels={RUN_LABEL: self._run_id, OWNER_LABEL: owner_label()},
            host_config=host,
        )
        return {**config, "StdinOnce": True, "AttachStdin": True, "AttachStdout": True, "AttachStderr": True}

    def _start(self, name: str, config: dict[str, Any]) -> socket.socket:
        """In a thread: create, attach, start. Returns the attached connection."""
        self._api.create_container_from_config(config, name)
        raw = self._api.attach_socket(name, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        try:
            if isinstance(getattr(raw, "_sock", raw), ssl.SSLSocket):
                raise EngineUnavailable(
                    f"{self._address} speaks TLS, which sandboxes cannot: use the unix socket"
                )
            connection = socket.socket(fileno=os.dup(raw.fileno()))
        finally:
            raw.close()
        try:
            self._api.start(name)
        except BaseException:
            connection.close()
            raise
        return connection

    def _remove(self, name: str) -> None:
        """In a thread: make sure that the container is gone. Never raises."""
        deadline = time.monotonic() + TEARDOWN_SECONDS
        while time.monotonic() < deadline:
            try:
                self._api.remove_container(name, force=True, v=True)
            except APIError as error:
                if error.status_code == 404:
                    return
                time.sleep(0.01)  # 409: it exited and the engine is removing it; look again
            except (DockerException, requests.RequestException, OSError):
                return
            else:
                return

    async def _thread(self, work: Callable[[], T], image: str) -> T:
        """Run SDK calls in a worker thread and raise this package's errors for the SDK's."""
        try:
            return await trio.to_thread.run_sync(work, limiter=self._limiter)
        except APIError as error:
            raise _explain(error, image) from error
        except (DockerException, requests.RequestException, OSError) as error:
            raise _unreachable(self._address) from error

    async def _why_gone(self, name: str, born: float, stream: AttachStream) -> str:
        """What the engine recorded about the end of a container; "" when it does not say."""
        if stream.complaint:
            return f"its supervisor said: {stream.complaint}"

        def history() -> list[dict[str, Any]]:
            filters = {"container": name, "event": ["oom", "kill", "die"]}
            until = time.time() + 0.2  # the engine's events trail the end of the stream a little
            events = self._api.events(
                since=f"{born - 1:.3f}", until=f"{until:.3f}", filters=filters, decode=True
            )
            return list(cast("list[dict[str, Any]]", events))

        try:
            events = await trio.to_thread.run_sync(history, abandon_on_cancel=True)
        except (DockerException, requests.RequestException, OSError):
            return "the Docker engine is gone: start it again and retry"
        died = next((event for event in events if event["Action"] == "die"), None)
        for event in reversed(events):
            if event["Action"] == "kill":
                signal = event["Actor"]["Attributes"].get("signal")
                return f"its container was killed from outside (signal {signal})"
            # Out of memory usually ends a command, which is that command's business.
            if event["Action"] == "oom" and died and died["timeNano"] - event["timeNano"] < 1e9:
                return "it ran out of memory: raise Limits.memory"
        if died:
            return f"its container exited with status {died['Actor']['Attributes'].get('exitCode')}"
        return ""


def _folder_for_sockets(cache: Path) -> Path:
    """A folder that no other user and no other engine reaches; those of dead ones are removed on the way."""
    sockets = cache / "sockets"
    try:
        sockets.mkdir(exist_ok=True)
        for folder in sockets.iterdir():
            if dead(folder.name.partition(",")[0]):
                shutil.rmtree(folder, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{owner_label()},", dir=sockets))
    except OSError as error:
        raise SandboxError(f"cannot write to {sockets} ({error.strerror}): set XDG_CACHE_HOME") from error


def _explain(error: APIError, image: str) -> SandboxError:
    """The engine's refusal as one of ours, in one line."""
    words = " ".join(str(error.explanation or error).split())[:400]
    if "no space left on device" in words.lower():
        return SandboxLost("the disk of the Docker engine is full: free some, e.g. `docker system prune`")
    if error.status_code == 404 and "image" in words.lower():
        return ImageUnavailable(f"no image {image} here: `docker pull {image}`, or build or load it")
    if error.status_code == 404:
        return SandboxLost(f"the container is gone: {words}")
    if "OCI runtime" in words or "exec format" in words or "executable file" in words:
        return ImageUnavailable(f"image {image} cannot run here: {words}")
    return SandboxLost(f"the Docker engine refused: {words}")


def _unreachable(address: str) -> EngineUnavailable:
    return EngineUnavailable(
        f"no Docker engine answers at {address}: start it with `swe-env engine` or run `swe-env doctor`"
    )
