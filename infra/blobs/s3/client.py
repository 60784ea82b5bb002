"""Calls to an S3 store: boto3 in a bounded pool of threads, retried with jitter while the store is
unavailable.

boto3's own retries are off, so that waiting takes no thread and each try is counted here. Every request
is signed over the SHA-256 of its body, so the store itself refuses a body that arrived damaged. boto3's
newer checksum headers are sent only where S3 requires them, because some stores refuse them.
"""

import asyncio
import copy
import logging
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import boto3
from botocore.config import Config

from infra.blobs.s3.errors import (
    TAKEN,
    S3Error,
    StoreRefuses,
    explain,
    is_missing,
    is_passing,
    status,
)
from infra.ports.services import BlobExists
from infra.settings.s3 import S3Place
from schemas.errors import NotFound, StoreAway

logger = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 16
CONNECT_S = 5.0
READ_S = 45.0
"""How long a store may be silent within a request."""
PATIENCE_S = 60.0
"""How long a request is retried before the caller gets an error."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
HOME_REGION = "us-east-1"
"""The region that self-hosted stores use unless they are configured otherwise."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Explicit credentials; without them boto3 searches its own chain of sources."""

    access: str
    secret: str


class S3Store:
    """One bucket of one store. `client` makes requests, and `call` runs them."""

    def __init__(
        self,
        place: S3Place,
        *,
        endpoint: str | None = None,
        keys: Keys | None = None,
        patience_s: float = PATIENCE_S,
        read_s: float = READ_S,
    ) -> None:
        self.place = place
        self.client = _client(endpoint, keys, read_s)
        self.address = endpoint or str(self.client.meta.endpoint_url)
        if endpoint is not None:
            # boto3 would follow a redirection as if to another AWS region, and loop at this address.
            self.client.meta.events.register_first("needs-retry.s3", self._refuse_redirection)
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="s3")

    async def call(self, request: Callable[..., T], **arguments: Any) -> T:
        """Make a request (a method of `client`, or a function that calls some), and retry it while the
        store is unavailable. The request must be safe to repeat.

        Raises NotFound (404), BlobExists (412), StoreRefuses for an answer that does not change by
        itself, and StoreAway when `patience_s` is over.
        """
        give_up_at = time.monotonic() + self._patience_s
        loop, last = asyncio.get_running_loop(), None
        for pause_s in pauses():
            try:
                return await loop.run_in_executor(self._pool, partial(request, **arguments))
            except S3Error as error:
                if not is_passing(error):
                    raise self._meaning(error) from error
                last = error
            if time.monotonic() + pause_s > give_up_at:
                break
            logger.info("retrying a request to the S3 store at %s: %s", self.address, last)
            await asyncio.sleep(pause_s)
        raise StoreAway(
            f"the S3 store at {self.address} has failed every request for {self._patience_s:.0f} s "
            f"(last: {last}); check the store, or correct HEADRACE_S3_ENDPOINT"
        ) from last

    def with_patience(self, patience_s: float) -> "S3Store":
        """The same store, with another time for retries."""
        other = copy.copy(self)
        other._patience_s = patience_s
        return other

    def close(self) -> None:
        """Release threads and connections. Requests under way end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.client.close()

    def _refuse_redirection(self, response: Any, **_: object) -> None:
        if response is not None and 300 <= response[0].status_code < 400:
            target = response[0].headers.get("location", "another address")
            raise StoreRefuses(
                f"the server at {self.address} redirects to {target}; name the store's own address "
                "in HEADRACE_S3_ENDPOINT"
            )

    def _meaning(self, error: Exception) -> Exception:
        if is_missing(error):
            return NotFound(f"the S3 store at {self.address} has no such object in {self.place}")
        if status(error) == TAKEN:
            return BlobExists(str(error))
        return StoreRefuses(explain(error, bucket=self.place.bucket, place=self.address))


def pauses() -> Iterator[float]:
    """Yield the seconds to wait between tries. They double up to a bound, and each is shortened at
    random, so that processes that failed together do not retry together."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _client(endpoint: str | None, keys: Keys | None, read_s: float) -> Any:
    """A client that threads may share. A store with its own address is addressed by path, because its
    buckets have no DNS names."""
    logging.getLogger("botocore.credentials").setLevel(
        logging.WARNING
    )  # it logs where they were found
    session = boto3.session.Session(
        aws_access_key_id=keys.access if keys else None,
        aws_secret_access_key=keys.secret if keys else None,
    )
    return session.client(
        "s3",
        endpoint_url=endpoint,
        region_name=session.region_name or HOME_REGION,
        config=Config(
            connect_timeout=CONNECT_S,
            read_timeout=read_s,
            max_pool_connections=THREADS,
            retries={"total_max_attempts": 1, "mode": "standard"},
            signature_version="s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            tcp_keepalive=True,
            s3={
                "addressing_style": "path" if endpoint else "auto",
                "payload_signing_enabled": True,
            },
        ),
    )
