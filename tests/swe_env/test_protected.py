"""Which changes steer the test runner, and which are only work."""

from __future__ import annotations

import pytest

from swe_env.protected import examine, lookalikes, patch_paths, settings_changed


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py",
        "tests/unit/conftest.py",
        "pytest.ini",
        "sitecustomize.py",
        "src/usercustomize.py",
        "x.pth",
        "pytest.py",
        "_pytest/runner.py",
        "src/pluggy/__init__.py",
        "pytest_cheat.py",
        "pytest.toml",
        "json.py",
        "src/argparse/__init__.py",
    ],
)
def test_a_runner_hook_is_tampering(path: str) -> None:
    assert examine([path], hidden=set(), gold=set(), existing=set()).tampered == [path]


def test_what_the_gold_patch_changes_is_the_policys_to_change() -> None:
    verdict = examine(
        ["conftest.py", "setup.cfg"], hidden=set(), gold={"conftest.py", "setup.cfg"}, existing=set()
    )
    assert verdict.restored == []


def test_a_runner_module_that_the_repository_has_is_source() -> None:
    paths = ["src/_pytest/logging.py", "src/_pytest/new.py"]  # pytest's own repository
    assert lookalikes(paths) == {"src/_pytest"}
    assert examine(paths, hidden=set(), gold=set(), existing={"src/_pytest"}).restored == []


@pytest.mark.parametrize("path", ["pkg/json.py", "tests/test_json.py", "jsonic.py", "src/app/types.py"])
def test_a_module_below_a_package_or_of_another_name_is_work(path: str) -> None:
    assert examine([path], hidden=set(), gold=set(), existing=set()).restored == []


def test_hidden_paths_are_replaced_without_blame() -> None:
    verdict = examine(["tests/test_a.py", "a.py"], hidden={"tests/test_a.py"}, gold=set(), existing=set())
    assert (verdict.hidden, verdict.tampered) == (["tests/test_a.py"], [])


def test_a_link_in_place_of_the_hidden_tests_directory_is_put_back() -> None:
    assert examine(["tests"], hidden={"tests/test_a.py"}, gold=set(), existing=set()).hidden == ["tests"]


@pytest.mark.parametrize("path", ["pkg/__pycache__/a.cpython-311.pyc", "x.egg-info/entry_points.txt"])
def test_build_products_are_left_out_without_blame(path: str) -> None:
    assert examine([path], hidden=set(), gold=set(), existing=set()).artefacts == [path]


@pytest.mark.parametrize(
    ("path", "before", "after", "changed"),
    [
        ("pyproject.toml", b'[project]\nname="a"', b'[project]\nname="b"', False),
        ("pyproject.toml", b"", b'[tool.pytest.ini_options]\naddopts="-p x"', True),
        ("pyproject.toml", b"", b"not toml [", True),
        ("setup.cfg", b"[metadata]\nname=a", b"[metadata]\nname=b", False),
        ("setup.cfg", None, b"[tool:pytest]\naddopts=-x", True),
        ("sub/tox.ini", b"[pytest]\n", None, True),
    ],
)
def test_settings_are_tampering_only_in_the_runners_sections(
    path: str, before: bytes | None, after: bytes | None, changed: bool
) -> None:
    assert settings_changed(path, before, after) is changed


def test_a_diff_names_its_files() -> None:
    diff = "diff --git a/x/a.py b/x/b.py\nrename from x/a.py\nrename to x/b.py\n--- a/c.py\n+++ b/c.py\n"
    assert patch_paths(diff) == {"x/a.py", "x/b.py", "c.py"}
