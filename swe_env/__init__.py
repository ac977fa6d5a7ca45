"""The environment: tasks become episodes, episodes become rewards, all of it on disk.

- `episode`: one task played, captured, graded. The page to read first.
- `workspace`: the sandbox both agent and grader start from; `grading`: a patch's worth, with `protected`.
- `run` (asked by `request`): many episodes at once (`runner`), kept in a run directory (`rundir`).
- `serve`: vLLM as a context manager (`vllm_launcher`); `sources`, `policies`: words to tasks and policies.
- `cli`, `display`, `report`, `doctor`, `demo`: what a person types and sees.
"""
