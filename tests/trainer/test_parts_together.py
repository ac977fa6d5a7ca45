"""From episodes to a gradient: the same however the batch is packed, and in the direction of the reward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agents.conversation import Segment
from agents.loop import End
from swe_env.episode import Episode
from trainer.advantages import advantages
from trainer.loss import ActionTokens, Ipo, policy_loss
from trainer.loss_report import report
from trainer.packing import MicroBatch, Stream, micro_batch, pack, streams
from trainer.scoring import Scorer


@pytest.fixture
def scorer(tiny_models: Path) -> Scorer:
    return Scorer(AutoModelForCausalLM.from_pretrained(tiny_models / "glm"))


def sampled(scorer: Scorer, name: str, reward: float, *, length: int, seed: int) -> Episode:
    """An episode of random tokens, with the scorer's own log-probabilities as the recorded ones."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(900, (length,), generator=draw).tolist()
    is_action = [index > 2 and index % 5 != 0 for index in range(length)]
    blank = Stream(ids, is_action, [0.0] * length, [0] * length, 0.0, name)
    with torch.no_grad():
        found = iter(scorer(micro_batch([blank])).logprobs.tolist())
    segment = Segment(
        token_ids=ids,
        is_action=is_action,
        logprobs=[next(found) if action else None for action in is_action],
        policy_versions=[0 if action else None for action in is_action],
    )
    end = End.SUBMITTED
    return Episode(id=name, task_id="t", group_id="g", policy="p", end=end, reward=reward, segments=[segment])


def batch_of(scorer: Scorer) -> list[Stream]:
    sizes = [(1.0, 31), (0.0, 12), (1.0, 50), (0.0, 44)]
    episodes = [
        sampled(scorer, f"e{seed}", reward, length=length, seed=seed)
        for seed, (reward, length) in enumerate(sizes)
    ]
    worth = advantages(episodes).by_episode
    return [stream for episode in episodes for stream in streams(episode, worth[episode.id])]


def action_tokens(scorer: Scorer, batch: MicroBatch) -> ActionTokens:
    of = batch.is_action
    return ActionTokens(scorer(batch).logprobs, batch.logprobs[of], batch.advantages[of])


def gradient(scorer: Scorer, batches: list[MicroBatch]) -> Tensor:
    scorer.zero_grad()
    total = sum(batch.action_tokens for batch in batches)
    for batch in batches:
        policy_loss(action_tokens(scorer, batch), Ipo(), global_actions=total).backward()
    return torch.cat([one.grad.flatten() for one in scorer.parameters() if one.grad is not None])


@pytest.mark.parametrize(("budget", "ranks"), [(50, 1), (64, 3), (50, 6)])
def test_a_gradient_does_not_depend_on_how_the_batch_is_packed(
    scorer: Scorer, budget: int, ranks: int
) -> None:
    made = batch_of(scorer)
    whole = gradient(scorer, [micro_batch(made)])
    parts = gradient(scorer, [batch for rank in pack(made, budget=budget, ranks=ranks) for batch in rank])
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5 * float(whole.abs().max()))


def test_a_step_makes_what_was_rewarded_likelier_and_the_rest_less_likely(scorer: Scorer) -> None:
    batch = micro_batch(batch_of(scorer))
    gradient(scorer, [batch])
    torch.optim.SGD(scorer.parameters(), lr=1e-2).step()
    with torch.no_grad():
        tokens = action_tokens(scorer, batch)
    assert tokens.log_ratio[tokens.advantages > 0].mean() > 0
    assert tokens.log_ratio[tokens.advantages < 0].mean() < 0


def test_a_policy_that_has_not_moved_is_at_no_distance(scorer: Scorer) -> None:
    batch = micro_batch(batch_of(scorer))
    with torch.no_grad():
        tokens = action_tokens(scorer, batch)
    measured = report(
        tokens,
        Ipo(),
        entropy=torch.zeros(batch.action_tokens),
        staleness=1 - batch.policy_versions[batch.is_action],
    )
    assert measured.kl < 1e-9
    assert measured.drop_rates["ipo"].all == measured.drop_rates["icepop"].all == 0
    assert (measured.staleness, measured.staleness_max) == (1, 1)
