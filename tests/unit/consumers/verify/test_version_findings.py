"""A rebuilt version is compared with the log by its hash, by its files, and tensor by tensor."""

import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from uuid import UUID

import pytest
import torch
from safetensors.torch import save

from consumers.learn.versions import store_version
from consumers.verify.audit import AuditReport, LogContents, _matches_log
from schemas.events import PolicyUpdated
from schemas.learner import LearnerState, StepResult
from tests.kit.fakes import bench
from trainer.merkle_tree import merkle_root

WEIGHTS = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
MOMENTS = {"exp_avg.a": torch.zeros(2, 3), "exp_avg.b": torch.ones(4)}


def version_of(weights: dict[str, torch.Tensor]) -> LearnerState:
    files = save(weights), save(MOMENTS)
    return LearnerState(
        step=3,
        weights=files[0],
        weights_sha256=merkle_root(weights),
        state=files[1],
        state_sha256=merkle_root(MOMENTS),
        weights_file_sha256=sha256(files[0]).hexdigest(),
        state_file_sha256=sha256(files[1]).hexdigest(),
    )


MADE = version_of(WEIGHTS)
OTHER = version_of(WEIGHTS | {"b": torch.tensor([1.0, 1, 1, 2])})


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (MADE, None),
        (
            OTHER,
            r"weights rebuilt are \w{16}, not \w{16} \(differing tensors: 1, the first is b\)$",
        ),
        (
            replace(OTHER, weights_sha256=MADE.weights_sha256),
            r"bytes of the weights rebuilt are .* the first is b\)$",
        ),
        (replace(MADE, state_sha256="0" * 64), r"optimizer state rebuilt are \w{16}, not 0{16}$"),
        (replace(OTHER, weights=None, state=None), r"weights rebuilt are \w{16}, not \w{16}$"),
    ],
    ids=["equal", "other tensors", "other bytes under the same hash", "other hash", "only a hash"],
)
async def test_a_version_that_differs_is_a_finding(
    tmp_path: Path, stored: LearnerState, message: str | None
) -> None:
    ports, log, report = bench(tmp_path).ports, LogContents(), AuditReport()
    state = await store_version(stored, ports.artifacts, "r1", step=3)
    log.seen = {ref.uri: True for ref in (state.weights, state.state) if ref is not None}
    recorded = PolicyUpdated(
        run="r1", step=3, state=state, batch=UUID(int=0), metrics={}, plan=(), versions={}
    )
    result = StepResult(state=MADE, metrics={})
    matches = await _matches_log(result, recorded, log, report, ports, has_forks=False)
    assert matches == (message is None)
    if message is None:
        assert report.findings == []
        assert report.adapter_sha256 == MADE.weights_file_sha256
    else:
        [finding] = report.findings
        assert (finding.kind, finding.what) == ("event", "policy-r1 step 3")
        assert re.search(message, finding.message)
