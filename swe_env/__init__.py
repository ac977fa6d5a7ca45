"""The environment: tasks become episodes, episodes become rewards, all of it on disk.

- `episode`: one task played, captured, graded. The page to read first. `play` has one, from nothing.
- `workspace`: the sandbox both agent and grader start from; `grading`: a patch's worth, with `protected`.
- `run` (asked by `request`, checked by `plan`): many episodes at once (`runner`), kept on disk (`rundir`).
- `evaluation`: official predictions, logs and reports; `validate`: which tasks to trust; `reproduce`.
- `serve`: vLLM as a context manager (`vllm_launcher`).
- `sources`, `policies`, `predictions`: from words on the command line to tasks, policies and patches.
- `cli`, `cli_eval`, `terminal`, `display`, `report`, `doctor`, `demo`: what a person types and sees.
"""
