"""Stores the output of a call of user code: its files become artifacts."""

from infra.ports.ports import Ports
from infra.ports.services import UserOutput
from schemas.sampling import SampleOutput


async def store_output(left: UserOutput, ports: Ports, *, run: str) -> SampleOutput:
    """Store the files of an output, and return it with references to them."""
    files = {name: await ports.artifacts.put(data, run=run) for name, data in left.files.items()}
    return SampleOutput(
        stdout=left.stdout, traceback=left.traceback, files=files, is_cut=left.is_cut
    )
