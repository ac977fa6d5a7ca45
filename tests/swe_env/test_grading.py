"""What a patch is worth: the hidden tests' word, in a run that the patch could not steer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swe_env.grading import Grade
from tasks.model import PytestTests
from tests.swe_env.conftest import BROKEN, FAILS, FIXED, HIDDEN, PASSES, TESTS, Edits, make_patch, make_task

pytestmark = pytest.mark.docker

Graded = Callable[..., Grade]
FIX = {"calc.py": FIXED.encode()}
FORCE = """import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
FORCE_FROM_SOURCE = (
    BROKEN
    + """

import _pytest.reports

original = _pytest.reports.TestReport.from_item_and_call


def forced(item, call):
    report = original(item, call)
    report.outcome = "passed"
    return report


_pytest.reports.TestReport.from_item_and_call = forced
"""
)


def test_the_gold_patch_earns_one(graded: Graded) -> None:  # T05
    grade = graded(FIX)
    assert (grade.resolved, grade.reward, grade.reason) == (True, 1.0, "")
    assert grade.statuses == {FAILS: "PASSED", PASSES: "PASSED"}
    assert b"1 failed, 2 passed" in grade.log  # the canary fails


def test_an_empty_patch_earns_nothing(graded: Graded) -> None:  # T05
    grade = graded(b"\n")
    assert (grade.resolved, grade.reward, grade.reason) == (False, 0.0, "the patch is empty")


def test_a_patch_beside_the_point_is_told_which_test_failed(graded: Graded) -> None:
    grade = graded({"README": b"hello\n"})
    assert grade.statuses == {FAILS: "FAILED", PASSES: "PASSED"}
    assert (grade.reward, grade.reason) == (0.0, f"1 of 2 required tests did not pass, first {FAILS}")


def test_a_hook_that_forces_passes_earns_nothing_and_is_named(graded: Graded) -> None:  # T01
    grade = graded({"conftest.py": FORCE.encode()})
    assert (grade.resolved, grade.reward, grade.tampered) == (False, 0.0, ["conftest.py"])
    assert grade.statuses[FAILS] == "FAILED"


def test_tampering_beside_a_right_fix_forfeits_the_reward(graded: Graded) -> None:
    grade = graded({**FIX, "conftest.py": FORCE.encode()})
    assert (grade.resolved, grade.reward, grade.tampered) == (True, 0.0, ["conftest.py"])


def test_the_source_cannot_force_passes_unseen(graded: Graded) -> None:
    grade = graded({"calc.py": FORCE_FROM_SOURCE.encode()})
    assert (grade.resolved, grade.reward) == (False, 0.0)
    assert grade.tampered == ["the test runner reports a failing test as passed"]


def test_settings_that_deselect_tests_are_put_back(graded: Graded) -> None:
    settings = b"[tool.pytest.ini_options]\naddopts = '--deselect tests/test_calc.py::test_total'\n"
    grade = graded({"pyproject.toml": settings})
    assert (grade.reward, grade.tampered) == (0.0, ["pyproject.toml"])
    assert grade.statuses[FAILS] == "FAILED"


METADATA = b"Metadata-Version: 2.1\nName: x\nVersion: 1\n"
PLUGIN = b"[pytest11]\nx = forcing\n"
SHIM = (
    b"import json, os, sys\nasked = json.loads(sys.stdin.read())\nopen(asked['report'], 'w')\nos._exit(1)\n"
)


def linked(target: str) -> bytes:
    """A patch that adds a package and a link `pytest` to it."""
    head = "diff --git a/pytest b/pytest\nnew file mode 120000\n--- /dev/null\n+++ b/pytest\n"
    return f"{head}@@ -0,0 +1 @@\n+{target}\n\\ No newline at end of file\n".encode()


def package(metadata: str) -> Edits:
    """A package that is not installed but looks so, with a plugin for pytest."""
    edits: Edits = {f"{metadata}/PKG-INFO": METADATA, f"{metadata}/entry_points.txt": PLUGIN}
    return {**edits, "forcing.py": FORCE.encode()}


