"""Two files of tensors are compared by name."""

import pytest
import torch
from safetensors.torch import save

from consumers.verify.tensor_files import differing_tensors

TENSORS = {"a": torch.zeros(2, 3), "b": torch.arange(4), "c": torch.ones(5).to(torch.bfloat16)}
FILE = save(TENSORS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({"b": torch.tensor([0, 1, 2, 4])}, ["b"]),
        ({"a": torch.zeros(3, 2), "c": torch.ones(5)}, ["a", "c"]),
        ({"d": torch.zeros(1)}, ["d"]),
    ],
)
def test_tensors_that_differ_are_named(changes: dict[str, torch.Tensor], names: list[str]) -> None:
    other = save({**TENSORS, **changes})
    assert differing_tensors(FILE, other) == names
    assert differing_tensors(other, FILE) == names


def test_a_tensor_that_is_cut_off_differs() -> None:
    assert differing_tensors(FILE, FILE[:-1])


@pytest.mark.parametrize(
    "other", [b"", b"abc", FILE[:20], b"\xff" * 64, b"\x02" + bytes(7) + b"[]"]
)
def test_a_file_without_a_header_names_nothing(other: bytes) -> None:
    assert differing_tensors(FILE, other) == []
