"""The levels that confine user code keep its contract."""

from collections.abc import AsyncIterator

import pytest

from infra.sandbox.sandbox import LocalUserCode
from tests.contracts.user_code_suite import UserCodeSuite, fetch_snapshot
from tests.kit.runsc import runsc

pytestmark = pytest.mark.processes


class TestTrusted(UserCodeSuite):
    @pytest.fixture
    async def user(self) -> AsyncIterator[LocalUserCode]:
        made = LocalUserCode("process-trusted", fetch=fetch_snapshot)
        yield made
        await made.aclose()


class TestBubblewrap(UserCodeSuite):
    @pytest.fixture
    async def user(self) -> AsyncIterator[LocalUserCode]:
        made = LocalUserCode("bwrap", fetch=fetch_snapshot)
        yield made
        await made.aclose()


@pytest.mark.gvisor
class TestGVisor(UserCodeSuite):
    @pytest.fixture
    async def user(self) -> AsyncIterator[LocalUserCode]:
        runsc()
        made = LocalUserCode("gvisor", fetch=fetch_snapshot)
        yield made
        await made.aclose()
