"""Every key-encryption key keeps the contract, and KMS says why it cannot be used."""

from collections.abc import Iterator

import pytest

from infra.identity.secrets.kms import KmsWrapper
from infra.identity.secrets.local import LocalKey
from infra.identity.secrets.sealed import Sealer
from infra.ports.secrets import KeyWrapper
from schemas.errors import InvalidConfig, TransientError
from tests.contracts.key_wrapper_suite import DATA_KEY, KeyWrapperSuite
from tests.kit.kms import FakeKms, fake_kms

ARN = "arn:aws:kms:eu-central-1:111122223333:key/key-one"


class TestLocal(KeyWrapperSuite):
    @pytest.fixture
    def wrapper(self) -> KeyWrapper:
        return LocalKey(lambda: bytes(32))

    @pytest.fixture
    def other(self) -> KeyWrapper:
        return LocalKey(lambda: b"k" * 32)


@pytest.fixture
def kms(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKms]:
    with fake_kms(one="key-one", two="key-two") as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


class TestKms(KeyWrapperSuite):
    @pytest.fixture
    def wrapper(self, kms: FakeKms) -> KeyWrapper:
        return KmsWrapper("alias/one")

    @pytest.fixture
    def other(self, kms: FakeKms) -> KeyWrapper:
        return KmsWrapper("alias/two")

    async def test_a_key_has_one_id_whatever_it_is_called_by(self, kms: FakeKms) -> None:
        for name in ("alias/one", "key-one", ARN):
            assert await KmsWrapper(name).key_id() == f"kms:{ARN}"

    async def test_no_request_holds_more_than_a_data_key(self, kms: FakeKms) -> None:
        sealer = Sealer(KmsWrapper("alias/one"))
        sealed = await sealer.seal("hush-hush-1", owner="w", field="KEY")
        assert await sealer.open(sealed, owner="w", field="KEY") == "hush-hush-1"
        assert "hush" not in str(kms.requests)
        assert [operation for operation, _ in kms.requests] == ["Encrypt", "Decrypt"]
        assert kms.requests[0][1]["EncryptionContext"] == {"headrace": "1/w/KEY"}

    @pytest.mark.parametrize(
        ("code", "raises"),
        [
            ("ThrottlingException", TransientError),
            ("KMSInternalException", TransientError),
            ("AccessDeniedException", InvalidConfig),
            ("NotFoundException", InvalidConfig),
            ("DisabledException", InvalidConfig),
        ],
    )
    async def test_a_refusal_is_named(
        self, kms: FakeKms, code: str, raises: type[Exception]
    ) -> None:
        kms.refusal = code
        with pytest.raises(raises, match=code) as refused:
            await KmsWrapper("alias/one").wrap(DATA_KEY, context="c")
        assert refused.value.__cause__ is None

    async def test_a_wrong_signature_is_refused(
        self, kms: FakeKms, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The fake checks its requests, or the tests above would show nothing."""
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        with pytest.raises(InvalidConfig, match="InvalidSignatureException"):
            await KmsWrapper("alias/one").key_id()

    async def test_a_key_moves_from_a_file_to_kms(self, kms: FakeKms) -> None:
        local = LocalKey(lambda: bytes(32))
        sealed = await Sealer(local).seal("hush-hush-1", owner="w", field="KEY")
        both = Sealer(KmsWrapper("alias/one"), lambda: [local])
        moved = await both.rewrap(sealed, owner="w", field="KEY")
        alone = Sealer(KmsWrapper("alias/one"))
        assert await alone.open(moved, owner="w", field="KEY") == "hush-hush-1"


async def test_kms_that_is_not_there_may_answer_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_kms(one="key-one") as gone:
        for name, value in gone.environment.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(TransientError, match="does not answer"):
        await KmsWrapper("alias/one").key_id()
