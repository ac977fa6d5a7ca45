"""A SWE-bench instance image, built without a registry from a mirror of the repository.

Most people pull these images; this is for those who cannot, or who made rows of their own. The base image
gets a Python of the right version (copied from this machine unless it is the image's own), the repository
with nothing newer than its base commit, and the environment that the row's `build_*` columns describe.
The result can run the row's evaluation script without a network; that it can is tried before it is tagged.

Synchronous and slow (half a minute to a few). As a module it is a command that can be interrupted:
`python -m tasks.swebench_image` reads a :class:`BuildRequest` as JSON, prints what it does, and leaves
nothing half done behind. Projects with C extensions need a `base_image` that has a compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

import requests
from docker.errors import APIError, DockerException, ImageNotFound
from pydantic import BaseModel

from sandboxes.engine import connect_engine
from sandboxes.protocol import EngineUnavailable, ImageUnavailable, Say
from tasks.host_python import HostPython, find_python
from tasks.image_recipe import ACTIVATE, FINAL_ENV, build_script, check_script

LABEL = "swe-env.recipe"
"""On images built here: hash of all that went in. An image that carries the same one is not built again."""

FREE_BYTES = 4 << 30
"""Room that a build must find at the engine's data directory."""

SILENCE_SECONDS = 1800
"""Longest time that a build may print nothing (one compilation)."""

AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")


REFUSED, NO_ENGINE = 3, 4
"""Exit codes of the command: the image cannot be had, the engine does not answer."""


class BuildRequest(BaseModel):
    """One image to build: the arguments of :func:`build_image`."""

    row: dict[str, Any]
    repo_mirror: Path
    base_image: str
    python: Path | None = None


def require_buildable(row: Mapping[str, Any], repo_mirror: Path) -> None:
    """Raise :class:`ImageUnavailable` if a row's columns or its clone are missing. Takes no time."""
    for column in ("image", "base_commit", "build_python"):
        _column(row, column)
    find_mirror(_column(row, "repo"), repo_mirror)


