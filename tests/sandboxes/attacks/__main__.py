"""`python -m tests.sandboxes.attacks`: run the bank against every backend, then write the committed table."""

from __future__ import annotations

import trio

from sandboxes.engine import ensure_base_image, ensure_engine
from tests.sandboxes.attacks.backends import BACKENDS
from tests.sandboxes.attacks.bank import BANK, run_bank, surprise
from tests.sandboxes.attacks.table import rewrite


def main() -> None:
    ensure_engine(print)
    image = ensure_base_image(print)
    wrong: list[str] = []
    for backend in BACKENDS:
        for name, outcome in trio.run(run_bank, backend, image, BANK, print).items():
            if why := surprise(backend, name, outcome):
                wrong.append(f"{backend}, {name}: {why}")
    if wrong:
        raise SystemExit("\n".join(["the table stays as it was:", *wrong]))
    rewrite()


if __name__ == "__main__":
    main()
