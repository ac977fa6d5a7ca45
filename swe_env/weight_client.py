"""What vLLM's own sender of weights asks of a server, held while it is asked (its `VLLMWeightSyncClient`)."""

from __future__ import annotations

from typing import Any

import trio

from agents.weights import HOLD, Step, UpdateFailed, let_go, take_steps, workers

__all__ = ["UpdateFailed", "WeightClient"]


class WeightClient:
    """For a process that trains and knows no event loop: every method blocks, at most `deadline` [s].

    All raise `UpdateFailed`, with the server's own words.
    """

    def __init__(self, url: str, deadline: float) -> None:
        self.version = 0
        """What the weights that are sent next will be called."""
        self._url = url
        self._deadline = deadline

    def workers(self) -> int:
        """Processes that each take the weights: one a GPU."""
        return trio.run(workers, self._url, self._deadline)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._take(("/init_weight_transfer_engine", {"init_info": init_info}))

    def start_weight_update(self) -> None:
        self._take(*HOLD)

    def update_weights(self, update_info: Any) -> None:
        self._take(("/update_weights", {"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._take(*let_go(self.version))

    def _take(self, *steps: Step) -> None:
        trio.run(take_steps, self._url, steps, self._deadline)
