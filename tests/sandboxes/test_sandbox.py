"""A sandbox, whatever its backend: commands, files, sessions, deadlines, and what an agent cannot do."""

from __future__ import annotations

import hashlib
import subprocess

import pytest
import trio

from sandboxes.protocol import (
    ExecResult,
    ImageUnavailable,
    Limits,
    Sandbox,
    SandboxError,
    SandboxLost,
)
from tests.conftest import Backend, connected
from tests.sandboxes.conftest import WORKDIR, Sandboxed

pytestmark = pytest.mark.docker

ALIVE = "ps -eo pid,args --no-headers | grep -c '[s]leep 7777'"


def run(sandboxed: Sandboxed, *commands: str | bytes, **options: object) -> ExecResult:
    """The result of the last of some commands, run one after the other in one sandbox."""

    async def body(sandbox: Sandbox) -> ExecResult:
        for command in commands[:-1]:
            await sandbox.run(command)
        return await sandbox.run(commands[-1], **options)  # type: ignore[arg-type]

    return sandboxed(body)


# ---- commands --------------------------------------------------------------------------------------------


def test_it_is_a_sandbox(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> bool:
        return isinstance(sandbox, Sandbox)

    assert sandboxed(body)


def test_exit_code_is_the_shells(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, "exit 3").exit_code == 3


def test_death_by_signal_is_128_plus_its_number(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, "kill -TERM $$").exit_code == 128 + 15


def test_a_syntax_error_is_a_result(sandboxed: Sandboxed) -> None:
    result = run(sandboxed, "if then")
    assert (result.exit_code, b"syntax error" in result.output) == (2, True)


def test_messages_count_the_scripts_own_lines(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, "true\nnosuch").text == "bash: line 2: nosuch: command not found\n"


def test_output_is_bytes_of_both_streams_in_order(sandboxed: Sandboxed) -> None:
    script = r"printf 'a\000\377'; printf 'b\n' >&2; printf c"
    assert run(sandboxed, script).output == b"a\0\xffb\nc"


def test_a_script_may_hold_any_byte_but_nul(sandboxed: Sandboxed) -> None:
    every = bytes(set(range(1, 256)) - {ord("'")})
    assert run(sandboxed, b"printf %s '" + every + b"'").output == every


def test_nul_in_a_command_is_refused(sandboxed: Sandboxed) -> None:
    with pytest.raises(ValueError, match="NUL"):
        run(sandboxed, b"echo \0")


def test_long_output_keeps_head_and_tail_and_counts_the_rest(sandboxed: Sandboxed) -> None:
    whole = "".join(f"{n}\n" for n in range(1, 100_001)).encode()
    result = run(sandboxed, "seq 100000", output_limit=1001)
    assert (result.head, result.tail, result.dropped) == (whole[:500], whole[-501:], len(whole) - 1001)


def test_output_of_exactly_the_limit_is_whole(sandboxed: Sandboxed) -> None:
    result = run(sandboxed, "printf 0123456789", output_limit=10)
    assert (result.head, result.tail, result.dropped) == (b"0123456789", b"", 0)


def test_endless_output_is_bounded(sandboxed: Sandboxed) -> None:
    result = run(sandboxed, "yes", timeout=1, output_limit=1 << 16)
    assert (len(result.head) + len(result.tail), result.timed_out) == (1 << 16, True)


def test_large_stdin_arrives_whole(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, "wc -c", stdin=b"x" * 20_000_000).text.strip() == "20000000"


def test_stdin_larger_than_the_memory_limit_is_pumped(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> ExecResult:
        return await sandbox.run("wc -c", stdin=b"x" * (96 << 20))

    assert sandboxed(body, limits=Limits(memory=64 << 20)).text.strip() == str(96 << 20)


def test_stdin_nobody_reads_does_not_disturb_the_next_command(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> tuple[int, str]:
        first = await sandbox.run("exec 0<&-; exit 4", stdin=b"echo wrong\n" * 500_000)
        return first.exit_code, (await sandbox.run("echo right")).text

    assert sandboxed(body) == (4, "right\n")


def test_stdin_is_empty_by_default(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, "cat; echo end").output == b"end\n"


def test_a_command_of_five_megabytes_runs(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, f"x={'y' * 5_000_000}; echo ${{#x}}").text == "5000000\n"


def test_time_is_measured_inside(sandboxed: Sandboxed) -> None:
    assert 0.3 <= run(sandboxed, "sleep 0.3").seconds < 1


def test_a_script_does_not_find_itself_by_pattern(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, "pkill -f findme; echo alive").text == "alive\n"


# ---- the session -----------------------------------------------------------------------------------------

NASTY = "two\nlines 'single' \"double\" $HOME `id` \\ \t é \x01!"


def test_directory_and_exported_environment_carry_over(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, "cd /usr/lib; export A=1", 'echo "$PWD $A"').text == "/usr/lib 1\n"


def test_nasty_values_carry_over(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> str:
        await sandbox.run("true", env={"NASTY": NASTY})
        await sandbox.run("true")
        return (await sandbox.run('printf %s "$NASTY"')).text

    assert sandboxed(body) == NASTY


def test_a_nasty_directory_carries_over(sandboxed: Sandboxed) -> None:
    odd = "/tmp/a b\n'c' $d"
    assert (
        run(sandboxed, "mkdir -p \"/tmp/a b\n'c' \\$d\"; cd \"/tmp/a b\n'c' \\$d\"", "pwd").text == f"{odd}\n"
    )


def test_an_unset_variable_of_the_image_stays_unset(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, "unset LANG", 'echo "${LANG-unset}"').text == "unset\n"


@pytest.mark.parametrize(
    "ending",
    [
        "exit 5",
        "set -e; false",
        "set -eux; set -o noclobber; false",
        "if then",
        "trap 'echo bye' EXIT",
        "set -f; (exit 1)",
    ],
)
def test_state_survives_however_the_script_ends(sandboxed: Sandboxed, ending: str) -> None:
    assert run(sandboxed, f"cd /usr; export A=1\n{ending}", 'echo "$PWD $A"').text == "/usr 1\n"


def test_the_users_exit_trap_runs_once(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, "trap 'echo bye' EXIT; echo hi; exit 3").output == b"hi\nbye\n"


def test_exec_keeps_the_previous_state(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, "cd /usr", "cd /etc; exec true", "pwd").text == "/usr\n"


def test_a_deleted_directory_falls_back_to_the_images(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, "mkdir /tmp/d; cd /tmp/d; rmdir /tmp/d", "pwd").text == f"{WORKDIR}\n"


def test_overrides_stay_for_the_following_commands(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> str:
        await sandbox.run("true", cwd="/usr", env={"A": "1"})
        return (await sandbox.run('echo "$PWD $A"')).text

    assert sandboxed(body) == "/usr 1\n"


def test_a_missing_directory_is_a_failed_command(sandboxed: Sandboxed) -> None:
    result = run(sandboxed, "echo ran", cwd="/nowhere")
    assert (result.exit_code, result.text) == (1, "cd: /nowhere: No such file or directory\n")


def test_outside_the_session_nothing_is_seen_and_nothing_left(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> tuple[str, str]:
        await sandbox.run("cd /usr; export A=1")
        apart = await sandbox.run('echo "$PWD $A"; cd /etc; export A=2', session=False)
        return apart.text, (await sandbox.run('echo "$PWD $A"')).text

    assert sandboxed(body) == (f"{WORKDIR} \n", "/usr 1\n")


def test_a_timeout_keeps_the_previous_state(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> str:
        await sandbox.run("cd /usr")
        await sandbox.run("cd /etc; sleep 60", timeout=0.3)
        return (await sandbox.run("pwd")).text

    assert sandboxed(body) == "/usr\n"


def test_an_oversized_environment_is_not_kept(sandboxed: Sandboxed) -> None:
    grow = "cd /etc; A=$(head -c 100000 /dev/zero | tr '\\0' x); for i in $(seq 20); do export A$i=$A; done"
    assert run(sandboxed, "cd /usr", grow, "pwd").text == "/usr\n"


# ---- processes and deadlines -----------------------------------------------------------------------------


def test_a_background_process_survives_its_command(sandboxed: Sandboxed) -> None:
    # it may not yet be `sleep` when the command has ended
    looks = run(sandboxed, "sleep 7777 &", f"until {ALIVE}; do sleep 0.1; done").text.split()
    assert looks[-1] == "1"


def test_a_background_process_may_go_on_printing(sandboxed: Sandboxed) -> None:
    script = "while echo tick; do sleep 0.05; done &\necho $! >/tmp/pid"
    assert run(sandboxed, script, "sleep 0.5; kill -0 $(cat /tmp/pid) && echo alive").text == "alive\n"


def test_a_command_ends_with_its_shell_not_its_pipe(sandboxed: Sandboxed) -> None:
    result = run(sandboxed, "sleep 7777 & echo started")
    assert (result.output, result.seconds < 5) == (b"started\n", True)


DAEMON = """import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "7777"])
"""


@pytest.mark.parametrize(
    "escape",
    [
        "setsid sleep 7777 & wait",
        "nohup sleep 7777 >/dev/null 2>&1 & sleep 60",
        "( (sleep 7777 &) & ); sleep 60",
        "trap '' TERM INT HUP; sleep 7777",
        f"python3 -c '{DAEMON}'; sleep 60",
        "bomb() { sleep 7777 & bomb | bomb & }; bomb; sleep 60",
    ],
    ids=["setsid", "nohup", "double-fork", "ignores-signals", "daemon", "fork-bomb"],
)
def test_a_timeout_kills_every_process_and_the_sandbox_goes_on(sandboxed: Sandboxed, escape: str) -> None:
    """T29."""

    async def body(sandbox: Sandbox) -> tuple[ExecResult, float, str]:
        begin = trio.current_time()
        late = await sandbox.run(escape, timeout=1)
        return late, trio.current_time() - begin, (await sandbox.run(ALIVE)).text

    late, seconds, alive = sandboxed(body, limits=Limits(pids=128))
    assert (late.timed_out, late.exit_code, alive, seconds < 4) == (True, 137, "0\n", True)


def test_output_before_the_deadline_is_kept(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, "echo partial; sleep 60", timeout=0.5).output == b"partial\n"


BOMB = """import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.001)
"""


def test_a_fork_bomb_left_behind_does_not_stop_the_next_call(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> str:
        await sandbox.run(f"python3 -c '{BOMB}' & sleep 1")
        await sandbox.write("/tmp/after", b"still here")
        return (await sandbox.read("/tmp/after")).decode()

    assert sandboxed(body, limits=Limits(pids=50)) == "still here"


def test_kill_all_leaves_nothing(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> str:
        await sandbox.run("sleep 7777 & setsid sleep 7777 &")
        await sandbox.kill_all()
        return (await sandbox.run(ALIVE)).text

    assert sandboxed(body) == "0\n"


def test_zombies_are_reaped(sandboxed: Sandboxed) -> None:
    assert run(sandboxed, "( (sleep 0.1 &) & ); sleep 0.4", "ps -eo stat= | grep -c Z").text == "0\n"


# ---- files -----------------------------------------------------------------------------------------------


def test_a_large_file_of_every_byte_comes_back_as_written(sandboxed: Sandboxed) -> None:
    data = bytes(range(256)) * (30_000_000 // 256)

    async def body(sandbox: Sandbox) -> tuple[str, bool]:
        await sandbox.write("/tmp/new/folder/file", data)
        digest = await sandbox.run("sha256sum < /tmp/new/folder/file")
        return digest.text.split()[0], await sandbox.read("/tmp/new/folder/file") == data

    assert sandboxed(body) == (hashlib.sha256(data).hexdigest(), True)


def test_mode_is_exact_and_content_replaced(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> tuple[str, bytes]:
        await sandbox.write("/tmp/f", b"a longer text")
        await sandbox.write("/tmp/f", b"short", mode=0o777)
        return (await sandbox.run("stat -c %a /tmp/f")).text, await sandbox.read("/tmp/f")

    assert sandboxed(body) == ("777\n", b"short")


def test_a_hard_link_to_a_file_of_the_image_is_that_file(sandboxed: Sandboxed) -> None:
    """Else git refuses to clone a repository of the image."""
    script = "stat -c %i /etc/passwd; ln /etc/passwd /root/p; stat -c %i /etc/passwd /root/p"
    assert len(set(run(sandboxed, script).text.split())) == 1


def test_a_relative_path_starts_at_the_workdir(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> bytes:
        await sandbox.write("a/b", b"here")
        return await sandbox.read(f"{WORKDIR}/a/b")

    assert sandboxed(body) == b"here"


def test_an_empty_file_is_empty(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> bytes:
        await sandbox.write("/tmp/empty", b"")
        return await sandbox.read("/tmp/empty")

    assert sandboxed(body) == b""


@pytest.mark.parametrize(
    ("path", "error"),
    [("/nowhere", FileNotFoundError), ("/etc", IsADirectoryError), ("/etc/passwd/x", NotADirectoryError)],
)
def test_reading_raises_the_matching_os_error(sandboxed: Sandboxed, path: str, error: type[OSError]) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(error):
            await sandbox.read(path)

    sandboxed(body)


@pytest.mark.parametrize(
    ("path", "error"), [("/etc", IsADirectoryError), ("/etc/passwd/x", NotADirectoryError)]
)
def test_writing_raises_the_matching_os_error(sandboxed: Sandboxed, path: str, error: type[OSError]) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(error):
            await sandbox.write(path, b"x" * 1_000_000)

    sandboxed(body)


def test_reading_past_the_limit_is_refused(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.write("/tmp/f", b"x" * 1001)
        with pytest.raises(SandboxError, match="larger than 1000 bytes"):
            await sandbox.read("/tmp/f", limit=1000)

    sandboxed(body)


def test_a_fifo_does_not_hold_up_a_read(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.run("mkfifo /tmp/fifo")
        with trio.fail_after(5), pytest.raises(OSError, match="Invalid argument"):
            await sandbox.read("/tmp/fifo")

    sandboxed(body)


# ---- what an agent cannot do -----------------------------------------------------------------------------


def test_there_is_no_network(sandboxed: Sandboxed) -> None:
    script = "import socket; socket.create_connection(('192.0.2.1', 80), 20)"
    result = run(sandboxed, f'python3 -c "{script}"')
    assert (result.exit_code, b"Network is unreachable" in result.output, result.seconds < 5) == (
        1,
        True,
        True,
    )


def test_commands_have_no_capabilities(sandboxed: Sandboxed) -> None:
    status = run(sandboxed, "grep -E '^(CapEff|CapPrm|NoNewPrivs)' /proc/self/status | tr -d '\\t'").text
    assert status == f"CapPrm:{'0' * 16}\nCapEff:{'0' * 16}\nNoNewPrivs:1\n"


PTRACE = """import ctypes, os
PTRACE_ATTACH = 16
os._exit(0 if ctypes.CDLL(None).ptrace(PTRACE_ATTACH, 1, 0, 0) == 0 else 1)
"""


@pytest.mark.parametrize(
    "attack",
    [
        "kill -9 1",
        "kill -STOP 1",
        "prlimit --pid 1 --nofile=0",
        "echo x >/proc/1/fd/1",
        "ls /proc/1/fd",
        "cat /proc/1/mem",
        "echo 1000 >/proc/1/oom_score_adj",
        f"python3 -c '{PTRACE}'",
        "echo x >/.swe-env/init",
    ],
)
def test_the_supervisor_is_out_of_reach(sandboxed: Sandboxed, attack: str) -> None:
    async def body(sandbox: Sandbox) -> tuple[bool, str]:
        attacked = await sandbox.run(attack)
        return attacked.exit_code != 0, (await sandbox.run("echo alive")).text

    assert sandboxed(body) == (True, "alive\n")


def test_memory_beyond_the_limit_ends_the_command_not_the_sandbox(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> tuple[int, str]:
        greedy = await sandbox.run("python3 -c 'x = bytearray(1 << 30)'; exit $?")
        return greedy.exit_code, (await sandbox.run("echo alive")).text

    assert sandboxed(body, limits=Limits(memory=256 << 20)) == (137, "alive\n")


# ---- images ----------------------------------------------------------------------------------------------


def test_an_image_of_one_busybox_works(sandboxed: Sandboxed, busybox_image: str) -> None:
    async def body(sandbox: Sandbox) -> str:
        await sandbox.write("/data/x", b"content")
        await sandbox.run("cd /data; export A='it is '")
        return (await sandbox.run('echo "$A$(busybox cat x)"')).text

    assert sandboxed(body, image=busybox_image) == "it is content\n"


def test_an_image_without_bash_works(sandboxed: Sandboxed, bashless_image: str) -> None:
    async def body(sandbox: Sandbox) -> tuple[int, str]:
        left = await sandbox.run('cd /usr; export A="it\'s\nfine"; exit 3')
        return left.exit_code, (await sandbox.run('echo "$PWD $A"')).text

    assert sandboxed(body, image=bashless_image) == (3, "/usr it's\nfine\n")


def test_an_image_without_a_shell_says_what_it_needs(sandboxed: Sandboxed, empty_image: str) -> None:
    async def body(sandbox: Sandbox) -> tuple[int, str]:
        result = await sandbox.run("true")
        return result.exit_code, result.text

    code, said = sandboxed(body, image=empty_image)
    assert code == 127
    assert said == "no shell in this image (No such file or directory): it needs /bin/sh or bash\n"


def test_a_missing_image_says_what_to_do(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> None:
        raise AssertionError("started")

    with pytest.raises(ImageUnavailable, match="docker pull swe-env/no-such-image:1"):
        sandboxed(body, image="swe-env/no-such-image:1")


def test_a_committed_sandbox_starts_again_with_its_files(base_image: str, backend: Backend) -> None:
    async def main() -> tuple[str, str | None, bool]:
        async with connected(backend, "test-commit") as engine:
            async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox:
                await sandbox.write(f"{WORKDIR}/kept", b"kept")
                made = await engine.commit(sandbox, tag="swe-env/test-commit:1", labels={"a": 'b "c"'})
            async with engine.sandbox("swe-env/test-commit:1", workdir=WORKDIR, limits=Limits()) as sandbox:
                text = (await sandbox.run("cat kept")).text
                labels = await engine.image_labels("swe-env/test-commit:1")
                return text, labels.get("a"), sandbox.image_id == made

    assert trio.run(main) == ("kept", 'b "c"', True)


# ---- loss and cancellation -------------------------------------------------------------------------------


def test_a_cancelled_call_makes_the_sandbox_unusable(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> None:
        with trio.move_on_after(0.2):
            await sandbox.run("sleep 60")
        with pytest.raises(SandboxLost, match="cancelled"):
            await sandbox.run("true")

    sandboxed(body)


def test_calls_from_several_tasks_are_served_one_at_a_time(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> bytes:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(sandbox.run, "n=$(cat /tmp/n || echo 0); echo $((n + 1)) >/tmp/n")
        return await sandbox.read("/tmp/n")

    assert sandboxed(body) == b"20\n"


def test_the_supervisor_refuses_to_run_outside_a_sandbox() -> None:
    from sandboxes.binaries import binary

    outside = subprocess.run([binary("supervisor")], capture_output=True, check=False)
    assert outside.returncode == 2
