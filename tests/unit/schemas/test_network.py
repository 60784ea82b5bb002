"""Addresses for user code: every form of a host has one spelling, and nothing else is an address."""

import pytest

from schemas.network import LONGEST, NetworkAddress, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port", "shown"),
    [
        ("API.Example.com:443", "api.example.com", 443, "api.example.com:443"),
        ("10.0.0.5:80", "10.0.0.5", 80, "10.0.0.5:80"),
        ("[2001:DB8::0:1]:65535", "2001:db8::1", 65535, "[2001:db8::1]:65535"),
    ],
)
def test_an_address_has_one_spelling(text: str, host: str, port: int, shown: str) -> None:
    address = parse_address(text)
    assert address == NetworkAddress(host, port)
    assert str(address) == shown
    assert parse_address(shown) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "a", "a:", ":1", "a:0", "a:65536", "a:١", "a:-1", "a b:1", "a.:1", "http://a:1"),
        *(
            "1:1",
            "0x7f.1:1",
            "127.1:80",
            "010.0.0.1:80",
            "::1:80",
            "[::1%lo]:80",
            "[a]:80",
            "a\n:1",
        ),
        "a" * LONGEST + ":1",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        parse_address(text)
