"""What the daemonless backend adds: snapshots and forks, life without an engine, and leaving nothing."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from sandboxes import oci, oci_images, oci_machine, oci_place
from sandboxes.backends import connect
from sandboxes.oci import OciEngine, OciSandbox
from sandboxes.oci_machine import controllers, lacking, runtime
from sandboxes.oci_place import remove_cgroups
from sandboxes.protocol import ChangesUnreadable, EngineUnavailable, ImageUnavailable, Limits, SandboxLost
from sandboxes.reaper import OWNER_LABEL, owner_label
from tests.conftest import needs_oci
from tests.sandboxes.conftest import REPOSITORY, WORKDIR, own_containers

pytestmark = [pytest.mark.docker, needs_oci]

T = TypeVar("T")


def in_engine(body: Callable[[OciEngine], Awaitable[T]], **options: Path) -> T:
    async def main() -> T:
        with trio.fail_after(60):
            async with OciEngine.connect(**options) as engine:
                return await body(engine)

    return trio.run(main)


def in_sandbox(image: str, body: Callable[[OciSandbox], Awaitable[T]]) -> T:
    async def inside(engine: OciEngine) -> T:
        async with engine.sandbox(image, workdir=WORKDIR, limits=Limits()) as sandbox:
            return await body(sandbox)

    return in_engine(inside)


# ---- snapshot and fork -----------------------------------------------------------------------------------


def test_a_fork_has_the_files_directory_and_environment_and_goes_its_own_way(base_image: str) -> None:
    async def body(sandbox: OciSandbox) -> None:
        await sandbox.run("mkdir 'a b'; cd 'a b'; export X=$'one\\ntwo'; echo parent >file; rm /etc/hostname")
        async with sandbox.fork() as child:
            assert (await child.run('pwd; echo "$X"; cat file; ls /etc/hostname')).text.startswith(
                f"{WORKDIR}/a b\none\ntwo\nparent\nls: cannot access"
            )
            await child.run("echo child >file")
            await sandbox.run("echo later >>file")
            assert await child.read(f"{WORKDIR}/a b/file") == b"child\n"
        assert await sandbox.read(f"{WORKDIR}/a b/file") == b"parent\nlater\n"

    in_sandbox(base_image, body)


def test_a_fork_of_a_fork_has_what_the_first_was_started_with_and_what_was_unset(base_image: str) -> None:
    show = "echo ${A-none} ${B-none} ${C-none} $PWD"

    async def body(engine: OciEngine) -> list[str]:
        given = {"A": "a", "B": "b"}
        async with (
            engine.sandbox(base_image, workdir=WORKDIR, limits=Limits(), env=given) as first,
            first.fork() as second,
        ):
            said = [(await second.run(show)).text]
            await second.run("unset B; C=not-exported; cd /usr")
            async with second.fork() as third:
                said += [(await third.run(show)).text, (await third.run(show, session=False)).text]
        return said

    assert in_engine(body) == [
        f"a b none {WORKDIR}\n",
        "a none none /usr\n",
        f"a b none {WORKDIR}\n",  # outside of the session
    ]


def test_any_number_of_sandboxes_start_from_a_snapshot(base_image: str) -> None:
    async def body(engine: OciEngine) -> list[str]:
        async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox:
            await sandbox.run(
                "echo expensive >result; chmod 4755 result; chown 7:8 result; ln -s /nowhere link"
            )
            snapshot = await sandbox.snapshot()
        seen: list[str] = []

        async def look() -> None:
            async with engine.sandbox(snapshot, workdir=WORKDIR, limits=Limits()) as child:
                seen.append((await child.run("cat result; stat -c '%a %u %g' result; readlink link")).text)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(look)
        return seen

    assert in_engine(body) == ["expensive\n4755 0 0\n/nowhere\n"] * 5


def test_a_snapshot_without_a_name_goes_with_its_engine(base_image: str, tmp_path: Path) -> None:
    async def body(engine: OciEngine) -> None:
        async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox:
            await sandbox.run("echo x >file")
            await sandbox.snapshot()
        assert list(tmp_path.glob(f"snapshots/*/*{WORKDIR}/file"))

    in_engine(body, state=tmp_path)
    assert not list(tmp_path.glob("snapshots/*/*"))


def test_a_snapshot_of_a_fork_lives_on_when_the_fork_has_ended(base_image: str, tmp_path: Path) -> None:
    tag = "swe-env/test-of-a-fork:1"

    async def look(engine: OciEngine, image: str) -> str:
        async with engine.sandbox(image, workdir=WORKDIR, limits=Limits()) as sandbox:
            return (await sandbox.run("cat parent child")).text

    async def body(engine: OciEngine) -> str:
        async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as parent:
            await parent.run("echo old >parent")
            async with parent.fork() as child:
                await child.run("echo new >child")
                snapshot = await child.snapshot()
                await engine.commit(child, tag=tag, labels={})
        return await look(engine, snapshot)

    assert in_engine(body, state=tmp_path) == "old\nnew\n"
    assert in_engine(lambda engine: look(engine, tag), state=tmp_path) == "old\nnew\n"


def test_what_is_too_deep_for_a_path_is_not_left_out_of_a_snapshot_unsaid(base_image: str) -> None:
    async def body(sandbox: OciSandbox) -> None:
        await sandbox.run("for i in {1..25}; do mkdir $(printf 'n%.0s' {1..200}); cd n*; done; touch leaf")
        with pytest.raises(ChangesUnreadable, match="File name too long"):
            await sandbox.snapshot()

    in_sandbox(base_image, body)


def test_processes_are_paused_and_not_copied_by_a_snapshot(base_image: str) -> None:
    async def body(engine: OciEngine) -> None:
        async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox:
            await sandbox.run(
                "(i=0; while true; do i=$((i+1)); echo $i >>a; sleep 0.01; done) >/dev/null 2>&1 &"
                "until test -s a; do sleep 0.01; done"
            )
            snapshot = await sandbox.snapshot()
            first = await sandbox.read("a")
            with trio.fail_after(10):  # it goes on afterwards
                while await sandbox.read("a") == first:
                    await trio.sleep(0.1)
            async with engine.sandbox(snapshot, workdir=WORKDIR, limits=Limits()) as child:
                assert (await child.run("ps -e --no-headers | grep -vc ' ps$'")).text.strip() <= "3"

    in_engine(body)


# ---- without Docker --------------------------------------------------------------------------------------


def test_an_image_known_once_runs_without_an_engine(
    base_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(engine: OciEngine) -> str:
        async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox:
            return (await sandbox.run("echo here")).text

    assert in_engine(body, state=tmp_path) == "here\n"
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    assert in_engine(body, state=tmp_path) == "here\n"
    with pytest.raises(ImageUnavailable, match="no Docker engine to ask"):
        in_engine(body, state=tmp_path / "empty")


def test_layers_that_cannot_be_reached_are_exported_once(
    base_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci_images, "reachable_layers", lambda about: None)

    async def body(engine: OciEngine) -> str:
        async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox:
            return (await sandbox.run("python3 -c 'print(6 * 7)'; stat -c %u /usr/bin/su")).text

    assert in_engine(body, state=tmp_path) == "42\n0\n"
    [layer] = (tmp_path / "layers").iterdir()
    made = layer.stat().st_ctime_ns
    assert in_engine(body, state=tmp_path) == "42\n0\n"
    assert layer.stat().st_ctime_ns == made


def test_where_the_store_cannot_serve_layers_the_cure_is_another_or_the_other_backend(
    unmappable: Path,
) -> None:
    async def body(engine: OciEngine) -> None: ...

    with pytest.raises(EngineUnavailable, match=r"cannot map the ids of .*: set SWE_ENV_STATE .* docker"):
        in_engine(body, state=unmappable / "not/yet/made")


def test_layers_of_docker_that_cannot_be_used_where_they_lie_are_copied(unmappable: Path) -> None:
    about = {"GraphDriver": {"Name": "overlay2", "Data": {"UpperDir": str(unmappable)}}}
    assert oci_images.reachable_layers(about) is None
    about["GraphDriver"]["Data"] = {"UpperDir": str(unmappable.parent)}
    assert oci_images.reachable_layers(about) == [str(unmappable.parent)]


def test_a_layer_that_was_removed_meanwhile_is_said_in_one_line(base_image: str, tmp_path: Path) -> None:
    async def body(engine: OciEngine) -> None:
        async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox:
            await sandbox.run("echo x >file")
            snapshot = await sandbox.snapshot()
        for layer in tmp_path.glob("snapshots/*/*"):
            layer.rename(tmp_path / "elsewhere")
        with pytest.raises(SandboxLost, match=r"cannot open the layer .*: No such file"):
            async with engine.sandbox(snapshot, workdir=WORKDIR, limits=Limits()):
                pass

    in_engine(body, state=tmp_path)


def test_an_image_that_was_built_again_is_found_as_it_is_now(base_image: str, tmp_path: Path) -> None:
    name = f"swe-env-test-{os.getpid()}:1"

    def build(text: str) -> None:
        dockerfile = f"FROM {base_image}\nRUN echo {text} >/text\n".encode()
        subprocess.run(
            ["docker", "build", "-qt", name, "-"], input=dockerfile, check=True, capture_output=True
        )

    async def body(engine: OciEngine) -> list[str]:
        seen: list[str] = []
        for text in ("first", "second"):
            await trio.to_thread.run_sync(build, text)
            await engine.image_id(name)
            async with engine.sandbox(name, workdir=WORKDIR, limits=Limits()) as sandbox:
                seen.append((await sandbox.read("/text")).decode().strip())
        return seen

    try:
        assert in_engine(body, state=tmp_path) == ["first", "second"]
    finally:
        subprocess.run(["docker", "rmi", "-f", name], capture_output=True, check=False)


def test_nothing_pins_an_image_when_its_engine_is_gone(base_image: str, tmp_path: Path) -> None:
    """Several sandboxes that start at once share the container that pins their image."""

    async def body(engine: OciEngine) -> int:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(engine.image_id, base_image)
        return len(own_containers(f"{OWNER_LABEL}={owner_label()}"))

    assert in_engine(body, state=tmp_path) == 1
    assert own_containers(f"{OWNER_LABEL}={owner_label()}") == []


def test_a_docker_that_hangs_does_not_hold_up_the_end(
    base_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pins the image is left to the reaper: Ctrl-C must be over within 5 s."""

    async def leaving() -> float:
        async with OciEngine.connect(state=tmp_path / "state") as engine:
            await engine.image_id(base_image)
            monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/silent.sock")
            began = trio.current_time()
        return trio.current_time() - began

    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/silent.sock")
        silent.listen()
        assert trio.run(leaving) < 5
    monkeypatch.delenv("DOCKER_HOST")
    [pin] = own_containers(f"{OWNER_LABEL}={owner_label()}")
    subprocess.run(["docker", "rm", "-f", pin], capture_output=True, check=True)