def build_image(
    row: Mapping[str, Any], repo_mirror: Path, base_image: str, say: Say, *, python: Path | None = None
) -> str:
    """Build the image of one row (unless it is there) and return its name, which is `row["image"]`.

    `repo_mirror` is a clone that has the base commit, or a folder of clones (`owner+name/repo`,
    `owner__name`, `owner/name` or `name`, with or without `.git`). An image of that name that was not built
    here is left alone and used. Raises :class:`ImageUnavailable`, or :class:`EngineUnavailable`, in one line.
    """
    name, version = _column(row, "image"), _column(row, "build_python")
    client = connect_engine(f"build {name}", timeout=SILENCE_SECONDS)
    try:
        try:
            base = str(client.inspect_image(base_image)["Id"])
        except ImageNotFound:
            raise ImageUnavailable(
                f"base image {base_image} does not exist here: build or pull it first"
            ) from None
        recipe = _hash(row, base, version)
        with _only_builder(name, say) as log:
            if _is_built(client, name, recipe, say):
                return name
            _require_space(client)
            mirror = find_mirror(_column(row, "repo"), repo_mirror)
            own = _run_once(
                client, base_image, ["python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            )
            interpreter, parent = "python3", base_image
            if own != version:
                host = find_python(version, python)
                interpreter, parent = str(host.executable), _python_image(client, host, base_image, base, say)
            with tempfile.TemporaryDirectory(prefix="swe-env-image-") as folder:
                git = Path(folder) / "repository.git"
                say(f"{name}: taking {row['repo']} at {row['base_commit'][:10]} from {mirror}")
                _copy_history(mirror, _column(row, "base_commit"), git)
                requires = _build_requires(git, _column(row, "base_commit"))
                say(f"{name}: installing with Python {version}")
                context = _instance_context(
                    Path(folder), git, parent, build_script(row, interpreter, requires), row
                )
                _build(client, context, name, {LABEL: recipe}, log)
        say(f"{name}: built")
        return name
    except (requests.RequestException, DockerException) as error:
        raise EngineUnavailable(
            f"the Docker engine failed while {name} was built: {_last_line(str(error))}"
        ) from error
    finally:
        client.close()


def find_mirror(repo: str, place: Path) -> Path:
    """The clone of `owner/name` at or below `place`. Raises :class:`ImageUnavailable`."""
    owner, _, name = repo.rpartition("/")
    tried = [place]
    for stem in (f"{owner}+{name}/repo", f"{owner}__{name}", f"{owner}/{name}", name):
        tried += [place / stem, place / f"{stem}.git"]
    for candidate in tried:
        for directory in (candidate, candidate / ".git"):
            if (directory / "HEAD").is_file() and (directory / "objects").is_dir():
                return directory
    raise ImageUnavailable(
        f"no clone of {repo} at or below {place}: `git clone --bare` it there as {owner}__{name}.git"
    )


def _is_built(client: Any, name: str, recipe: str, say: Say) -> bool:
    try:
        labels = cast(dict[str, str], client.inspect_image(name)["Config"].get("Labels") or {})
    except ImageNotFound:
        return False
    if LABEL not in labels:
        say(f"{name}: exists and was not built here; using it as it is")
    return labels.get(LABEL, recipe) == recipe


def _hash(row: Mapping[str, Any], base: str, version: str) -> str:
    relevant = {key: value for key, value in row.items() if key.startswith("build_")}
    relevant |= {key: row[key] for key in ("repo", "base_commit")}
    scripts = [build_script(row, "python", []), check_script(row), ACTIVATE, FINAL_ENV]
    return hashlib.sha256(json.dumps([relevant, scripts, base, version], sort_keys=True).encode()).hexdigest()


def _python_image(client: Any, host: HostPython, base_image: str, base: str, say: Say) -> str:
    """The base image with an interpreter of this machine laid in: shared by all instances that want it."""
    check = f"{host.executable} -c 'import ssl, sqlite3, zlib, ctypes, ensurepip'"
    # Without its bytecode every start of the interpreter would compile what it imports.
    compiled = f"{host.executable} -m compileall -q {host.library} || true"
    dockerfile = f"FROM {base_image}\nCOPY python/ /\nRUN {check} && {{ {compiled}; }}\n"
    recipe = hashlib.sha256(f"{base} {host.version} {dockerfile}".encode()).hexdigest()
    name = f"swe-env/python-{host.version}:{recipe[:12]}"
    with _only_builder(name, say) as log, tempfile.TemporaryDirectory(prefix="swe-env-python-") as folder:
        if _is_built(client, name, recipe, say):
            return name
        say(f"{name}: copying {host.prefix}")
        archive = Path(folder) / "context.tar"
        with tarfile.open(archive, "w") as tar:
            for path in host.files():
                tar.add(path, f"python/{path.relative_to('/')}", recursive=False, filter=_as_root)
            _add(tar, "Dockerfile", dockerfile)
        _build(client, archive, name, {LABEL: recipe}, log)
    return name


def _instance_context(folder: Path, git: Path, parent: str, script: str, row: Mapping[str, Any]) -> Path:
    archive = folder / "context.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(git, "repository.git", filter=_as_root)
        _add(tar, "build/activate", ACTIVATE)
        _add(tar, "build/build.sh", script)
        _add(tar, "build/check.sh", check_script(row))
        # A machine behind a proxy that re-signs TLS trusts its own authority: so must pip while it builds.
        trust = ""
        if AUTHORITIES.is_file():
            _add(tar, "build/authorities.crt", AUTHORITIES.read_text())
            names = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
            trust = (
                "export " + " ".join(f"{name}=/opt/swe-env-build/authorities.crt" for name in names) + " && "
            )
        environment = " ".join(f"{key}={value}" for key, value in FINAL_ENV.items())
        _add(
            tar, "Dockerfile",
            f"FROM {parent}\n"
            "COPY repository.git /testbed/.git\n"
            "COPY build /opt/swe-env-build\n"
            "WORKDIR /testbed\n"
            f"RUN {trust}bash /opt/swe-env-build/build.sh\n"
            f"ENV {environment}\n"
            "RUN bash /opt/swe-env-build/check.sh && rm -r /opt/swe-env-build\n",
        )  # fmt: skip
    return archive


def _copy_history(mirror: Path, commit: str, git: Path) -> None:
    """A bare repository with what is reachable from `commit`, its tags, and nothing else."""
    if _git(mirror, "cat-file", "-t", commit, check=False) != "commit":
        raise ImageUnavailable(
            f"{mirror} has no commit {commit}: `git -C {mirror} fetch origin {commit}`, or fetch all"
        )
    tags = _git(mirror, "tag", "--merged", commit).split()
    subprocess.run(
        ["git", "init", "--quiet", "--bare", "--template=", str(git)], check=True, capture_output=True
    )
    wanted = [f"{commit}:refs/heads/main", *(f"refs/tags/{tag}:refs/tags/{tag}" for tag in tags)]
    _git(git, "fetch", "--quiet", "--no-tags", "--stdin", str(mirror), stdin="\n".join(wanted) + "\n")
    _git(git, "symbolic-ref", "HEAD", "refs/heads/main")
    _git(git, "config", "core.bare", "false")
    (git / "FETCH_HEAD").unlink(missing_ok=True)


def _build_requires(git: Path, commit: str) -> list[str]:
    """`build-system.requires` of the project, empty when it has none that can be read."""
    try:
        project = tomllib.loads(_git(git, "show", f"{commit}:pyproject.toml", check=False))
    except tomllib.TOMLDecodeError:
        return []
    wanted = cast(dict[str, Any], project.get("build-system", {})).get("requires", [])
    return [str(item) for item in cast(list[object], wanted)] if isinstance(wanted, list) else []


def _git(directory: Path, *arguments: str, stdin: str = "", check: bool = True) -> str:
    """Output of git in a repository that may belong to another user."""
    settings = {"safe.directory": "*", "uploadpack.allowAnySHA1InWant": "true", "gc.auto": "0"}
    environment = os.environ | {
        "GIT_CONFIG_COUNT": str(len(settings)),
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }
    for number, (key, value) in enumerate(settings.items()):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    done = subprocess.run(
        ["git", f"--git-dir={directory}", *arguments],
        input=stdin.encode(), capture_output=True, env=environment, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return done.stdout.decode("utf-8", "replace").strip()
    if check:
        reason = _last_line(done.stderr.decode("utf-8", "replace"))
        raise ImageUnavailable(f"git {arguments[0]} failed in {directory}: {reason}: is the clone complete?")
    return ""


@contextmanager
def _only_builder(name: str, say: Say) -> Generator[TextIO]:
    """The log of an image's build, among the temporary files. Who has it is the only one that builds it.

    It is removed at the end, unless the block raises with something in it.
    """
    path = Path(tempfile.gettempdir()) / f"swe-env-build-{name.replace('/', '_').replace(':', '_')}.log"
    while True:
        with path.open("a+", encoding="utf-8") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"{name}: waiting for another process that builds it")
                fcntl.flock(log, fcntl.LOCK_EX)
            if not (path.exists() and path.samefile(f"/proc/self/fd/{log.fileno()}")):
                continue  # who had it has removed it
            log.truncate(0)
            try:
                yield log
            except BaseException:
                log.flush()
                if not path.stat().st_size:
                    path.unlink()
                raise
            path.unlink()
            return


def _build(client: Any, context: Path, name: str, labels: dict[str, str], log: TextIO) -> None:
    """Run a Dockerfile; its whole output goes to the log."""
    replaced = [image["Id"] for image in client.images(name, filters={"label": list(labels)})]
    failure, layer = "", ""
    with context.open("rb") as stream:
        events: Iterator[dict[str, Any]] = client.build(
            fileobj=stream, custom_context=True, tag=name, labels=labels, rm=True, forcerm=True, decode=True
        )
        for event in events:
            line = str(event.get("stream", ""))
            log.write(re.sub(r"\x1b\[[0-9;]*m|Removing intermediate container \w+\n", "", line))
            if made := re.match(r" ---> ([0-9a-f]{12})$", line.rstrip()):
                layer = made.group(1)
            failure = str(event.get("error", failure))
    # Nobody else will remove what has no name: layers of a failed build, an image that lost its name.
    for leftover in filter(None, [layer] if failure else replaced):
        with suppress(APIError):  # not there, or a container runs on it
            if not client.inspect_image(leftover)["RepoTags"]:
                client.remove_image(leftover)
    if not failure:
        return
    log.seek(0)
    text = log.read()
    errors = [line for line in text.splitlines() if line.lower().startswith(("error", "fatal", "e: "))]
    reason = _last_line("\n".join(errors) or text) if text else failure
    raise ImageUnavailable(
        f"cannot build {name}: {reason} (all of it in {log.name}); mend the row or the base image"
    )


def _run_once(client: Any, image: str, command: list[str]) -> str:
    """Standard output of a short trusted command in a container that is gone afterwards."""
    container = client.create_container(image, command, network_disabled=True)["Id"]
    try:
        client.start(container)
        client.wait(container, timeout=60)
        return client.logs(container, stdout=True, stderr=False).decode("utf-8", "replace").strip()
    finally:
        client.remove_container(container, force=True)


def _require_space(client: Any) -> None:
    root = Path(str(client.info().get("DockerRootDir", "")))
    if root.is_dir() and (free := shutil.disk_usage(root).free) < FREE_BYTES:
        raise ImageUnavailable(
            f"{free >> 20} MiB free at {root}, but a build needs {FREE_BYTES >> 20}: try `docker image prune`"
        )


def _column(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise ImageUnavailable(
            f"row {row.get('instance_id', '?')} lacks column {name!r}, needed to build its image"
        )
    return value


def _add(tar: tarfile.TarFile, name: str, text: str) -> None:
    info = tarfile.TarInfo(name)
    data = text.encode()
    info.size, info.mode = len(data), 0o644
    tar.addfile(info, io.BytesIO(data))


def _as_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"


def main() -> None:
    """The command: one line on standard error and exit code 3 or 4 where no image comes of it."""
    # a build stops as it does on Ctrl-C, whoever asks
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    request = BuildRequest.model_validate_json(sys.stdin.buffer.read())
    try:
        build_image(
            request.row,
            request.repo_mirror,
            request.base_image,
            lambda line: print(line, flush=True),
            python=request.python,
        )
    except (ImageUnavailable, EngineUnavailable) as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED if isinstance(error, ImageUnavailable) else NO_ENGINE)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
