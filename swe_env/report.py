"""`report.html`: a run on one self-contained page, for people who were not there."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from swe_env.episode import Episode
from swe_env.rundir import RunDir, write_atomic

_STYLE = r"""
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1c2330}
h1{font-size:1.4rem;margin-bottom:0}h2{font-size:1.05rem;margin-top:2rem}
.muted{color:#66707f}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.3rem .7rem;border-bottom:1px solid #e4e7ec}
th{font-weight:600}.n{text-align:right}
.bar{background:#e4e7ec;border-radius:3px;height:.6rem;width:10rem;display:inline-block}
.bar i{background:#2f855a;border-radius:3px;height:100%;display:block}
details{border-bottom:1px solid #e4e7ec}.ok{color:#2f855a}.no{color:#b23b3b}.lost{color:#b7791f}
summary{cursor:pointer;padding:.35rem 0;display:grid;grid-template-columns:1fr 5rem 7rem 9rem 6rem 5rem}
summary span{text-align:right}summary b{font-weight:500}summary b::before{content:"\25b8\00a0";color:#66707f}
details[open] summary b::before{content:"\25be\00a0"}
pre{background:#f6f7f9;padding:.7rem;overflow:auto;white-space:pre-wrap;border-radius:4px;margin:.3rem 0}
.role{font-size:.8rem;color:#66707f;margin-top:.6rem}
"""


def write_report(rundir: RunDir) -> Path:
    """Write the page and return its path. Raises `RunError` when an episode cannot be read."""
    page = rundir.path / "report.html"
    write_atomic(page, render(rundir.path.name, rundir.episodes()).encode())
    return page


def render(title: str, episodes: list[Episode]) -> str:
    """The whole page. Everything an episode says is escaped: it may come from anywhere."""
    policies = list(dict.fromkeys(episode.policy for episode in episodes))
    rows = "".join(_policy_row(policy, episodes) for policy in policies)
    details = "".join(_episode(episode) for episode in episodes)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p class=muted>{len(episodes)} episodes</p>"
        "<table><tr><th>policy<th>solved<th><th class=n>episodes<th class=n>turns<th class=n>sampled tokens"
        f"<th class=n>median seconds<th class=n>lost</tr>{rows}</table><h2>Episodes</h2>{details}</html>"
    )


def _policy_row(policy: str, episodes: list[Episode]) -> str:
    own = [episode for episode in episodes if episode.policy == policy]
    valid = [episode for episode in own if episode.reward is not None]
    solved = sum((episode.reward or 0) > 0 for episode in valid)
    share = 100 * solved / len(valid) if valid else 0
    seconds = sorted(episode.timings.total for episode in own)[len(own) // 2]
    return (
        f"<tr><td>{html.escape(policy)}<td>{solved}/{len(valid)}"
        f"<td><span class=bar><i style='width:{share:.0f}%'></i></span>"
        f"<td class=n>{len(own)}<td class=n>{sum(len(e.turns) for e in own)}"
        f"<td class=n>{sum(e.action_tokens for e in own)}<td class=n>{seconds:.1f}"
        f"<td class=n>{sum(episode.end.is_infrastructure for episode in own)}"
    )


def _episode(episode: Episode) -> str:
    kind = "lost" if episode.reward is None else "ok" if episode.reward else "no"
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:g}"
    reason = episode.error or (episode.grade.reason if episode.grade else "")
    parts = [_message(message) for message in episode.messages]
    if episode.patch:
        parts.append(_block("patch", episode.patch.decode("utf-8", "replace")))
    if reason:
        parts.append(_block("reason", reason))
    return (
        f"<details><summary><b>{html.escape(episode.id)}</b><span>{len(episode.turns)} turns</span>"
        f"<span>{episode.tokens} tokens</span><span>{episode.end}</span><span class={kind}>{reward}</span>"
        f"<span class=muted>{episode.timings.total:.1f} s</span></summary>{''.join(parts)}</details>"
    )


def _message(message: dict[str, Any]) -> str:
    text = str(message.get("content") or "")
    text += "".join(f"\n▸ {_call(call)}" for call in message.get("tool_calls", []))
    return _block(str(message.get("name") or message["role"]), text.strip())


def _call(call: dict[str, Any]) -> str:
    if call.get("problem"):
        return f"{call['name'] or '?'} ({call['problem']}): {call.get('raw', '')}"
    return f"{call['name']} " + "\n  ".join(f"{name}={value}" for name, value in call["arguments"].items())


def _block(label: str, text: str) -> str:
    return f"<div class=role>{html.escape(label)}</div><pre>{html.escape(text)}</pre>"