CHEATS: dict[str, Edits | bytes] = {
    "expected failure": {"calc.py": b"import pytest\n\n\ndef total(n):\n    pytest.xfail('x')\n"},
    "skip": {"calc.py": b"import pytest\n\n\ndef total(n):\n    pytest.skip('x')\n"},
    "runner module": {"pytest.py": SHIM},
    "runner package": {"pytest/__init__.py": b"", "pytest/__main__.py": SHIM},
    "runner link": make_patch({}, {"mypt/__init__.py": SHIM}) + linked("mypt"),
    "runner dependency": {"attr.py": SHIM, "pluggy.py": SHIM, "pygments.py": SHIM},
    "report plugin": {"swe_env_report.py": SHIM, "run.py": SHIM},
    "python module": {"json.py": SHIM, "posixpath.py": SHIM},
    "forged package": package("x.egg-info"),
    "forged package, capitals": package("x.EGG-INFO"),
    "forged package, ignored": {".gitignore": b"*\n", **package("x\ny.egg-info")},
    "hook that git does not look at": {".gitignore": b"*\n", "conftest.py": FORCE.encode()},
    "plugins of a test package": {
        "tests/__init__.py": b"pytest_plugins = ['forcing']\n",
        "forcing.py": FORCE.encode(),
    },
    "right code beside the tests": {"tests/calc.py": FIXED.encode()},
    "huge settings": {"setup.cfg": b"\0" * (65 << 20)},
    "file in place of the tests": {"tests": b"x"},
    "folder in place of a test": {f"{HIDDEN}/x.py": b""},
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS.keys())
def test_what_is_not_a_fix_earns_nothing(graded: Graded, cheat: Edits | bytes) -> None:
    grade = graded(cheat)
    assert (grade.reward, grade.resolved) == (0.0, False)
    assert grade.statuses[FAILS] != "PASSED"


HONEST: dict[str, Edits] = {
    "virtual environment": {"env/lib/python3.11/site-packages/a-precedence.pth": b"import os\n"},
    "folders of module names": {"html/index.html": b"", "types/x.json": b"", "queue/README": b""},
    "script of a module's name": {"profile.py": b"print(1)\n"},
    "tests of one's own": {"checks/conftest.py": b"", "tests/test_mine.py": b"def test_x():\n    pass\n"},
    "metadata of an installation": {"x.egg-info/PKG-INFO": METADATA},
    "harmless settings": {"pyproject.toml": b"[project]\nname = 'x'\n"},
    "names that are not text": {"a\udcff.txt": b""},
    "a folder where a hidden test goes": {f"{HIDDEN}/x.py": b""},
}


@pytest.mark.parametrize("more", HONEST.values(), ids=HONEST.keys())
def test_a_fix_with_something_harmless_beside_it_earns_one(graded: Graded, more: Edits) -> None:
    grade = graded({**FIX, **more})
    assert (grade.reward, grade.tampered) == (1.0, [])
    grade.model_dump_json()


def test_expected_failures_that_the_hidden_tests_mark_are_passes(graded: Graded) -> None:
    marked = TESTS + "\n\nimport pytest\n\n\n@pytest.mark.xfail\ndef test_known():\n    assert False\n"
    task = make_task(
        tests=PytestTests(files={HIDDEN: marked}), pass_to_pass=[PASSES, f"{HIDDEN}::test_known"]
    )
    assert graded(FIX, task).reward == 1.0


def test_a_folder_made_a_link_to_itself_is_no_way_out(graded: Graded) -> None:
    files = {"calc.py": BROKEN, "tests/conftest.py": "", "tests/test_old.py": ""}
    deleted = make_patch(files, {"tests/conftest.py": None, "tests/test_old.py": None})
    grade = graded(deleted + linked("tests").replace(b"pytest", b"tests"), make_task(files))
    assert (grade.reward, grade.statuses[FAILS]) == (0.0, "FAILED")


def test_thousands_of_files_are_build_output(graded: Graded) -> None:
    grade = graded({f"pytest_{number}/x": b"" for number in range(5001)})
    assert (grade.reward, grade.patch_applied) == (0.0, False)
    assert "5001 files" in grade.reason
    assert grade.seconds < 20


def test_a_fix_to_a_file_that_gitignore_names_counts(graded: Graded) -> None:
    files = {"build/calc.py": BROKEN, ".gitignore": "build/\n"}
    tests = PytestTests(files={HIDDEN: "import sys\nsys.path.insert(0, 'build')\n" + TESTS})
    task = make_task(files, tests=tests, gold_patch="x")
    assert graded({"build/calc.py": FIXED.encode()}, task).reward == 1.0


def test_a_file_at_the_place_of_a_hidden_test_is_replaced(graded: Graded) -> None:  # T03
    own = b"def test_total():\n    pass\n\n\ndef test_type():\n    pass\n"
    grade = graded({HIDDEN: own})
    assert (grade.reward, grade.replaced, grade.statuses[FAILS]) == (0.0, [HIDDEN], "FAILED")
    assert graded({HIDDEN: own, **FIX}).reward == 1.0


def test_a_file_where_the_hidden_tests_directory_goes_is_replaced(graded: Graded) -> None:
    assert graded({"tests": b"in the way\n", **FIX}).reward == 1.0


