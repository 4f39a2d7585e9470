"""Placeholder until the command line lands."""
import sys
from pathlib import Path


def main() -> int:
    from reef_bus.config import load
    from reef_bus.process import run_role

    args = sys.argv[1:]
    return run_role(args[1], load(Path(args[3])), args[5])


if __name__ == "__main__":
    sys.exit(main())
