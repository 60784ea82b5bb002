"""Which addresses git may dial: public ones, and what the operator adds."""

import pytest

from infra.settings.git import LAPTOP, AllowedAddresses, GitSettings
from infra.settings.settings import BadSetting, Settings

PUBLIC = ("8.8.8.8", "140.82.121.3", "2606:4700::1111", "::ffff:8.8.8.8")
OTHERS = {
    "loopback": (
        *("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
    ),
    "private": (
        *("10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fc00::1", "::ffff:10.0.0.1"),
    ),
}
NEVER = (
    *("0.0.0.0", "::", "169.254.169.254", "169.254.0.1"),  # noqa: S104 - nothing binds to it
    *("fe80::1", "fe80::1%eth0", "fec0::1", "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1"),
    *("192.0.2.1", "198.18.0.1", "2001:db8::1", "192.88.99.1", "3fff::1", "::127.0.0.1"),
    *("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254"),
    *("2002:a9fe:a9fe::", "2001:0:7f00:1::", "64:ff9b::a9fe:a9fe"),
    *("127.1", "0177.0.0.1", "2130706433", "0x7f000001", "localhost", "", "8.8.8.8 "),
)


def load(**environ: str) -> GitSettings:
    return Settings.load({f"HEADRACE_{name}": value for name, value in environ.items()}).git


def test_public_addresses_are_permitted_and_no_others() -> None:
    none = AllowedAddresses()
    assert all(map(none.permits, PUBLIC))
    for address in (*OTHERS["loopback"], *OTHERS["private"], *NEVER):
        assert not none.permits(address), address


@pytest.mark.parametrize("word", OTHERS)
def test_a_word_permits_its_addresses_and_no_metadata_address(word: str) -> None:
    allowed = load(GIT_ALLOW=word).addresses
    assert all(map(allowed.permits, OTHERS[word]))
    assert not any(allowed.permits(one) for w, all_ in OTHERS.items() if w != word for one in all_)
    assert not any(map(allowed.permits, NEVER))


def test_a_network_permits_what_it_contains_and_nothing_else() -> None:
    allowed = load(GIT_ALLOW="10.1.0.0/16, 169.254.169.254 ,fd00::/8").addresses
    assert allowed.permits("10.1.2.3")
    assert allowed.permits("::ffff:10.1.2.3")
    assert allowed.permits("169.254.169.254")
    assert allowed.permits("fd00:ec2::254")
    assert not allowed.permits("10.2.0.1")
    assert not allowed.permits("127.0.0.1")


def test_a_server_of_one_user_allows_files_and_loopback_unless_something_is_set() -> None:
    assert load() == LAPTOP
    assert load(URL="http://localhost:1", PUBLIC_URL="http://[::1]:1") == LAPTOP
    for closed in (
        load(URL="http://api:8420"),
        load(URL="http://0.0.0.0:8420"),
        load(PUBLIC_URL="https://headrace.example.org"),
        load(GIT_ALLOW="none"),
    ):
        assert closed == GitSettings()
    assert load(GIT_ALLOW="private").files is False
    assert load(GIT_ALLOW="file,git.example.org").addresses.hosts == {"git.example.org"}
    assert load(GIT_ALLOW="FILE").files is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GIT_ALLOW", "10.0.0.1/8"),
        ("GIT_ALLOW", "file,,loopback"),
        ("GIT_ALLOW", "http://x"),
        ("GIT_ALLOW", "*"),
        ("GIT_ALLOW", "*.example.org"),
        ("GIT_QUOTA_MB", "0"),
        ("GIT_QUOTA_MB", "much"),
    ],
)
def test_other_values_are_refused(name: str, value: str) -> None:
    with pytest.raises(BadSetting, match=f"HEADRACE_{name} holds"):
        load(**{name: value})


def test_none_beside_another_word_is_the_name_of_no_host() -> None:
    assert load(GIT_ALLOW="none,file").addresses.hosts == frozenset()


def test_the_quota_is_read_in_megabytes() -> None:
    assert load().quota_bytes == 2048 << 20
    assert load(GIT_QUOTA_MB="100").quota_bytes == 100 << 20
