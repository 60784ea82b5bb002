"""`python -m headrace.verifiers rollouts/NAME/main.py [--limit N]`: writes the tasks of a `verifiers`
environment as the rows of a dataset (JSON Lines) to the standard output.

It runs in an environment that has the rollout's packages, with the network that its tasks need.
"""

import argparse
import json
import sys
from pathlib import Path

from headrace.servers.verifiers_environments import load_verifiers_environment


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace.verifiers", description=__doc__)
    parser.add_argument("entrypoint", type=Path, help="rollouts/NAME/main.py")
    parser.add_argument("--limit", type=int, help="write at most this many tasks")
    options = parser.parse_args()
    for row in load_verifiers_environment(options.entrypoint.resolve()).rows(options.limit):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
