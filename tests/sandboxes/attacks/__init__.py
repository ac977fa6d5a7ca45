"""A bank of attacks that are run inside every backend's sandboxes, and the table of how they went.

- `probe`: what an attack is, and how it says that it succeeded;
- `supervisor`, `escapes`, `resources`, `sessions`, `information`: the attacks;
- `backends`: where they are run, and the few that are known to succeed there;
- `bank`: runs them; `table`: writes `docs/reward-integrity.md` (`python -m tests.sandboxes.attacks`).
"""
