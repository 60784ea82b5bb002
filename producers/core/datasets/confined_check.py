"""`python -m producers.core.datasets.confined_check FILE KIND OUT MEMORY MAPPING`: reads an untrusted
file under limits, writes its normalised form to OUT, and prints its report as JSON.

Each upload starts this process and waits for its imports. So it imports only the rules: with the
database and the events it would start half as fast.
"""

import json
import resource
import sys
from pathlib import Path

from producers.core.datasets.row_issues import ISSUES
from producers.core.datasets.rules import check_file

MAX_FILE_BYTES = 512 << 20
CPU_S = 300


def main(path: str, kind: str, out: str, memory_bytes: str, mapping: str) -> int:
    """Check one file. Prints the report and returns the exit code."""
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MAX_FILE_BYTES, 4 * MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    with Path(out).open("wb") as file:
        report = check_file(Path(path), kind, file.write, mapping=json.loads(mapping))
    report_json = {
        "num_rows": report.num_rows,
        "columns": report.columns,
        "issues": ISSUES.dump_python(report.issues),
        "characters": report.characters,
    }
    sys.stdout.write(json.dumps(report_json))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
