"""A Docker engine and a base image on a machine that may have neither.

Two synchronous functions (run them in a worker thread): :func:`ensure_engine` makes an engine answer,
:func:`ensure_base_image` makes the image exist that shipped tasks start from. Both do nothing when there
is nothing to do, and report what they do through `say`. Neither is used once sandboxes run.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import requests
import trio
from docker.errors import DockerException, ImageNotFound

from sandboxes.oci_images import connect_docker
from sandboxes.protocol import NO_DOCKER, EngineUnavailable, ImageUnavailable, Say
from sandboxes.registry import PulledImages

BASE_IMAGE = "swe-env/base:1"
UPSTREAM_IMAGE = "python:3.11-slim-bookworm"

ENGINE_START_SECONDS = 30.0
REGISTRY_SECONDS = 6
"""Longest silence of a registry before the image is built from Debian packages instead."""

DAEMON_LOG = Path("/var/log/swe-env-dockerd.log")
TOOLS = ["git", "patch", "procps", "ca-certificates"]
DEBIAN_PYTHON = ["python3", "python3-pytest", "python-is-python3", "python3-pip", "python3-venv"]
# What CPython builds copied from elsewhere link against.
LIBRARIES = ["libssl3", "libffi8", "libsqlite3-0", "libreadline8", "liblzma5", "libbz2-1.0"]
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def engine_answers() -> bool:
    """Whether a Docker engine answers a ping at the configured address (at most 5 s)."""
    try:
        client = docker.APIClient(base_url=os.environ.get("DOCKER_HOST"), timeout=5)
        try:
            return bool(client.ping())
        finally:
            client.close()
    except (DockerException, requests.RequestException, OSError):
        return False


def connect_engine(for_what: str, *, timeout: int) -> Any:
    """A client of the Docker engine. Raises :class:`EngineUnavailable` if none answers."""
    client = connect_docker(timeout=timeout)
    if client is None:
        raise EngineUnavailable(f"cannot {for_what}: {NO_DOCKER}")
    return client


def ensure_engine(say: Say) -> None:
    """Return once a Docker engine answers, installing and starting Debian's if this process may.

    Blocks for up to a few minutes. Raises :class:`EngineUnavailable` with what to type instead.
    """
    if engine_answers():
        return
    if host := os.environ.get("DOCKER_HOST"):
        raise EngineUnavailable(
            f"no Docker engine answers at DOCKER_HOST={host}: start it or unset DOCKER_HOST"
        )
    if os.geteuid() != 0:
        raise EngineUnavailable(
            "no Docker engine answers: type `sudo systemctl start docker` or `sudo dockerd`"
        )
    if shutil.which("dockerd") is None:
        if not _is_debian():
            raise EngineUnavailable(
                "Docker is not installed: install your distribution's docker package first"
            )
        say("installing Docker and crun from Debian (docker.io, iptables, crun)")
        _apt_install(["docker.io", "iptables", "crun"], EngineUnavailable)
    say("starting the Docker engine")
    if Path("/run/systemd/system").is_dir():
        _command(["systemctl", "start", "docker"], EngineUnavailable, seconds=60)
    else:
        with DAEMON_LOG.open("ab") as log:
            subprocess.Popen(
                ["dockerd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
    deadline = time.monotonic() + ENGINE_START_SECONDS
    while not engine_answers():
        if time.monotonic() > deadline:
            raise EngineUnavailable(
                f"dockerd did not answer within {ENGINE_START_SECONDS:.0f} s: read {DAEMON_LOG}"
            )
        time.sleep(0.2)


def ensure_base_image(say: Say) -> str:
    """Name of an image with Python, pytest, git, patch and procps; made on the first call (1–3 minutes).

    Derived from the public Python image where a registry answers, else put together from the Debian
    packages of this machine's own mirror. Raises :class:`ImageUnavailable` or :class:`EngineUnavailable`.
    """
    client = connect_engine(f"make {BASE_IMAGE}", timeout=900)
    try:
        try:
            client.inspect_image(BASE_IMAGE)
            return BASE_IMAGE
        except ImageNotFound:
            pass
        if not (_pull(say) and _derive(client, say)):
            _build_from_packages(client, say)
        return BASE_IMAGE
    except (requests.RequestException, DockerException) as error:
        raise EngineUnavailable(
            f"the Docker engine failed while {BASE_IMAGE} was made: {_line(error)}"
        ) from error
    finally:
        client.close()


def _pull(say: Say) -> bool:
    """Whether the upstream image is here now. A registry that stays silent counts as absent."""
    say(f"pulling {UPSTREAM_IMAGE}")
    images = PulledImages(lambda _: None, keep_free=1 << 30, tries=1, silence=REGISTRY_SECONDS)
    try:
        trio.run(images.ensure, UPSTREAM_IMAGE)
    except ImageUnavailable:
        say("no registry answers; building from Debian packages instead")
        return False
    return True


def _derive(client: Any, say: Say) -> bool:
    """Whether the base image could be made on the upstream one, which takes Debian's mirror and PyPI."""
    say(f"building {BASE_IMAGE} on {UPSTREAM_IMAGE}")
    dockerfile = "\n".join(
        [
            f"FROM {UPSTREAM_IMAGE}",
            *(f"ENV {name}={value}" for name, value in ENVIRONMENT.items()),
            "RUN apt-get update && apt-get install -y --no-install-recommends "
            f"{' '.join(TOOLS)} && rm -rf /var/lib/apt/lists/* && pip install --no-cache-dir pytest",
        ]
    )
    events: Iterator[dict[str, Any]] = client.build(
        fileobj=io.BytesIO(dockerfile.encode()), tag=BASE_IMAGE, rm=True, forcerm=True, decode=True
    )
    for event in events:
        if "error" in event:
            say(f"that failed ({_line(event['error'])}); building from Debian packages instead")
            return False
    return True


