"""`python -m consumers NAME...`: a process that hosts consumers (`consumers/process/command.py`)."""

import sys

from consumers.process.command import main

if __name__ == "__main__":
    sys.exit(main())
