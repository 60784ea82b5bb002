"""Archives of artifacts come from strangers: what they may hold is bounded, and plain files only."""

import gzip
import io
import resource
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.core.registry import archives
from producers.core.registry.archives import ReadArchive, read_archive
from producers.core.registry.confined_check import check_archive
from producers.core.registry.publishing import artifact_key, check
from schemas.errors import InvalidConfig
from tests.kit.artifacts import packed, task_archive


def read(folder: Path, data: bytes) -> ReadArchive:
    path = folder / "archive"
    path.write_bytes(data)
    return read_archive(path, keep=frozenset({"task.yaml"}), keep_bytes=100)


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def test_files_are_listed_in_nfc_with_their_hashes(tmp_path: Path) -> None:
    found = read(tmp_path, packed({"./cafe\u0301/task.yaml": "b", "task.yaml": "x" * 200}))
    files = [("caf\u00e9/task.yaml", 1), ("task.yaml", 200)]
    assert [(one.path, one.size) for one in found.files] == files
    assert found.kept == {"task.yaml": b"x" * 101}
    assert found.unpacked_bytes == 201


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (member("../x"), "without '..'"),
        (member("a/../../x"), "without '..'"),
        (member("/etc/passwd"), "relative"),
        (member("a\\..\\x"), "without '..'"),
        (member("C:/x"), "and ':'"),
        (member("a\nb"), "printable"),
        (member("a\u202eb"), "printable"),
        (member("a/" * 40 + "x"), "32 levels"),
        (member("x" * 600), "512 bytes"),
        (member("x", tarfile.SYMTYPE, linkname="/etc/passwd"), "a link"),
        (member("x", tarfile.LNKTYPE, linkname="task.yaml"), "a link"),
        (member("x", tarfile.CHRTYPE), "not a plain file"),
        (member("x", tarfile.BLKTYPE), "not a plain file"),
        (member("x", tarfile.FIFOTYPE), "not a plain file"),
        (member("task.yaml"), "twice"),
        (member("./task.yaml"), "twice"),
        (member("task.yaml/x"), "as a file and as a folder"),
        (member("."), "without a name"),
    ],
    ids=lambda value: repr(value.name)[:30] + value.type.decode() if hasattr(value, "name") else "",
)
def test_a_member_that_is_not_a_plain_file_of_its_own_is_refused(
    tmp_path: Path, hostile: tarfile.TarInfo, said: str
) -> None:
    with pytest.raises(InvalidConfig, match=said):
        read(tmp_path, packed({"task.yaml": "x"}, [(hostile, b"")]))


def test_two_names_that_are_one_in_nfc_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="twice"):
        read(tmp_path, packed({"caf\u00e9": "a", "cafe\u0301": "b"}))


@pytest.mark.parametrize(
    ("first", "second"),
    [("README", "readme"), ("task.yaml", "Task.yaml"), ("a/x", "A/y"), ("stra\u00dfe", "STRASSE")],
)
def test_two_names_that_differ_in_case_alone_are_refused(
    tmp_path: Path, first: str, second: str
) -> None:
    with pytest.raises(InvalidConfig, match="some systems take for one"):
        read(tmp_path, packed({first: "a", second: "b"}))


