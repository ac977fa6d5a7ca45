"""Configurations of trainings for tests."""

from __future__ import annotations

SMALL = """
model = "tiny:glm"
prompts = "tiny"
steps = 4
[rollout]
tasks = "synthetic:train:10"
tasks_per_step = 3
group_size = 2
"""


BUDGET = """
[rollout.budget]
turns = 3
context_tokens = 1024
turn_tokens = 96
seconds = 60
"""


def untaught(*, steps: int, sandbox: str = "auto", servers: int = 1, workers: str = "[{}, {}]") -> str:
    """Asynchronous, of a policy that knows nothing.

    No group has a spread: steps change no weight, but make a new version.
    """
    replicas = ", ".join(["{}"] * servers)
    return f"""
model = "tiny:glm"
prompts = "tiny"
steps = {steps}
sandbox = "{sandbox}"
async.max_off_policy_steps = 2
[rollout]
tasks = "synthetic:train:6"
tasks_per_step = 2
group_size = 2
concurrency = 8
workers = {workers}
replace_without_spread = false
{BUDGET}
[server]
replicas = [{replicas}]
[trainer]
checkpoint_every = 2
"""