def test_what_sandboxes_wrote_is_out_of_other_users_reach(base_image: str, tmp_path: Path) -> None:
    """A set-user-id file in a layer would be root's on this machine."""
    state = tmp_path / "state"

    async def body(engine: OciEngine) -> None:
        async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox:
            await sandbox.run("cp /bin/sh sh; chmod 4755 sh")
            await sandbox.snapshot()
        [shell] = state.glob(f"snapshots/*/*{WORKDIR}/sh")
        assert shell.stat().st_mode & 0o4000
        assert all(folder.stat().st_mode & 0o077 == 0 for folder in state.iterdir() if folder.is_dir())

    state.mkdir(mode=0o755)
    in_engine(body, state=state)
    assert state.stat().st_mode & 0o777 == 0o755  # it was there, and may be home to other things


# ---- loss, and leaving nothing ---------------------------------------------------------------------------


def leftovers() -> list[str]:
    """Directories, control groups, mounts and processes of sandboxes whose owner is dead."""
    groups = [str(path) for path in oci_machine.CGROUPS.glob("*/swe-env/*/*") if path.is_dir()]
    groups += [str(path) for path in oci_machine.CGROUPS.glob("swe-env/*/*") if path.is_dir()]
    homes = [str(path) for path in oci_place.RUN.glob("*/*-*")]
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if "/run/swe-env" in line]
    return groups + homes + mounts


