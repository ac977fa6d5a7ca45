"""Where tasks come from: a repository, a problem, and hidden tests that decide.

- `model`: what a :class:`Task` is, and the :class:`TaskView` that is all the policy side gets of it.
- `jsonl`: tasks in a file, read all-or-nothing.
- `synthetic`: small repositories with one bug each, made from code (`bugs`, `two_files`, `draw`);
  `shipped.jsonl` holds fourteen of them.
- `swebench`: SWE-bench rows as tasks, and their logs as grades, by swebench's own rules.
- `published`: rows by the name of a published set, from a file or a directory.
- `swebench_image`: the image of a row, built without a registry (`image_recipe`, `host_python`).
"""
