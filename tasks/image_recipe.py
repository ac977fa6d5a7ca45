"""The scripts inside a SWE-bench image that is built here: pure text, made from a row.

An evaluation script expects conda: `source /opt/miniconda3/bin/activate; conda activate testbed`. A shell
function by that name, in front of an ordinary venv at conda's path, is all of conda that it gets.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, cast

ENVIRONMENT = "/opt/miniconda3/envs/testbed"
ACTIVATE_PATH = "/opt/miniconda3/bin/activate"

# Newer ones build neither setup.py projects of that time nor, without isolation, their metadata.
BUILD_TOOLS = ("pip<24.1", "setuptools<70", "wheel", "setuptools_scm<8")

FINAL_ENV = {
    "PATH": f"{ENVIRONMENT}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "VIRTUAL_ENV": ENVIRONMENT,
    "CONDA_DEFAULT_ENV": "testbed",
    # An evaluation script reinstalls the project: it must, and can, do so without a network.
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",  # sic: pip reads a false value of a no-option as yes
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}

ACTIVATE = f"""\
# Stands in for conda: activates the one environment there is; `create` and `install` go to pip.
conda() {{
    case "${{1:-}}" in
    activate)
        export CONDA_DEFAULT_ENV=testbed VIRTUAL_ENV={ENVIRONMENT}
        case ":$PATH:" in
        *":{ENVIRONMENT}/bin:"*) ;;
        *) export PATH="{ENVIRONMENT}/bin:$PATH" ;;
        esac
        ;;
    create|install)
        shift
        local wanted=() word
        while [ $# -gt 0 ]; do
            word=$1
            shift
            case "$word" in
            -n|--name|-c|--channel) shift ;;
            -*|python|python[=\\<\\>]*|pip) ;;
            *[=\\<\\>]=*|*\\<*|*\\>*) wanted+=("$word") ;;
            *=*) wanted+=("${{word/=/==}}") ;;
            *) wanted+=("$word") ;;
            esac
        done
        [ "${{#wanted[@]}}" -eq 0 ] || {ENVIRONMENT}/bin/python -m pip install "${{wanted[@]}}"
        ;;
    deactivate) ;;
    *)
        echo "ERROR: this image has no conda: 'conda $*' cannot be done" >&2
        return 1
        ;;
    esac
}}
"""


def build_script(row: Mapping[str, Any], python: str, requires: Sequence[str]) -> str:
    """Bash script, run once with a network in /testbed's image: environment, then the project.

    `requires` is what the project's build system asks for: without isolation it must be in the environment.
    """
    lines = [
        "set -euxo pipefail",
        "export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore",
        "export DEBIAN_FRONTEND=noninteractive",
        f"{python} -m venv {ENVIRONMENT}",
        f"{ENVIRONMENT}/bin/python -c 'import ssl, zlib'",
        f"{ENVIRONMENT}/bin/python -m pip install --upgrade {shlex.join(BUILD_TOOLS)}",
        f"mkdir -p $(dirname {ACTIVATE_PATH})",
        f"mv /opt/swe-env-build/activate {ACTIVATE_PATH}",
        f"source {ACTIVATE_PATH}",
        "cd /testbed",
        "git config --global --add safe.directory /testbed",
        "git reset --hard --quiet HEAD",
    ]
    if "locale-gen" in str(row.get("eval_script", "")):
        lines.append("apt-get update && apt-get install -y --no-install-recommends locales")
    lines += [
        "cd /",
        f"bash -c {shlex.quote(_environment_script(row))}",
        "conda activate testbed",
        "cd /testbed",
        "export PIP_NO_BUILD_ISOLATION=0",
    ]
    if requires:
        lines.append(f"python -m pip install {shlex.join(requires)}")
    lines += [
        f"source /dev/stdin <<'SWE_ENV_INSTALL'\n{_install_script(row)}\nSWE_ENV_INSTALL",
        # What the installation changed in tracked files is the image's, not the agent's.
        "git diff --quiet || git -c user.name=swe-env -c user.email=swe-env@localhost commit -qam 'Prepare'",
    ]
    return "\n".join(lines) + "\n"


def check_script(row: Mapping[str, Any]) -> str:
    """Bash script, run without a network and as the final image is: the installation can be repeated."""
    lines = ["set -euo pipefail", f"source {ACTIVATE_PATH}", "conda activate testbed", "cd /testbed"]
    return "\n".join([*lines, _install_command(row)]) + "\n"


def _environment_script(row: Mapping[str, Any]) -> str:
    """The row's own environment script where it has one, else its list of packages."""
    if script := row.get("build_env_script"):
        return str(script)
    listed = cast(list[str] | str, row.get("build_pip_packages") or "[]")
    packages = cast(list[str], json.loads(listed)) if isinstance(listed, str) else listed
    return f"source {ACTIVATE_PATH}\nset -e\nconda activate testbed\n" + (
        f"python -m pip install {shlex.join(packages)}\n" if packages else ""
    )


def _install_script(row: Mapping[str, Any]) -> str:
    """Preparations and installation: from the row's repository script, what follows its activation."""
    script = str(row.get("build_repo_script") or "")
    found = re.search(
        r'^echo "Current environment[^\n]*\n(.*?)^git config --global user\.email', script, re.S | re.M
    )
    return found.group(1).strip("\n") if found else _install_command(row)


def _install_command(row: Mapping[str, Any]) -> str:
    return str(row.get("build_install") or "python -m pip install -e .")
