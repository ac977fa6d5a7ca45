"""What every backend keeps from a sandbox, besides system calls (:mod:`sandboxes.seccomp`): as data.

Commands run as uid 0 of an image that may hold anything, so this has to stop a root without capabilities.
Where there is no user namespace that is the host's root, to whom files of mode 0400 in /proc open.
"""

from __future__ import annotations

from sandboxes.protocol import Limits

MASKED_PATHS = (
    # Kernel memory, its layout and its build: what an exploit asks first.
    *("/proc/kcore", "/proc/kmsg", "/proc/kallsyms", "/proc/modules", "/proc/config.gz", "/proc/cmdline"),
    *("/proc/iomem", "/proc/ioports", "/proc/slabinfo", "/proc/vmallocinfo", "/proc/pagetypeinfo"),
    *("/proc/kpagecount", "/proc/kpageflags", "/proc/kpagecgroup"),
    # What others on the machine do; fine counters are side channels.
    *("/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug"),
    *("/proc/latency_stats", "/proc/interrupts", "/proc/softirqs", "/sys/devices/virtual/powercap"),
    # The hardware, its firmware and serial numbers.
    *("/proc/acpi", "/proc/asound", "/proc/scsi", "/proc/mtrr", "/sys/firmware", "/sys/devices/virtual/dmi"),
    # Interfaces of the kernel to its administrator.
    *("/sys/kernel/debug", "/sys/kernel/tracing", "/sys/kernel/security", "/sys/kernel/slab"),
    *("/sys/kernel/boot_params", "/sys/kernel/notes", "/sys/kernel/vmcoreinfo", "/sys/fs/bpf"),
)
"""Appear empty. Those that a kernel lacks are skipped by the runtime."""

READ_ONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

OPEN_FILES = 16384
"""A process' descriptors. Of an engine's default a few sandboxes could use up the host's."""
PERSISTENT_PART = 4
"""A quarter of a sandbox's memory may be System V segments and another one files of /dev/shm. They stay when
their processes have died, and what fills the limit so leaves nothing that could be killed but the supervisor:
a sandbox that is lost, which nobody is scored for."""


def rlimits(limits: Limits) -> dict[str, int]:
    """Resource limits of a sandbox's processes, soft and hard, by their names in lower case."""
    # Only lowered: an engine that is not quite root cannot raise its own.
    return {"core": 0, "fsize": limits.file_size, "nofile": OPEN_FILES}


def sysctls(limits: Limits) -> dict[str, str]:
    """Settings of a sandbox's own IPC namespace: what outlives a process is small."""
    return {
        "kernel.shmall": str(limits.memory // 4096 // PERSISTENT_PART),
        "kernel.msgmni": "16",  # queues, of 1 MiB each when full of empty messages
        "kernel.sem": "32000 64000 500 1024",  # 4 MiB of semaphores
        "fs.mqueue.queues_max": "64",  # of 80 KiB each
    }


def shared_memory(limits: Limits) -> str:
    """Mount options of /dev/shm. An empty file takes a kilobyte too: hence nr_inodes."""
    size = min(limits.memory // PERSISTENT_PART, 64 << 20)
    return f"nosuid,nodev,noexec,mode=1777,size={size},nr_inodes=8192"