@pytest.mark.parametrize("after", [0.0, 0.005, 0.02, 0.05, 0.1])
def test_cancelling_at_any_moment_leaves_nothing(base_image: str, after: float) -> None:
    async def body(engine: OciEngine) -> None:
        with trio.move_on_after(after):
            async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()):
                await trio.sleep_forever()
        assert [line for line in leftovers() if f"/{engine.number}/" in line] == []

    in_engine(body)


def test_a_killed_runtime_is_a_lost_sandbox_within_a_second(base_image: str) -> None:
    async def body(sandbox: OciSandbox) -> float:
        killed = 0.0

        async def kill() -> None:
            nonlocal killed
            await trio.sleep(0.3)
            killed = time.monotonic()
            for pid in sandbox.pids():
                with suppress(ProcessLookupError):  # the others may have gone with the first
                    os.kill(pid, signal.SIGKILL)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            with pytest.raises(SandboxLost, match="it was killed"):
                await sandbox.run("sleep 60")
        with pytest.raises(SandboxLost):
            await sandbox.run("true")
        return time.monotonic() - killed

    assert in_sandbox(base_image, body) < 1


CLIENT = """
import sys, trio
from sandboxes.oci import OciEngine
from sandboxes.protocol import Limits

async def one(engine):
    while True:
        async with engine.sandbox(sys.argv[1], workdir="/work", limits=Limits()) as sandbox:
            await sandbox.run("sleep 7777 & echo $RANDOM >file; sleep 0.05", timeout=5)

async def main():
    async with OciEngine.connect() as engine:
        print(engine.number, flush=True)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(one, engine)

trio.run(main)
"""


