"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.docker
@pytest.mark.vllm
def test_the_python_example_runs(tmp_path: Path, tiny_glm: Path, base_image: str) -> None:
    [example] = re.findall(r"```python\n(.*?)```", README, re.S)
    example = example.replace("runs/demo/tiny-glm", str(tiny_glm))
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    end, reward, length, _token, logprob = done.stdout.split()
    assert (end, float(reward)) in [("format_errors", 0.0), ("turn_limit", 0.0)]
    assert int(length) > 50  # the prompt alone is longer
    assert float(logprob) < 0


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parents[1]
    for page in (root / "README.md", *(root / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"
