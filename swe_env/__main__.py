"""`python -m swe_env` is `swe-env`."""

from swe_env.cli import main

main()
