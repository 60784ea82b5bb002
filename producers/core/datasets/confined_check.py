"""`python -m producers.core.datasets.confined_check FILE KIND OUT MEMORY MAPPING SCALE`: reads an
untrusted file under limits, writes its normalised form to OUT, and prints its report as JSON.

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
"""The size that the limits are for. A file that is larger has as many times more time."""

CPU_S = 300


def main(path: str, kind: str, out: str, memory_bytes: str, mapping: str, scale: str = "1") -> int:
    """Check one file. `scale` multiplies the limits on time and on the size of OUT. Prints the report
    and returns the exit code."""
    cpu_s, file_bytes = int(scale) * CPU_S, 4 * int(scale) * MAX_FILE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
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
