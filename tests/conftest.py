"""What is made once a session: the base image for tests marked `docker`, a served tiny model for `vllm`."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import trio

from sandboxes.docker import DockerEngine
from sandboxes.engine import ensure_base_image, ensure_engine
from sandboxes.oci import OciEngine
from sandboxes.oci_machine import lacking
from sandboxes.protocol import Engine
from swe_env.serve import Server, serve

if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # the other worker has threads too, and they would wait for each other
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

CONTEXT = 8192
"""Tokens a shared server takes: prompt and completion together."""


MAKE_MODELS = """
import sys
from pathlib import Path
from trainer.tiny_model import make_tiny_model

for shape in ("glm", "qwen", "llama"):
    make_tiny_model(Path(sys.argv[1]) / shape, shape=shape)
"""


@dataclass(frozen=True)
class RunningModel:
    url: str
    model_dir: Path
    context: int


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI nothing may be skipped or expected to fail: what this machine lacks there is a failure."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    excused = reporter and any(reporter.stats.get(how) for how in ("skipped", "xfailed", "xpassed"))
    if excused and os.environ.get("SWE_ENV_NO_SKIPS"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


Backend = Literal["docker", "oci"]
LACKING = lacking()
needs_oci = pytest.mark.skipif(bool(LACKING), reason=LACKING)


@pytest.fixture(params=["docker", "oci"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend in turn: what holds for one must hold for all."""
    if request.param == "oci" and LACKING:
        pytest.skip(LACKING)
    return request.param


@pytest.fixture
def unmappable(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system whose ids no kernel maps."""
    there, *parts = (tmp_path / name for name in ("there", "lower", "upper", "work"))
    for folder in (there, *parts):
        folder.mkdir()
    options = "lowerdir={},upperdir={},workdir={}".format(*parts)
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", there], check=True)
    yield there
    subprocess.run(["umount", there], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mounted)], check=True)
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


@asynccontextmanager
async def connected(backend: Backend, run_id: str) -> AsyncGenerator[Engine]:
    if backend == "docker":
        async with DockerEngine.connect(run_id=run_id) as engine:
            yield engine
    else:
        async with OciEngine.connect() as engine:
            yield engine


@pytest.fixture(scope="session")
def base_image() -> str:
    """The image of shipped tasks (made on the first use, about a minute)."""
    ensure_engine(print)
    return ensure_base_image(print)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one tiny random model a family: glm, qwen, llama."""
    models = tmp_path_factory.mktemp("models")
    # in a process of its own: torch stays out of this one
    subprocess.run([sys.executable, "-c", MAKE_MODELS, str(models)], check=True, timeout=120)
    return models


@pytest.fixture(scope="session")
def tiny_glm(tiny_models: Path) -> Path:
    """A tiny random GLM-4.5-shaped model directory (float32)."""
    return tiny_models / "glm"


@pytest.fixture(scope="session")
def glm_server(tiny_glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningModel]:
    """vLLM serving `tiny_glm` as `policy`; about half a minute at the first use."""
    with running(tiny_glm, tmp_path_factory.mktemp("vllm") / "server.log") as server:
        yield RunningModel(server.url, tiny_glm, CONTEXT)


@contextmanager
def running(model_dir: Path, log_path: Path, extra_args: Sequence[str] = ()) -> Iterator[Server]:
    """`serve` for synchronous tests: its trio loop lives in a thread until the block is left."""
    started: queue.Queue[tuple[Server, trio.Event, trio.lowlevel.TrioToken] | BaseException] = queue.Queue()

    async def keep() -> None:
        async with serve(
            model_dir, log_path=log_path, max_model_len=CONTEXT, extra_args=extra_args
        ) as server:
            stop = trio.Event()
            started.put((server, stop, trio.lowlevel.current_trio_token()))
            await stop.wait()

    def body() -> None:
        try:
            trio.run(keep)
        except BaseException as error:  # handed to the test
            started.put(error)

    thread = threading.Thread(target=body, name="vllm")
    thread.start()
    outcome = started.get(timeout=400)
    if isinstance(outcome, BaseException):
        raise outcome
    server, stop, token = outcome
    try:
        yield server
    finally:
        trio.from_thread.run_sync(stop.set, trio_token=token)
        thread.join(timeout=30)


def git(directory: Path, *arguments: str) -> str:
    """git with a fixed author, free of the user's configuration."""
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "init.defaultBranch=main")
    return subprocess.check_output(["git", "-C", str(directory), *identity, *arguments], text=True).strip()


SETUP = "from setuptools import setup\nsetup(name='thing', version='1', py_modules=['thing'])\n"
BROKEN, FIXED = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
OLD_TEST = "from thing import add\n\n\ndef test_zero():\n    assert add(4, 0) == 4\n"
NEW_TEST = OLD_TEST + "\n\ndef test_add():\n    assert add(2, 3) == 5\n"


@pytest.fixture(scope="session")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a bug, whose next commit fixes it."""
    root = tmp_path_factory.mktemp("mirrors") / "owner__thing"
    root.mkdir()
    git(root, "init", "-q")
    files = {"setup.py": SETUP, "thing.py": BROKEN, "test_thing.py": OLD_TEST, ".gitignore": "*.egg-info\n"}
    for name, text in files.items():
        (root / name).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "It adds")
    git(root, "tag", "v1")
    (root / "thing.py").write_text(FIXED)
    (root / "test_thing.py").write_text(NEW_TEST)
    git(root, "commit", "-qam", "The secret fix")
    git(root, "tag", "v2")
    return root


def thing_row(mirror: Path, image: str) -> dict[str, Any]:
    """A SWE-bench row of that repository: the fix, with a test that it makes pass."""
    base = git(mirror, "rev-parse", "v1")
    test_patch = git(mirror, "diff", "v1", "v2", "--", "test_thing.py") + "\n"
    script = f"""#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
python -m pip install -e .
git checkout {base} test_thing.py
git apply -v - <<'EOF'
{test_patch}EOF
: '>>>>> Start Test Output'
pytest -rA test_thing.py
: '>>>>> End Test Output'
git checkout {base} test_thing.py
"""
    return {
        "instance_id": "owner__thing-1",
        "repo": "owner/thing",
        "base_commit": base,
        "problem_statement": "It does not add.",
        "patch": git(mirror, "diff", "v1", "v2", "--", "thing.py") + "\n",
        "test_patch": test_patch,
        "version": "1",
        "FAIL_TO_PASS": ["test_thing.py::test_add"],
        "PASS_TO_PASS": ["test_thing.py::test_zero"],
        "image": image,
        "eval_script": script,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "build_python": "3.11",
        "build_install": "python -m pip install -e .",
        "build_pip_packages": ["pytest"],
    }
