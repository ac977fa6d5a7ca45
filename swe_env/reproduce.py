"""Whether an evaluation could be had again: what is different now from what it was made with."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from sandboxes.docker import DockerEngine
from sandboxes.protocol import SandboxError
from swe_env.plan import make_plan
from swe_env.request import RunRequest
from swe_env.rundir import RunDir, RunError, RunSpec
from tasks.model import ImageRef


async def differences(path: Path) -> dict[str, tuple[str, str]]:
    """What -> (then, now), for everything that a run's numbers depend on: data, words, weights, versions,
    images. Empty when nothing differs. Raises what :func:`~swe_env.plan.make_plan` raises.
    """
    try:
        then = RunSpec.model_validate_json((path / "run.json").read_bytes())
        request = RunRequest.model_validate(then.asked)
    except (OSError, ValidationError) as error:
        raise RunError(f"{path} is not a run that can be repeated: {str(error).splitlines()[0]}") from None
    plan = make_plan(request)
    found = then.differences(plan.spec)
    names = {task.id: task.image.name for task in plan.tasks if isinstance(task.image, ImageRef)}
    used = {one.task_id: one.image_id for one in RunDir(path).episodes() if one.image_id}
    async with DockerEngine.connect(run_id="reproduce") as engine:
        for instance, digest in used.items():
            if instance not in names:
                continue
            try:
                now = await engine.image_id(names[instance])
            except SandboxError as error:
                now = str(error)
            if now != digest:
                found[f"image of {instance}"] = digest, now
    return found
