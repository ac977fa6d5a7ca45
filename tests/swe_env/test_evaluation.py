"""An evaluation: what swebench would say, in swebench's own files, resumable, with nothing swept under."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.loop import End
from swe_env.episode import Episode
from swe_env.evaluation import Share, pass_at, summarise
from swe_env.grading import Grade
from swe_env.predictions import write_predictions
from tasks.swebench_image import build_image
from tests.conftest import thing_row
from tests.swe_env.conftest import make_task
from tests.swe_env.test_cli import call, refusal

ROOT = Path(__file__).parents[2]
IMAGE = "swe-env-test/evaluation:latest"
UNRELATED = "--- /dev/null\n+++ b/note.txt\n@@ -0,0 +1 @@\n+x\n"
FORCE = """--- /dev/null
+++ b/conftest.py
@@ -0,0 +1,6 @@
+import pytest
+
+@pytest.hookimpl(hookwrapper=True)
+def pytest_runtest_makereport(item, call):
+    outcome = yield
+    outcome.get_result().outcome = "passed"
"""


# --- counting ------------------------------------------------------------------------------------


def test_an_interval_is_wilsons() -> None:
    low, high = Share(resolved=5, instances=10).interval
    assert (round(low, 4), round(high, 4)) == (0.2366, 0.7634)
    assert Share(resolved=0, instances=0).interval == (0.0, 1.0)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_chance_that_k_drawn_attempts_hold_a_success(one: list[bool], k: int) -> None:
    if k > len(one):
        assert pass_at(k, [one]).instances == 0
        return
    missed = 1.0
    for drawn in range(k):
        missed *= max(0, len(one) - sum(one) - drawn) / (len(one) - drawn)
    assert math.isclose(pass_at(k, [one]).rate, 1 - missed, abs_tol=1e-12)


def test_what_infrastructure_ended_is_in_no_figure() -> None:
    def episode(number: int, reward: float | None) -> Episode:
        grade = None if reward is None else Grade(resolved=bool(reward), reward=reward, patch_applied=True)
        end = End.SANDBOX_LOST if reward is None else End.SUBMITTED
        name = f"calc--vllm--{number}"
        return Episode(
            id=name, task_id="calc", group_id="g", policy="m", end=end, reward=reward, grade=grade, patch=b"x"
        )

    summary = summarise([episode(0, 1.0), episode(1, 0.0), episode(2, None)], [make_task(repo="o/r")])
    assert (summary.whole.resolved, summary.whole.instances) == (0.5, 1)
    assert summary.no_verdict == ["calc--vllm--2"]
    assert summary.endings == {"resolved": 1, "submitted, unresolved": 1, "sandbox_lost": 1}
    assert {k: (share.rate, share.instances) for k, share in summary.pass_at.items()} == {
        1: (0.5, 1),
        2: (1.0, 1),
    }
    assert list(summary.by_repository) == ["o/r"]


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(mirror: Path, base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Six instances on one image that was built here, in a file of rows."""
    row = thing_row(mirror, IMAGE)
    build_image(row, mirror.parent, base_image, print)
    path = tmp_path_factory.mktemp("dataset") / "rows.jsonl"
    rows = [row | {"instance_id": f"owner__thing-{number}"} for number in range(6)]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    yield path
    docker.from_env().images.remove(IMAGE, force=True)


@pytest.fixture
def predictions(dataset: Path, tmp_path: Path) -> Path:
    gold = json.loads(dataset.read_text().splitlines()[0])["patch"]
    patches = [gold, "", UNRELATED, gold.replace("a - b", "a % b"), gold + FORCE]
    path = tmp_path / "mine.jsonl"
    write_predictions(
        path, "my/model", {f"owner__thing-{n}": patch.encode() for n, patch in enumerate(patches)}
    )
    return path


def official(out: Path, model: str = "my__model") -> dict[str, list[str]]:
    """Instance numbers by the lists of the official report."""
    report = json.loads((out / f"{model}.{out.name}.json").read_text())
    assert report["schema_version"] == 2
    return {key: [name[-1] for name in names] for key, names in report.items() if key.endswith("_ids")}


@pytest.mark.docker
def test_predictions_are_graded_as_the_harness_does_and_only_once(
    dataset: Path, predictions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x"
    arguments = ("grade", "--dataset", dataset, "--predictions", predictions, "--out", out)
    done = call(*arguments)
    assert done.returncode == 0, done
    found = official(out)
    assert found["resolved_ids"] == ["0", "4"]  # the harness lets a hook force passes
    assert found["unresolved_ids"] == ["2"]
    assert (found["empty_patch_ids"], found["error_ids"], found["incomplete_ids"]) == (["1"], ["3"], ["5"])
    logs = out / "logs/run_evaluation/x/my__model"
    assert sorted(path.name for path in (logs / "owner__thing-0").iterdir()) == [
        "eval.sh", "patch.diff", "report.json", "run_instance.log", "test_output.txt",
    ]  # fmt: skip
    assert json.loads((logs / "owner__thing-0/report.json").read_text())["owner__thing-0"]["tests_status"]
    assert "owner/thing" in done.stdout
    assert (out / "predictions.jsonl").read_text() == predictions.read_text()

    kept = {path: path.stat().st_mtime_ns for path in out.glob("episodes/*/*")}
    assert call(*arguments).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("episodes/*/*")} == kept

    assert call("eval", "--reproduce", out).returncode == 0
    predictions.write_text(predictions.read_text().replace("note.txt", "other.txt"))
    differing = call("eval", "--reproduce", out)
    assert differing.returncode == 1
    assert "repeats_sha256" in differing.stdout


@pytest.mark.docker
def test_strict_mode_differs_in_what_was_tampered_with_and_names_it(
    dataset: Path, predictions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "y"
    done = call("grade", "--dataset", dataset, "--predictions", predictions, "--out", out, "--mode", "strict")
    assert done.returncode == 0, done
    assert (official(out)["resolved_ids"], official(out)["unresolved_ids"]) == (["0"], ["2", "4"])
    assert "tampered: 1" in done.stdout


@pytest.mark.docker
def test_gold_resolves_everything(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "z"
    done = call(
        "eval", "--dataset", dataset, "--gold", "--instances", "owner__thing-3,owner__thing-1", "--out", out
    )
    assert done.returncode == 0, done
    assert official(out, "gold")["resolved_ids"] == ["1", "3"]


@pytest.mark.docker
def test_verdicts_are_those_of_swebenchs_own_harness(dataset: Path, tmp_path: Path) -> None:
    argv: list[Any] = [sys.executable, ROOT / "benchmarks/swebench_parity.py", dataset, "owner__thing-0"]
    argv += ["--out", tmp_path / "parity", "--workers", "8"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done
    assert "7 verdicts, 0 disagreements" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gold"], "--dataset"),
        (["--dataset", "verified"], "--model, --gold and --predictions"),
        (["--dataset", "verified", "--gold", "--predictions", "x"], "one of"),
        (["--dataset", "nonesuch", "--gold"], "verified, lite, full, multilingual"),
        (["--dataset", "verified", "--gold"], "cannot have SWE-bench/SWE-bench_Verified"),
        (["--dataset", "verified", "--gold", "--mode", "lenient"], "--mode"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_requests_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert says in refusal(call("eval", *arguments, "--out", tmp_path / "run"))
