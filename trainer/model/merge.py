"""`python -m trainer.model.merge FOLDER DIR`: an adapter's checkpoint directory -> one plain model
directory.

The adapter is added to its base exactly as for sampling from the checkpoint (`trainer/model/base.py`),
in fp32, and only then brought to the dtype that was asked for. The command line runs this as a program
of its own: it holds no torch itself.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from schemas.errors import Refused
from trainer.model.base import load_merged

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def merge(folder: Path, directory: Path, *, base: str | None, dtype: torch.dtype) -> None:
    """Write the model that `folder`'s adapter makes of its base. `base` replaces the name by which the
    adapter calls its base. Raises Refused when they cannot be loaded or do not fit."""
    model, tokenizer = load_merged(folder, what="this checkpoint", base=base)
    torch.nn.Module.to(model, dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 with one line on stderr when the merge is refused."""
    parser = argparse.ArgumentParser(prog="python -m trainer.model.merge")
    parser.add_argument("folder", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--base")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    given = parser.parse_args(argv)
    try:
        merge(given.folder, given.directory, base=given.base, dtype=DTYPES[given.dtype])
    except Refused as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
