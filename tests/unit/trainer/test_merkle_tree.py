"""The hash of tensors: its format by hand, the published roots of RFC 6962's tree, and that every change
of a tensor changes it."""

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.property_examples import examples
from trainer import merkle_tree
from trainer.merkle_tree import CHUNK, NODE, leaf_hashes, merkle_root, tree_root

FORMAT = "1c58984d475e025de6e2c3bf38226a168509bd87dd2d1b030ccde9334620e07b"
"""The root of `FIXED`. It is in the logs of runs, so it may not change."""

FIXED = {
    "model.norm.weight": torch.arange(5, dtype=torch.float32) / 4,
    "model.embed": torch.arange(12, dtype=torch.float32).reshape(3, 4).to(torch.bfloat16),
    "step": torch.tensor(7),
    "empty": torch.zeros(0, 3),
}

PUBLISHED = (
    ("", "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"),
    ("00", "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"),
    ("10", "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77"),
    ("2021", "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7"),
    ("3031", "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4"),
    ("40414243", "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef"),
    ("5051525354555657", "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c"),
    (
        "606162636465666768696a6b6c6d6e6f",
        "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
    ),
)
"""The test vectors of Certificate Transparency: the content of each leaf, and the root up to it."""

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def root_by_hand(tensors: Mapping[str, torch.Tensor], *, chunk_bytes: int) -> str:
    """The root as RFC 6962 defines it: a list is split at the largest power of two below its length."""

    def tree(leaves: Sequence[bytes]) -> bytes:
        if len(leaves) < 2:
            return leaves[0] if leaves else sha256()
        half = 1 << ((len(leaves) - 1).bit_length() - 1)
        return sha256(b"\x01", tree(leaves[:half]), tree(leaves[half:]))

    def leaf(name: str) -> bytes:
        tensor = tensors[name]
        content = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        pieces = [content[at : at + chunk_bytes] for at in range(0, len(content), chunk_bytes)]
        dtype = {torch.bfloat16: "bfloat16", torch.float32: "float32"}.get(tensor.dtype)
        dtype = dtype or str(tensor.numpy().dtype)
        head = json.dumps([name, dtype, list(tensor.shape)], separators=(",", ":")).encode()
        chunks = [sha256(b"\x02", piece) for piece in pieces or [b""]]
        return sha256(b"\x00", len(head).to_bytes(8, "little"), head, *chunks)

    return tree([leaf(name) for name in sorted(tensors)]).hex()


@st.composite
def named_tensors(draw: st.DrawFn, *, least: int = 0) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text(max_size=4), unique=True, min_size=least, max_size=9))
    found = {}
    for name in names:
        shape = draw(st.lists(st.integers(least, 5), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        size = int(np.prod(shape)) * dtype.itemsize
        content = draw(st.binary(min_size=size, max_size=size))
        flat = torch.tensor(list(content), dtype=torch.uint8)
        found[name] = flat.view(dtype).reshape(shape)
    return found


def test_the_tree_has_the_published_roots() -> None:
    leaves = [sha256(b"\x00", bytes.fromhex(content)) for content, _ in PUBLISHED]
    for count, (_, root) in enumerate(PUBLISHED, start=1):
        assert tree_root(leaves[:count]).hex() == root
    assert tree_root([]) == sha256()


def test_the_format_stays_as_it_is_in_logs() -> None:
    assert merkle_root(FIXED) == root_by_hand(FIXED, chunk_bytes=merkle_tree.CHUNK_BYTES) == FORMAT


@examples(60)
@given(tensors=named_tensors(), threads=st.integers(1, 3), chunk_bytes=st.sampled_from((1, 7, 64)))
def test_the_root_is_that_of_the_definition(
    tensors: dict[str, torch.Tensor], threads: int, chunk_bytes: int
) -> None:
    """With any number of threads, and in any order of the tensors."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merkle_tree, "CHUNK_BYTES", chunk_bytes)
        torch.set_num_threads(threads)
        try:
            found = merkle_root(tensors)
            assert merkle_root(dict(reversed(tensors.items()))) == found
        finally:
            torch.set_num_threads(before)
    assert found == root_by_hand(tensors, chunk_bytes=chunk_bytes)


@examples(60)
@given(tensors=named_tensors(least=1), data=st.data())
def test_any_change_of_a_tensor_changes_the_root(
    tensors: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(tensors)))
    tensor, rest = tensors[name], {n: t for n, t in tensors.items() if n != name}
    flat = tensor.reshape(-1).view(torch.uint8).clone()
    at, bit = data.draw(st.integers(0, flat.numel() - 1)), data.draw(st.integers(0, 7))
    flat[at] ^= 1 << bit
    others = (
        rest,
        {**rest, name: flat.view(tensor.dtype).reshape(tensor.shape)},
        {**rest, name: tensor[None]},
        {**rest, name: tensor.reshape(-1).view(torch.int8)},
        {**rest, name + "'": tensor},
        {**tensors, name + "'": tensor},
    )
    roots = [merkle_root(other) for other in (tensors, *others)]
    assert len(set(roots)) == len(roots)


def test_two_tensors_that_swap_their_names_have_another_root() -> None:
    a, b = torch.zeros(3), torch.ones(3)
    assert merkle_root({"a": a, "b": b}) != merkle_root({"a": b, "b": a})


def test_a_view_has_the_root_of_its_copy() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    for view in (whole.t(), whole[:, 1:3], whole[1:, ::2], whole[0, 0]):
        assert merkle_root({"a": view}) == merkle_root({"a": view.clone().contiguous()})
        assert merkle_root({"a": view.requires_grad_()}) == merkle_root({"a": view.detach()})


def test_the_last_leaf_of_an_odd_number_counts_once() -> None:
    """With the last one doubled, as in Bitcoin's tree, two lists have one root (CVE-2012-2459)."""
    a, b, c = (sha256(bytes([number])) for number in range(3))
    assert tree_root([a, b, c]) != tree_root([a, b, c, c])


@pytest.mark.parametrize("is_separated", [True, False])
def test_no_tensor_has_the_hash_of_a_node(
    is_separated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twin: without the first bytes, the hash of a chunk of two hashes is that of their node."""
    if not is_separated:
        for name in ("CHUNK", "NODE"):
            monkeypatch.setattr(merkle_tree, name, b"")
    pair = leaf_hashes({"a": torch.zeros(1), "b": torch.ones(1)})
    content = torch.tensor(list(b"".join(pair)), dtype=torch.uint8)
    assert (merkle_tree._hash_chunk(content) != tree_root(pair)) == is_separated
    assert CHUNK != NODE
