"""What an MCP server wrote before it ended is in the error, however busy the machine is."""

import time

import pytest

from headrace.tools.mcp_client import StderrTail


async def test_the_last_output_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the thread that reads it gets its turn late."""
    read = StderrTail._read

    def read_late(self: StderrTail, reading: int) -> None:
        time.sleep(0.2)
        read(self, reading)

    monkeypatch.setattr(StderrTail, "_read", read_late)
    tail = StderrTail()
    with tail.open() as written:
        written.write("wrong\n")
    assert await tail.text() == "wrong"


async def test_a_process_that_goes_on_writing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.tools.mcp_client.READ_S", 0.1)
    tail = StderrTail()
    with tail.open() as written:
        assert await tail.text() == ""
        written.write("later\n")
    assert await tail.text() == "later"


async def test_a_server_that_was_never_started_has_written_nothing() -> None:
    assert await StderrTail().text() == ""
