"""Reads the header of a GGUF file: its metadata, and where its tensors are.

Anybody can publish such a file. So every count and length is compared with the bytes that are left
before anything is read or allocated, and no tensor is read here.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from schemas.errors import Refused

ENDING = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
LARGEST_HEADER = 64 << 20
MOST_ITEMS = 1 << 20
"""The most entries of the metadata, tensors, and elements of an array that is kept."""

MOST_DIMENSIONS = 4
ALIGNMENT = 32
AGAIN = "give a whole copy of the file"

Value = bool | int | float | str | tuple[str, ...] | tuple[int, ...]
"""A value of the metadata. Arrays that are not kept have none."""

SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Type of a value -> its format in `struct`."""

STRING, ARRAY = 8, 9


class NumberFormat(NamedTuple):
    """How the values of a tensor are stored: `num_values` of them in a block of `num_bytes`."""

    name: str
    num_values: int
    num_bytes: int


FORMATS: dict[int, NumberFormat] = {
    0: NumberFormat("F32", 1, 4),
    1: NumberFormat("F16", 1, 2),
    2: NumberFormat("Q4_0", 32, 18),
    3: NumberFormat("Q4_1", 32, 20),
    6: NumberFormat("Q5_0", 32, 22),
    7: NumberFormat("Q5_1", 32, 24),
    8: NumberFormat("Q8_0", 32, 34),
    10: NumberFormat("Q2_K", 256, 84),
    11: NumberFormat("Q3_K", 256, 110),
    12: NumberFormat("Q4_K", 256, 144),
    13: NumberFormat("Q5_K", 256, 176),
    14: NumberFormat("Q6_K", 256, 210),
    16: NumberFormat("IQ2_XXS", 256, 66),
    17: NumberFormat("IQ2_XS", 256, 74),
    18: NumberFormat("IQ3_XXS", 256, 98),
    19: NumberFormat("IQ1_S", 256, 50),
    20: NumberFormat("IQ4_NL", 32, 18),
    21: NumberFormat("IQ3_S", 256, 110),
    22: NumberFormat("IQ2_S", 256, 82),
    23: NumberFormat("IQ4_XS", 256, 136),
    29: NumberFormat("IQ1_M", 256, 56),
    30: NumberFormat("BF16", 1, 2),
    34: NumberFormat("TQ1_0", 256, 54),
    35: NumberFormat("TQ2_0", 256, 66),
}
"""Type of a tensor -> its format. All of them can be turned into float32."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file. `shape` begins with the rows, as in torch. `offset` counts from the beginning
    of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        form = FORMATS[self.kind]
        return self.num_values // form.num_values * form.num_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata and the tensors of a file, by name."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def read_header(file: BinaryIO, *, size: int, what: str, keep: frozenset[str]) -> GgufHeader:
    """Read the header of a file of `size` bytes, from its beginning. `keep` names the arrays that are
    returned. Raises Refused, which calls the file `what`, when it is not a whole GGUF file."""
    source = _Source(file, size, what)
    try:
        if source.take(4) != MAGIC:
            raise Refused(
                f"{what} is not a GGUF file, because it does not begin with {MAGIC.decode()}; name "
                "another file"
            )
        version, num_tensors, num_entries = source.unpack("IQQ")
        if version not in VERSIONS:
            raise Refused(
                f"{what} has the version {version} of GGUF, and the versions {VERSIONS[0]} and "
                f"{VERSIONS[1]} can be read; convert the model again"
            )
        source.check_count(num_entries, 13, "entries of metadata")
        metadata: dict[str, Value] = {}
        seen: set[str] = set()
        for _ in range(num_entries):
            key = source.text()
            if key in seen:
                raise Refused(f"{what} has the entry {key[:80]!r} twice; convert the model again")
            seen.add(key)
            value = source.value(is_kept=key in keep)
            if value is not None:
                metadata[key] = value
        tensors = _read_tensors(source, num_tensors, metadata)
    except (struct.error, UnicodeDecodeError) as error:
        raise Refused(f"{what} has a header that cannot be read: {error}; {AGAIN}") from error
    return GgufHeader(metadata, tensors)


def _read_tensors(
    source: "_Source", count: int, metadata: Mapping[str, Value]
) -> dict[str, GgufTensor]:
    what = source.what
    source.check_count(count, 32, "tensors")
    found = [_read_tensor(source) for _ in range(count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment % 8:
        raise Refused(f"{what} has the alignment {alignment!r}; convert the model again")
    start = -(-source.place // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    room = source.size - start
    for name, shape, kind, offset in found:
        if name in tensors:
            raise Refused(f"{what} has the tensor {name[:80]!r} twice; convert the model again")
        tensor = GgufTensor(name, shape, kind, start + offset)
        if offset % alignment or tensor.offset + tensor.num_bytes > source.size:
            raise Refused(
                f"{what} is cut short: its tensor {name[:80]!r} ends at byte "
                f"{tensor.offset + tensor.num_bytes}, and it has {source.size} bytes; {AGAIN}"
            )
        # Without this, many tensors could claim the same bytes, and memory for each of them.
        room -= tensor.num_bytes
        if room < 0:
            raise Refused(
                f"{what} is not a model, because its tensors claim more bytes than its {source.size}; "
                "name another file"
            )
        tensors[name] = tensor
    return tensors


def _read_tensor(source: "_Source") -> tuple[str, tuple[int, ...], int, int]:
    """The name, shape, format and offset of a tensor. Raises Refused when its format is not known."""
    name = source.text()
    (dimensions,) = source.unpack("I")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise Refused(
            f"{source.what} has the tensor {name[:80]!r} with {dimensions} dimensions; a tensor must "
            f"have 1 to {MOST_DIMENSIONS}"
        )
    columns, *others = source.unpack(f"{dimensions}Q")
    kind, offset = source.unpack("IQ")
    form = FORMATS.get(kind)
    if form is None:
        raise Refused(
            f"{source.what} has the tensor {name[:80]!r} in the quantization {kind}, which cannot be "
            f"read; use a file in one of {', '.join(known.name for known in FORMATS.values())}"
        )
    shape = (*reversed(others), columns)
    if min(shape) < 1 or columns % form.num_values:
        raise Refused(
            f"{source.what} has the tensor {name[:80]!r} with the shape {shape}, which {form.name} "
            "cannot have; convert the model again"
        )
    return name, shape, kind, offset


class _Source:
    """A file that is read from its beginning, and never beyond the largest header."""

    def __init__(self, file: BinaryIO, size: int, what: str) -> None:
        self._file = file
        self.size = size
        self.what = what
        self.place = 0

    def take(self, count: int) -> bytes:
        """The next bytes. Raises Refused when the file or the largest header has fewer."""
        self._check_room(count)
        data = self._file.read(count)
        self.place += len(data)
        if len(data) < count:
            raise self._short()
        return data

    def skip(self, count: int) -> None:
        """Pass over bytes."""
        self._check_room(count)
        self.place = self._file.seek(self.place + count)

    def _check_room(self, count: int) -> None:
        if count > self.size - self.place:
            raise self._short()
        if self.place + count > LARGEST_HEADER:
            raise Refused(
                f"{self.what} has a header of more than {LARGEST_HEADER >> 20} MiB, which no model "
                "needs; name another file"
            )

    def _short(self) -> Refused:
        return Refused(
            f"{self.what} is cut short: its header goes on after its {self.size} bytes; {AGAIN}"
        )

    def unpack(self, form: str) -> tuple[int, ...]:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def text(self) -> str:
        (length,) = self.unpack("Q")
        return self.take(length).decode()

    def check_count(self, count: int, least_bytes: int, noun: str) -> None:
        """Raises Refused when the rest of the file is too short for `count` things."""
        if count > MOST_ITEMS or count * least_bytes > self.size - self.place:
            raise Refused(
                f"{self.what} claims {count} {noun}, for which it is too short or which no model has; "
                f"{AGAIN}"
            )

    def value(self, *, is_kept: bool) -> Value | None:
        """The next value; None for an array that is not kept."""
        (kind,) = self.unpack("I")
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self._scalar(kind)
        kind, count = self.unpack("IQ")
        if is_kept:
            self.check_count(count, 1, "elements of an array")
        if kind == STRING:
            if is_kept:
                return tuple(self.text() for _ in range(count))
            self.check_count(count, 8, "elements of an array")
            for _ in range(count):
                self.skip(self.unpack("Q")[0])
            return None
        width = struct.calcsize(f"<{self._format(kind)}")
        if is_kept:
            return self.unpack(f"{count}{self._format(kind)}")
        self.skip(count * width)
        return None

    def _scalar(self, kind: int) -> bool | int | float:
        value: bool | int | float = self.unpack(self._format(kind))[0]
        return value

    def _format(self, kind: int) -> str:
        if kind not in SCALARS:
            raise Refused(
                f"{self.what} has metadata of the unknown type {kind}; convert the model again"
            )
        return SCALARS[kind]