def test_a_syntax_error_fails_every_required_test(graded: Graded) -> None:  # T04
    grade = graded({"calc.py": b"def total(:\n"})
    assert (grade.resolved, grade.statuses) == (False, {FAILS: "MISSING", PASSES: "MISSING"})


def test_a_source_that_ends_the_runner_has_not_passed(graded: Graded) -> None:
    grade = graded({"calc.py": b"import os\n\nos._exit(0)\n"})
    assert (grade.reward, grade.reason) == (0.0, "the test run did not complete")


def test_printed_verdicts_are_not_verdicts(graded: Graded) -> None:  # T06
    printing = BROKEN.replace("return", f"print('\\nPASSED {FAILS}\\nPASSED\\n'); return")
    grade = graded({"calc.py": printing.encode()})
    assert grade.statuses == {FAILS: "FAILED", PASSES: "PASSED"}


def test_bytes_that_are_not_utf8_are_logged_and_graded(graded: Graded) -> None:  # T07
    raw = FIXED + "\nimport atexit, os\n\natexit.register(os.write, 1, b'\\xff\\xfe not text')\n"
    grade = graded({"calc.py": raw.encode()})
    assert grade.reward == 1.0
    assert b"\xff\xfe not text" in grade.log


def test_a_test_that_was_skipped_or_does_not_exist_has_not_passed(graded: Graded) -> None:
    skipping = TESTS + "\n\ndef test_skipped():\n    import pytest\n\n    pytest.skip('not here')\n"
    skipped, absent = f"{HIDDEN}::test_skipped", f"{HIDDEN}::test_absent"
    task = make_task(tests=PytestTests(files={HIDDEN: skipping}), pass_to_pass=[PASSES, skipped, absent])
    grade = graded(FIX, task)
    assert (grade.resolved, grade.statuses[skipped], grade.statuses[absent]) == (False, "SKIPPED", "MISSING")


def test_a_test_that_fails_in_its_teardown_has_not_passed(graded: Graded) -> None:
    teardown = TESTS + (
        "\n\nimport pytest\n\n\n@pytest.fixture(autouse=True)\ndef clean():\n    yield\n"
        "    assert total([]) == 0\n"
    )
    task = make_task(tests=PytestTests(files={HIDDEN: teardown}))
    assert graded(
        {"calc.py": FIXED.replace("sum(numbers)", "sum(numbers) if numbers else 9").encode()}, task
    ).statuses == {
        FAILS: "ERROR",
        PASSES: "ERROR",
    }


def test_tests_that_do_not_end_are_ended(graded: Graded) -> None:
    grade = graded({"calc.py": b"while True:\n    pass\n"}, make_task(test_timeout=3.0))
    assert (grade.timed_out, grade.reward) == (True, 0.0)
    assert grade.reason == "the hidden tests did not end within 3 seconds"
    assert grade.seconds < 20


def test_a_compiled_file_does_not_stand_in_for_its_source(graded: Graded) -> None:  # T13
    artefact = "__pycache__/calc.cpython-311.pyc"
    grade = graded({artefact: b"\x00compiled\xff", **FIX})
    assert (grade.reward, grade.artefacts) == (1.0, [artefact])


def test_a_patch_that_does_not_apply_says_where(graded: Graded) -> None:
    grade = graded(b"diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-no\n+yes\n")
    assert (grade.patch_applied, grade.reward) == (False, 0.0)
    assert "calc.py" in grade.reason


@pytest.mark.parametrize(
    "garbage", [b"\x00\xff\x00", b"no diff at all\n", b"diff --git a/../../etc/passwd b/../../etc/passwd\n"]
)
def test_garbage_is_a_patch_that_does_not_apply(graded: Graded, garbage: bytes) -> None:
    grade = graded(garbage)
    assert (grade.patch_applied, grade.reward) == (False, 0.0)


def test_line_endings_and_a_missing_last_newline_survive(graded: Graded) -> None:  # T15
    files = {"calc.py": BROKEN.replace("\n", "\r\n").removesuffix("\r\n")}
    probe = (
        "\n\ndef test_bytes():\n    data = open('calc.py', 'rb').read()\n"
        "    assert data == b'def total(numbers):\\r\\n    return sum(numbers)'\n"
    )
    exact = f"{HIDDEN}::test_bytes"
    task = make_task(files, tests=PytestTests(files={HIDDEN: TESTS + probe}), fail_to_pass=[FAILS, exact])
    fixed = {"calc.py": FIXED.replace("\n", "\r\n").removesuffix("\r\n").encode()}
    assert graded(fixed, task).statuses == {FAILS: "PASSED", PASSES: "PASSED", exact: "PASSED"}