@pytest.mark.parametrize("seed", range(5))
def test_a_client_killed_at_a_random_moment_leaves_nothing_after_the_next_start(
    base_image: str, seed: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, base_image], stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as client:
        try:
            assert client.stdout is not None
            number = client.stdout.readline().decode().strip()
            time.sleep(random.Random(seed).uniform(0, 0.5))
            if seed % 2:  # the runtimes, too
                runtimes = subprocess.run(
                    ["pgrep", "-P", str(client.pid)], capture_output=True, text=True, check=False
                )
                for pid in runtimes.stdout.split():
                    with suppress(ProcessLookupError):  # it has ended by itself
                        os.kill(int(pid), signal.SIGKILL)
        finally:
            client.kill()

    async def left(engine: OciEngine) -> list[str]:
        return [line for line in leftovers() if f"/{number}/swe-env-" in line]

    deadline = time.monotonic() + 5
    # a child of the client that was between fork and exec holds the lock a moment longer
    while in_engine(left) or b"sleep\x007777" in b"".join(_command_lines()):
        assert time.monotonic() < deadline, (in_engine(left), "a sandbox outlived its owner")
        time.sleep(0.05)


def _command_lines() -> Iterator[bytes]:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield file.read_bytes()
        except OSError:
            continue


def test_a_client_killed_while_a_sandbox_is_frozen_leaves_nothing(base_image: str) -> None:
    """Frozen processes of a version 1 control group do not die of SIGKILL."""

    async def body(sandbox: OciSandbox) -> list[int]:
        await sandbox.run("sleep 7777 &")
        [_, *inside] = sandbox.pids()
        with sandbox._place.frozen():
            assert remove_cgroups(sandbox._place.cgroup)
        return inside

    alive = [pid for pid in in_sandbox(base_image, body) if Path(f"/proc/{pid}").exists()]
    assert alive == []


def test_a_living_engines_sandboxes_are_left_alone(base_image: str) -> None:
    async def body(sandbox: OciSandbox) -> str:
        async with OciEngine.connect():
            pass
        return (await sandbox.run("echo alive")).text

    assert in_sandbox(base_image, body) == "alive\n"


# ---- refusals --------------------------------------------------------------------------------------------


def test_a_missing_image_is_said_before_anything_starts() -> None:
    async def body(engine: OciEngine) -> None:
        with pytest.raises(ImageUnavailable, match="docker pull swe-env/no-such-image:1"):
            async with engine.sandbox("swe-env/no-such-image:1", workdir=WORKDIR, limits=Limits()):
                pass

    in_engine(body)


def test_without_root_the_cure_is_the_other_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert lacking() == "it needs root: use --sandbox docker"


def test_without_control_groups_the_cure_is_the_other_backend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(oci_machine, "CGROUPS", tmp_path)
    assert "cannot be written" in lacking()


def test_without_a_runtime_the_cure_is_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci_machine, "runtime", lambda: None)
    assert lacking() == "crun and runc are missing: `apt-get install crun`"


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    """A file system that holds no more bytes, though more names."""
    with suppress(OSError), (small_disk / "all").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return small_disk


