"""An isolated copy of a repository in which commands run. Knows nothing of models or rewards.

- `protocol`: what a :class:`Sandbox` is, its limits and its errors; everything above is written against it.
- `seccomp`, `isolation`: what a sandbox may not do, as data for every backend.
- `docker`: the Docker backend; `supervisor.c` is PID 1 of each container, `wire` speaks to it.
- `repository`: git hygiene: no future in the history, byte-exact patches (`scripts/*.sh`).
- `reaper`: removes containers whose owner is gone, ours only.
- `registry`: images pulled ahead, within the disk's room, and removed again, ours only.
- `engine`: a Docker engine and a base image on a machine that may have neither.
"""
