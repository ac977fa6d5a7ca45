"""The command line as a person uses it: resumes, stops, and refuses in one line."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from swe_env.episode import Episode
from swe_env.plan import TINY_GLM
from swe_env.request import read_request
from swe_env.rundir import RunDir
from tasks.jsonl import save_tasks
from tasks.model import ImageRef
from tests.conftest import Backend, needs_oci
from tests.swe_env.conftest import make_task

ROOT = Path(__file__).parents[2]
TWO = "op-shipped-000000,two-shipped-000029"


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "swe_env", *map(str, arguments)]


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)


def run(
    out: Path, tasks: str | Path = "shipped", policy: str = "gold", *more: str | Path
) -> subprocess.CompletedProcess[str]:
    return call("run", "--tasks", tasks, "--policy", policy, "--out", out, *more)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """What a refused command said: one line, and not exit code 0."""
    assert done.returncode == 2, done
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("swe-env: ")
    return lines[0]


def sandboxes_of(process: subprocess.Popen[str]) -> list[str]:
    """Containers that a process made, and container runtimes that are its children."""
    runtimes = subprocess.run(["pgrep", "-P", str(process.pid), "crun|runc"], capture_output=True, text=True)
    argv = ["docker", "ps", "-a", "--format", '{{.Label "swe-env.owner"}} {{.Names}}']
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[-1] for line in lines if f":{process.pid}:" in line] + runtimes.stdout.split()


def wait_running(process: subprocess.Popen[str], seconds: float) -> None:
    """Until it ends, at most for so long that this machine ran: one that its host stops counts as a moment.

    Where it takes longer, the failure says what every thread of it and of its children waits for.
    """
    ran, before = 0.0, time.monotonic()
    while process.poll() is None:
        if ran >= seconds:
            stacks = f"head -n 2 $(printf '/proc/%s/task/*/stack ' {process.pid} $(pgrep -P {process.pid}))"
            waiting = subprocess.run(stacks, shell=True, stdout=subprocess.PIPE, text=True, check=False)
            pytest.fail(f"not over after {ran:.1f} s:\n{waiting.stdout}")
        time.sleep(0.02)
        now = time.monotonic()
        ran, before = ran + min(now - before, 0.5), now


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "gold"], "--tasks is missing"),
        (["--tasks", "shipped", "--policy", "golden"], "vllm, gold, noop, replay:FILE"),
        (["--tasks", "shipped", "--policy", "replay"], "replay:FILE"),
        (["--tasks", "shipped", "--policy", "replay:nowhere"], "nowhere"),
        (["--tasks", "nothing", "--policy", "gold"], "shipped, synthetic:train:N"),
        (["--tasks", "absent.jsonl", "--policy", "gold"], "absent.jsonl"),
        (["--tasks", "swebench:absent.jsonl", "--policy", "gold"], "absent.jsonl"),
        (["--tasks", "shipped", "--instances", "op-1", "--policy", "gold"], "op-1"),
        (["--tasks", "shipped", "--policy", "gold", "--prompts", "shouting"], "default, tiny"),
        (["--tasks", "shipped", "--policy", "gold", "--concurrency", "0"], "concurrency"),
        (["--tasks", "shipped", "--policy", "gold", "--turns", "0"], "budget.turns"),
        (["--tasks", "shipped", "--policy", "gold", "--config", "absent.toml"], "absent.toml"),
        (["--tasks", "shipped", "--policy", "gold", "--n", "many"], "--n"),
        (["--tasks", "shipped", "--policy", "gold", "--frobnicate"], "--frobnicate"),
        (["--tasks", "shipped", "--policy", "vllm"], "--model"),
        (["--tasks", "shipped", "--policy", "gold", "--model", "absent"], "--family"),
        (["--tasks", "shipped", "--policy", "gold", "--family", "gpt"], "--family"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_bad_arguments_are_refused_in_one_line_that_names_the_cure(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    assert says in refusal(call("run", *arguments, "--out", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_setting_of_a_config_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[budget]\nturnz = 3\n")
    said = refusal(run(tmp_path / "run", "shipped", "gold", "--config", config))
    assert f"{config}: budget.turnz" in said


@pytest.mark.parametrize(
    "config", sorted((ROOT / "configs" / "run").glob("*.toml")), ids=lambda path: path.stem
)
def test_shipped_configurations_are_valid_and_options_go_over_them(config: Path) -> None:
    options = {"out": Path("x"), "budget": {"turns": 3, "seconds": None}, "n": None}
    request = read_request(config, options)
    assert request.budget.turns == 3
    assert request.budget.seconds == tomllib.loads(config.read_text())["budget"]["seconds"]


def test_a_malformed_task_is_named_by_file_line_and_field(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    save_tasks(file, [make_task()])
    file.write_text(
        file.read_text()
        + file.read_text().replace('"calc"', '"calc2"').replace('"test_timeout":60.0', '"test_timeout":-1')
    )
    said = refusal(run(tmp_path / "run", file))
    assert f"{file}:2" in said
    assert "test_timeout" in said


def test_a_server_that_is_not_up_names_how_to_start_one(tmp_path: Path, tiny_glm: Path) -> None:
    more = ("--url", "http://127.0.0.1:9", "--model", tiny_glm)
    assert "vllm serve" in refusal(run(tmp_path, "shipped", "vllm", *more))


@pytest.fixture
def web_server() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()


def test_a_server_that_is_not_vllm_is_refused(tmp_path: Path, tiny_glm: Path, web_server: str) -> None:
    assert web_server in refusal(run(tmp_path, "shipped", "vllm", "--url", web_server, "--model", tiny_glm))


def test_a_tokenizer_without_the_familys_markers_is_refused(tmp_path: Path, tiny_models: Path) -> None:
    said = refusal(run(tmp_path, "shipped", "gold", "--model", tiny_models / "llama", "--family", "glm-4.5"))
    assert "does not fit the glm-4.5 format" in said


def test_a_missing_engine_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert "none.sock" in refusal(run(tmp_path / "run", "shipped", "gold", "--sandbox", "docker"))


@pytest.mark.docker
@needs_oci
def test_no_engine_is_needed_for_an_image_that_was_used_once(
    tmp_path: Path, base_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("--instances", TWO.split(",")[0], "--sandbox", "oci")
    assert run(tmp_path / "a", "shipped", "gold", *more).returncode == 0
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    assert run(tmp_path / "b", "shipped", "gold", *more, "--setup-once").returncode == 0
    [episode] = RunDir(tmp_path / "b").episodes()
    assert episode.reward == 1


@needs_oci
def test_the_first_image_needs_an_engine_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    monkeypatch.setenv("SWE_ENV_STATE", str(tmp_path / "store"))
    said = refusal(run(tmp_path / "run", "shipped", "gold", "--sandbox", "oci"))
    assert "cannot make swe-env/base:1: no Docker engine answers: start it with `swe-env engine`" in said


@pytest.mark.docker
@needs_oci
def test_auto_falls_back_to_docker_where_the_store_cannot_serve_and_says_why(
    tmp_path: Path, base_image: str, unmappable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWE_ENV_STATE", str(unmappable))
    done = run(tmp_path / "run", "shipped", "gold", "--instances", TWO.split(",")[0])
    assert done.returncode == 0, done
    said = " ".join((done.stdout + done.stderr).split())
    assert "sandboxes: docker (the oci backend cannot run here: cannot map the ids of" in said
    assert "set SWE_ENV_STATE to a directory on ext4" in said
    [episode] = RunDir(tmp_path / "run").episodes()
    assert episode.reward == 1


@pytest.mark.docker
def test_a_run_is_shown_kept_and_completed_by_the_same_command(tmp_path: Path, base_image: str) -> None:
    out, more = tmp_path / "run", ("--instances", TWO, "--n", "2")
    first = run(out, "shipped", "gold", *more)
    assert first.returncode == 0, first
    ids = sorted(episode.id for episode in RunDir(out).episodes())
    assert ids == [f"{task}--gold--{index}" for task in TWO.split(",") for index in range(2)]
    assert first.stdout.count("submitted") >= 4
    assert (out / "report.html").read_text().count("<details>") == 4

    lost = out / "episodes" / ids[0]
    kept = {path: path.stat().st_mtime_ns for path in out.glob("episodes/*/episode.json")}
    for file in lost.iterdir():
        file.unlink()
    lost.rmdir()
    (out / "episodes" / ".half-written").mkdir()
    assert run(out, "shipped", "gold", *more).returncode == 0
    now = {path: path.stat().st_mtime_ns for path in out.glob("episodes/*/episode.json")}
    assert now.keys() == kept.keys()
    assert [path.parent.name for path in kept if now[path] != kept[path]] == [ids[0]]
    assert sorted(path.name for path in out.glob("episodes/*")) == ids

    assert "choose another --out" in refusal(run(out, "shipped", "noop", *more))
    shown = call("show", out, ids[1])
    assert shown.returncode == 0
    assert "▸ submit" in shown.stdout
    assert "reward 1" in shown.stdout
    assert "matches 4 episodes" in refusal(call("show", out, ""))


@pytest.mark.docker
def test_a_recorded_episode_is_replayed_token_for_token(tmp_path: Path, base_image: str) -> None:
    assert run(tmp_path / "a", "shipped", "gold", "--instances", TWO.split(",")[0]).returncode == 0
    [first] = RunDir(tmp_path / "a").episodes()
    recorded = tmp_path / "a" / "episodes" / first.id
    assert run(tmp_path / "b", "shipped", f"replay:{recorded}").returncode == 0
    [second] = RunDir(tmp_path / "b").episodes()
    assert (second.policy, second.reward, second.patch) == ("replay", 1.0, first.patch)
    assert second.segments == first.segments


@pytest.mark.docker
def test_ctrl_c_stops_within_seconds_leaves_nothing_and_keeps_what_is_done(
    tmp_path: Path, base_image: str, backend: Backend
) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "run"
    quick = make_task(id="quick")
    stuck = [make_task(id=f"stuck{number}", setup="sleep 300") for number in range(3)]
    save_tasks(tasks, [quick, *stuck])
    process = subprocess.Popen(
        command("run", "--tasks", tasks, "--policy", "gold", "--out", out, "--sandbox", backend),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (out / "episodes" / "quick--gold--0").exists() or len(sandboxes_of(process)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    wait_running(process, 5)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "stopping" in said
    assert "Traceback" not in said
    assert sandboxes_of(process) == []
    assert [episode.id for episode in RunDir(out).episodes()] == ["quick--gold--0"]
    assert list((out / "episodes").glob(".*")) == []


@pytest.mark.docker
def test_a_stuck_episode_delays_no_other(tmp_path: Path, base_image: str) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "run"
    save_tasks(
        tasks, [make_task(id="stuck", setup="sleep 15"), *(make_task(id=f"quick{n}") for n in range(6))]
    )
    assert run(out, tasks, "gold", "--concurrency", "2").returncode == 0
    ended = {path.parent.name: path.stat().st_mtime for path in out.glob("episodes/*/episode.json")}
    assert max(ended, key=lambda name: ended[name]) == "stuck--gold--0"


@pytest.mark.docker
def test_a_task_whose_gold_patch_does_not_apply_is_named(tmp_path: Path, base_image: str) -> None:
    tasks = tmp_path / "tasks.jsonl"
    wrong = make_task(id="wrong", gold_patch=make_task().gold_patch.replace("sum(numbers) - 1", "nothing"))
    save_tasks(tasks, [make_task(id="right"), wrong])
    done = run(tmp_path / "run", tasks)
    assert done.returncode == 1
    assert (
        done.stderr.strip() == "swe-env: wrong: its gold patch does not apply: error: patch failed: calc.py:1"
    )
    assert len(RunDir(tmp_path / "run").episodes()) == 2


@pytest.mark.docker
def test_an_image_that_is_not_there_is_named_before_anything_starts(tmp_path: Path, base_image: str) -> None:
    tasks = tmp_path / "tasks.jsonl"
    save_tasks(tasks, [make_task(image=ImageRef(name="swe-env/absent:1"), base_commit="abc")])
    assert "swe-env/absent:1" in refusal(run(tmp_path / "run", tasks))


@pytest.mark.docker
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_full_disk_ends_the_run_in_one_line_and_keeps_what_fitted(
    small_disk: Path, base_image: str
) -> None:
    done = run(small_disk / "run", "shipped", "gold", "--concurrency", "1")
    said = refusal(done)
    assert "No space left on device" in said
    assert "run the same command again" in said
    kept = RunDir(small_disk / "run").episodes()
    assert 0 < len(kept) < 14
    assert all(isinstance(episode, Episode) and episode.reward == 1.0 for episode in kept)


@pytest.mark.docker
def test_doctor_finds_this_machine_in_order(base_image: str) -> None:
    done = call("doctor")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ok ") == 8


def test_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    monkeypatch.setenv("SWE_ENV_STATE", "/nowhere")
    done = call("doctor")
    assert done.returncode == 1
    assert "Docker engine" in done.stdout
    assert "to get it:" in done.stdout


def test_scripted_policies_speak_with_the_tokenizer_that_the_tiny_model_has(tiny_glm: Path) -> None:
    assert (TINY_GLM / "tokenizer.json").read_bytes() == (tiny_glm / "tokenizer.json").read_bytes()
