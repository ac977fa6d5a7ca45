"""A process that is stopped and goes on (Ctrl-Z and `fg`, a laptop that slept): no policy was slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agents.loop import End
from swe_env.rundir import RunDir

SECONDS = 3
PLAYS = f"""
import sys
from pathlib import Path

import trio

from agents.loop import End
from swe_env.episode import Episode
from swe_env.rundir import RunDir, RunSpec
from swe_env.runner import Job, run_jobs

class Silent:
    def stage(self, job_id, stage): pass
    def done(self, episode, *, will_retry): pass

async def attempt(watch):
    print("begins", flush=True)
    with trio.move_on_after({SECONDS}):
        await trio.sleep_forever()
    return Episode(id="one", task_id="one", group_id="one", policy="p", end=End.TIME_LIMIT, reward=0.0)

rundir = RunDir(Path(sys.argv[1]))
spec = dict(policy="p", tasks_sha256="", prompts_sha256="", tokenizer_sha256="", budget={{}}, version="")
rundir.begin(RunSpec(**spec))
trio.run(lambda: run_jobs([Job("one", attempt)], rundir, Silent(), concurrency=1, retries=0))
"""


@pytest.mark.parametrize("stopped", [True, False])
def test_a_clock_that_ran_out_while_the_process_stood_still_is_no_policys_doing(
    tmp_path: Path, stopped: bool
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PLAYS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    if stopped:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(SECONDS + 1)
        os.kill(process.pid, signal.SIGCONT)
    process.communicate(timeout=30)
    [episode] = RunDir(tmp_path).episodes()
    if stopped:
        assert (episode.end, episode.reward) == (End.INTERNAL_ERROR, None)
        assert "this process stood still" in episode.error
    else:
        assert (episode.end, episode.reward) == (End.TIME_LIMIT, 0.0)