def _build_from_packages(client: Any, say: Say) -> None:
    cure = f"`docker pull {UPSTREAM_IMAGE}` where a registry answers"
    if os.geteuid() != 0 or not _is_debian():
        raise ImageUnavailable(
            f"cannot make {BASE_IMAGE} without a registry except as root on Debian: {cure}"
        )
    if shutil.which("debootstrap") is None:
        say("installing debootstrap")
        _apt_install(["debootstrap"], ImageUnavailable)
    mirror, suite = _apt_source()
    with tempfile.TemporaryDirectory(prefix="swe-env-base-", dir="/var/tmp") as directory:
        root = Path(directory) / "root"
        say(f"building {BASE_IMAGE} from Debian {suite} packages (about a minute)")
        packages = ",".join(DEBIAN_PYTHON + TOOLS + LIBRARIES)
        _command(
            ["debootstrap", "--variant=minbase", f"--include={packages}", suite, str(root), mirror],
            ImageUnavailable,
            seconds=900,
        )
        for waste in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
            shutil.rmtree(root / waste, ignore_errors=True)
        (root / "var/cache/apt/archives/partial").mkdir(parents=True)
        # Behind a proxy that re-signs TLS this machine trusts one authority more: so must pip in the image.
        authorities = Path("/etc/ssl/certs/ca-certificates.crt")
        if authorities.exists():
            shutil.copyfile(authorities, root / authorities.relative_to("/"))
        say("importing the image")
        archive = Path(directory) / "root.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(root, arcname=".")
        repository, tag = BASE_IMAGE.split(":")
        changes = [f"ENV {name}={value}" for name, value in ENVIRONMENT.items()] + ['CMD ["bash"]']
        with archive.open("rb") as stream:
            # An iterator, because the SDK announces the length of a file and then sends it in chunks.
            chunks = iter(lambda: stream.read(1 << 20), b"")
            client.import_image_from_stream(chunks, repository=repository, tag=tag, changes=changes)


def _apt_source() -> tuple[str, str]:
    """Mirror and suite of the first enabled Debian source of this machine."""
    for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        for stanza in path.read_text().split("\n\n"):
            pairs = (
                line.split(":", 1) for line in stanza.splitlines() if ":" in line and line[0] not in "# "
            )
            fields = {key.strip().lower(): value.split() for key, value in pairs}
            if fields.get("enabled") != ["no"] and "deb" in fields.get("types", []) and fields.get("uris"):
                return fields["uris"][0], fields["suites"][0]
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.list"))]:
        for line in path.read_text().splitlines() if path.exists() else []:
            words = [word for word in line.split() if not word.startswith(("[", "signed-by="))]
            if len(words) > 2 and words[0] == "deb":
                return words[1], words[2]
    raise ImageUnavailable("no Debian mirror is configured under /etc/apt: add one, then try again")


def _is_debian() -> bool:
    return Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None


def _apt_install(packages: list[str], error: type[Exception]) -> None:
    _command(["apt-get", "update"], error, seconds=180)
    _command(["apt-get", "install", "-y", "--no-install-recommends", *packages], error, seconds=600)


def _command(argv: list[str], error: type[Exception], *, seconds: float) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise error(
            f"`{argv[0]}` did not finish in {seconds:.0f} s: check the network, then run it by hand"
        ) from late
    if done.returncode != 0:
        raise error(f"`{' '.join(argv)}` failed: {_line(done.stdout.decode('utf-8', 'replace'))}")


def _line(error: object) -> str:
    """Last line that says something, shortened."""
    error = getattr(error, "explanation", None) or error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