@pytest.fixture
def usual_depth() -> Iterator[None]:
    """Calls as deep as the process that checks archives allows; other tests allow more."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_depth")
def test_a_chain_of_headers_is_refused_with_the_reason(tmp_path: Path) -> None:
    record = b"11 comment=\n".ljust(512, b"\0")
    header = member("x", tarfile.XHDTYPE, size=12).tobuf(tarfile.USTAR_FORMAT) + record
    plain = gzip.decompress(packed({"task.yaml": "x"}))
    with pytest.raises(InvalidConfig, match="pack it again"):
        read(tmp_path, gzip.compress(header * 5000 + plain))


def test_a_bomb_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "SPARE_BYTES", 1 << 20)
    bomb = packed({"task.yaml": "x", "zeros": bytes(16 << 20)})
    assert len(bomb) < 32 << 10
    with pytest.raises(InvalidConfig, match="leave out large files"):
        read(tmp_path, bomb)


def test_the_twin_without_the_limit_the_bomb_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_RATIO", 10_000)
    found = read(tmp_path, packed({"task.yaml": "x", "zeros": bytes(16 << 20)}))
    assert found.unpacked_bytes == (16 << 20) + 1


def test_zeros_after_the_end_count_as_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "SPARE_BYTES", 1 << 20)
    plain = gzip.decompress(packed({"task.yaml": "x"}))
    with pytest.raises(InvalidConfig, match="leave out large files"):
        read(tmp_path, gzip.compress(plain + bytes(16 << 20)))


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_FILES", 3)
    with pytest.raises(InvalidConfig, match="more than 3 files"):
        read(tmp_path, packed({str(number): "" for number in range(4)}))


def test_too_many_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_ENTRIES", 3)
    folders = [(member(str(number), tarfile.DIRTYPE), b"") for number in range(3)]
    with pytest.raises(InvalidConfig, match="more than 3 files and folders"):
        read(tmp_path, packed({"task.yaml": "x"}, folders))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04 a zip",
        packed({"a": "x" * 5000})[:-20],
        gzip.compress(b"not a tar" * 100),
        gzip.compress(gzip.decompress(packed({"a": "x" * 3000}))[:1500]),
    ],
    ids=["empty", "zip", "cut gzip", "no tar", "cut tar"],
)
def test_bytes_that_are_not_a_whole_archive_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InvalidConfig, match="pack it again"):
        read(tmp_path, data)


def test_files_behind_a_damaged_header_are_not_overlooked(tmp_path: Path) -> None:
    plain = bytearray(gzip.decompress(packed({"task.yaml": "x", "hidden": "y"})))
    plain[1024 + 148] ^= 1  # a digit of the second header's checksum
    with pytest.raises(InvalidConfig, match="damaged header"):
        read(tmp_path, gzip.compress(bytes(plain)))


def test_a_second_archive_behind_the_first_is_refused(tmp_path: Path) -> None:
    both = b"".join(gzip.decompress(packed({name: "x"})) for name in ("task.yaml", "hidden"))
    with pytest.raises(InvalidConfig, match="bytes after its end"):
        read(tmp_path, gzip.compress(both))


async def test_a_header_that_needs_too_much_memory_ends_the_confined_check(tmp_path: Path) -> None:
    out = io.BytesIO()
    huge = member("x", tarfile.XHDTYPE, size=3 << 30)
    out.write(huge.tobuf(tarfile.GNU_FORMAT))
    path = tmp_path / "archive"
    path.write_bytes(gzip.compress(out.getvalue() + bytes(1 << 20)))
    before = resource.getrlimit(resource.RLIMIT_AS)
    report = await check(path, artifact_key("main", "task", "a", "1.0.0"), out=tmp_path / "out")
    assert report.issues
    assert not (tmp_path / "out").exists()
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ("a: &x [1]\nb: *x\n", "uses an alias"),
        ("a: 1\na: 2\n", "twice"),
        ("1: a\n", "keys are text"),
        ("a: " + "[" * 40 + "]" * 40, "nested more than 32 levels"),
        ("a: !!python/object/apply:os.system [id]\n", "cannot be read as YAML"),
        ("- a\n", "must be a mapping"),
        ("a: .nan\n", "JSON does not know"),
        ('a: "\\0"\n', "NUL"),
        ("a: [", "cannot be read as YAML"),
        ("a: 0x" + "f" * 9_000, "beyond 2^53"),
        ("a: -9007199254740993", "beyond 2^53"),
        ("x" * (300 << 10), "more than 256 KiB"),
        ("a: [" + "1," * 30_000 + "]", "more than 20000 values"),
        ("version: 1.0\n", "must be text; quote it"),
        ("name: other\n", "make the two equal"),
    ],
    ids=lambda text: text[:20] if len(text) < 100 else str(len(text)),
)
def test_a_hostile_manifest_is_refused_with_the_reason(
    tmp_path: Path, manifest: str, said: str
) -> None:
    path = tmp_path / "archive"
    path.write_bytes(packed({"model.yaml": manifest}))
    out = tmp_path / "out"
    report = check_archive(path, "model", name="m", version="1.0.0", out=out)
    assert [said in issue.message for issue in report.issues] == [True]
    assert not out.exists()


def test_a_summary_holds_no_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    path.write_bytes(packed({"model.yaml": 'summary: "a\\x1b[31m \\u202e b"\n'}))
    report = check_archive(path, "model", name="m", version="1.0.0", out=tmp_path / "out")
    assert (report.issues, report.summary) == ((), "a?[31m ? b")


def test_dates_and_text_become_json(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    path.write_bytes(packed({"model.yaml": "made: 2026-11-29\nsummary: |\n  two\n  lines\n"}))
    report = check_archive(path, "model", name="m", version="1.0.0", out=tmp_path / "out")
    assert (report.issues, report.summary) == ((), "two lines")
    assert '"made":"2026-11-29"' in (tmp_path / "out").read_text()


@given(st.binary(max_size=200), st.integers(0, 400))
def test_a_damaged_archive_is_read_as_it_was_or_refused(noise: bytes, place: int) -> None:
    data = bytearray(gzip.decompress(task_archive(more="x")))
    data[place : place + len(noise)] = noise
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = read(Path(folder), gzip.compress(bytes(data)))
        except InvalidConfig:
            return
    assert all(
        not one.path.startswith("/") and ".." not in one.path.split("/") for one in found.files
    )
