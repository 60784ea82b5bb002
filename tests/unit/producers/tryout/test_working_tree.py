"""The snapshot of a working tree."""

import io
import os
import subprocess
import tarfile
from pathlib import Path

from producers.tryout.working_tree import snapshot_of


def test_a_name_that_is_not_utf_8_is_taken_too(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / os.fsdecode(b"caf\xe9.py")).write_text("x = 1")
    with tarfile.open(fileobj=io.BytesIO(snapshot_of(tmp_path))) as tar:
        assert [os.fsencode(name) for name in tar.getnames()] == [b"caf\xe9.py"]
