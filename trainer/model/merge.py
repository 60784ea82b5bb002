"""`python -m trainer.model.merge FOLDER DIR`: an adapter's checkpoint directory -> one plain model
directory.

The adapter is added to its base in fp32, exactly as for sampling from the checkpoint
(`trainer/model/base.py`), and only then converted to the requested dtype. The command line runs this as
a separate program, because it does not import torch itself.
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
    """Merge the adapter in `folder` into its base, and write the model. `base` replaces the base's name
    in the adapter's config. Raises Refused when they cannot be loaded or do not fit."""
    model, tokenizer = load_merged(folder, what="this checkpoint", base=base)
    torch.nn.Module.to(model, dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the merge. Returns the exit code: 0, or 1 after one line on stderr when the merge is
    refused."""
    parser = argparse.ArgumentParser(prog="python -m trainer.model.merge")
    parser.add_argument("folder", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--base")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    arguments = parser.parse_args(argv)
    try:
        merge(
            arguments.folder,
            arguments.directory,
            base=arguments.base,
            dtype=DTYPES[arguments.dtype],
        )
    except Refused as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
