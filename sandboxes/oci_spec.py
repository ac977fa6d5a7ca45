"""What the container runtime is told of one sandbox: the OCI runtime specification, section "config"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sandboxes.isolation import MASKED_PATHS, READ_ONLY_PATHS, shared_memory, sysctls
from sandboxes.protocol import Limits
from sandboxes.seccomp import profile

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SUPERVISOR = "/.swe-env/init"
HOSTS = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost\n"
"""Content of the file that appears as /etc/hosts."""
CAPABILITIES = ["CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN"]
"""What the supervisor needs to be out of the commands' reach; they get none."""


def spec(
    image_env: list[str],
    env: dict[str, str],
    workdir: str,
    limits: Limits,
    first_id: int,
    *,
    cgroup: str,
    supervisor: Path,
    place: Path,
    hosts: Path,
) -> dict[str, Any]:
    """`config.json` of a sandbox whose file system is `place/root`, and whose user namespace `place/user`.

    `first_id`: what uid 0 is outside. `hosts`: a file that appears as /etc/hosts.
    """
    variables = {"PATH": PATH, "HOME": "/root", "HOSTNAME": "sandbox"}
    variables |= {name: value for name, _, value in (item.partition("=") for item in image_env)} | env
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [SUPERVISOR],
            "env": [f"{name}={value}" for name, value in variables.items()],
            "cwd": workdir,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES),
            "noNewPrivileges": True,
        },
        "root": {"path": "root"},
        "hostname": "sandbox",
        "mounts": _mounts(supervisor, hosts, limits),
        "linux": {
            "namespaces": [
                *({"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network", "cgroup")),
                {"type": "user", "path": str(place / "user")},
            ],
            "uidMappings": [{"containerID": 0, "hostID": first_id, "size": 1 << 16}],
            "gidMappings": [{"containerID": 0, "hostID": first_id, "size": 1 << 16}],
            "cgroupsPath": cgroup,
            "resources": {
                "memory": {"limit": limits.memory, "swap": limits.memory},
                "pids": {"limit": limits.pids},
                "cpu": {"quota": int(limits.cpus * 100_000), "period": 100_000},
                "devices": [{"allow": False, "access": "rwm"}],
            },
            "maskedPaths": list(MASKED_PATHS),
            "readonlyPaths": list(READ_ONLY_PATHS),
            "sysctl": sysctls(limits),
            "seccomp": profile(),
        },
    }


def _mounts(supervisor: Path, hosts: Path, limits: Limits) -> list[dict[str, Any]]:
    def mount(at: str, kind: str, *options: str, source: str = "") -> dict[str, Any]:
        return {"destination": at, "type": kind, "source": source or kind, "options": list(options)}

    safe = ("nosuid", "nodev", "noexec")
    return [
        mount("/proc", "proc", *safe),
        mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=64k", "nr_inodes=1024"),
        mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
        mount("/dev/shm", "tmpfs", *shared_memory(limits).split(","), source="shm"),
        mount("/dev/mqueue", "mqueue", *safe),
        mount("/sys", "sysfs", *safe, "ro"),
        mount(SUPERVISOR, "bind", "bind", "ro", "nosuid", "nodev", source=str(supervisor)),
        mount("/etc/hosts", "bind", "bind", "ro", *safe, source=str(hosts)),
    ]