def test_a_full_disk_at_start_is_said_and_auto_falls_back(
    base_image: str, full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci, "RUN", full_disk)
    said: list[str] = []

    async def auto() -> str:
        async with (
            connect("auto", run_id="test-full-disk", say=said.append) as engine,
            engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox,
        ):
            return (await sandbox.run("echo works")).text

    reason = f"cannot write {full_disk} (No space left on device): make room there, or use --sandbox docker"
    with pytest.raises(EngineUnavailable) as error:
        in_engine(lambda _: trio.sleep(0))
    assert str(error.value) == reason
    assert trio.run(auto) == "works\n"
    assert said == [f"sandboxes: docker ({reason})"]


def test_a_full_store_is_said_with_the_cure(base_image: str, full_disk: Path) -> None:
    store = oci_images.ImageStore(full_disk / "store")
    try:
        with pytest.raises(SandboxLost, match=r"No space left on device\): make room .* SWE_ENV_STATE"):
            store.find(base_image)
        assert store.list() == []
        assert [file.name for file in (full_disk / "store/images").iterdir()] == []
    finally:
        store.unpin()


MAKE = r"""
for process in self 1; do grep -E '^(Cap|NoNewPrivs|Seccomp:|Uid|Gid|Groups)' /proc/$process/status; done
cut -c23- /proc/self/uid_map /proc/self/gid_map  # without the range itself
awk '{print $5}' /proc/self/mountinfo | sort
ulimit -a; umask; id; env | sort
sed 's/swe-env-[0-9a-f]*//; s:/swe-env/[0-9]*::' /proc/self/cgroup | sort
cd /proc/sys && cat kernel/hostname kernel/shmmax kernel/sem net/ipv4/ping_group_range fs/mqueue/*
cat /proc/self/oom_score_adj /proc/1/oom_score_adj; wc -l </proc/net/dev
cat /proc/keys /proc/timer_list /proc/kcore /sys/firmware/* 2>&1
"""
"""Shows what isolates a sandbox."""
CONTROLLED = ("memory.limit*", "memory.memsw.limit*", "memory.max", "pids.max", "cpu.cfs_*_us", "cpu.max")


@pytest.mark.skipif(
    not (shutil.which("crun") and shutil.which("runc", path="/usr/bin:/usr/sbin")), reason="one runtime only"
)
def test_either_runtime_makes_the_same_sandbox(base_image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: OciEngine) -> tuple[str, list[str]]:
        async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox:
            group = f"swe-env/{engine.number}/{sandbox.id}"
            files = [
                file
                for pattern in CONTROLLED
                for root in (oci_machine.CGROUPS, *oci_machine.CGROUPS.glob("*"))
                for file in (root / group).glob(pattern)
            ]
            assert files
            limits = [f"{file.name} {file.read_text()}" for file in files]
            return (await sandbox.run(MAKE)).text, sorted(limits)

    made: list[tuple[str, list[str]]] = []
    for name in ("crun", "runc"):
        path = shutil.which(name, path="/usr/bin:/usr/sbin")
        monkeypatch.setattr(oci, "runtime", lambda path=path: path)
        made.append(in_engine(body))
    assert made[0] == made[1]


def test_an_older_crun_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, version in (("crun", "1.7.2"), ("runc", "1.1.5")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} version {version}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert runtime() == str(tmp_path / "runc")
    (tmp_path / "crun").write_text("#!/bin/sh\necho crun version 1.14.1\n")
    assert runtime() == str(tmp_path / "crun")


def test_the_disk_is_capped(base_image: str) -> None:
    async def body(engine: OciEngine) -> str:
        limits = Limits(disk=8 << 20)
        async with engine.sandbox(base_image, workdir=WORKDIR, limits=limits) as sandbox:
            return (await sandbox.run("head -c 20M /dev/zero >file; du -m file")).text

    text = in_engine(body)
    assert "No space left on device" in text
    assert int(text.split()[-2]) <= 8


def test_control_groups_may_go_while_they_are_being_removed() -> None:
    """As when the runtime removes them too."""
    path = f"/swe-env/test-{os.getpid()}"
    [root, *_] = controllers()
    for _ in range(20):
        for number in range(20):
            (root / path[1:] / str(number)).mkdir(parents=True)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(remove_cgroups, [path] * 8))
        assert not (root / path[1:]).exists()
