"""An account for each service of a cluster at an S3 store, and the policy of its bucket.

Services may put, read and list the objects below the prefix of HEADRACE_BLOBS. The API deletes those
that nothing names any more, and `learn` the weights of runs that it has replaced. The others delete
only the objects of their probe. None may change the policy or remove the bucket.

Accounts are made with the admin API of Versity's gateway. At another store, make them in its own way,
and give the bucket the policy that `bucket_policy` returns, with their names.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any
from xml.sax.saxutils import escape

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import BotoCoreError, ClientError
from botocore.httpsession import URLLib3Session

from infra.blobs.s3.client import HOME_REGION, Keys, S3Store
from infra.settings.s3 import S3Place
from schemas.errors import InvalidConfig, TransientError

API, LEARN = "api", "learn"
OBJECT_ACTIONS = ("s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload")
PROBES = ".probe/"
EXISTS = 409


def access_key_of(service: str) -> str:
    """The access key of a service."""
    return f"headrace-{service}"


def bucket_policy(place: S3Place, services: Iterable[str]) -> dict[str, Any]:
    """The rights of each service in the bucket."""
    bucket = f"arn:aws:s3:::{place.bucket}"
    objects = f"{bucket}/{place.object_prefix('')}"
    everyone = [access_key_of(service) for service in services]
    return {
        "Version": "2012-10-17",
        "Statement": [
            _allow(everyone, ("s3:ListBucket",), bucket),
            _allow(everyone, OBJECT_ACTIONS, f"{objects}*"),
            _allow(everyone, ("s3:DeleteObject",), f"{objects}{PROBES}*"),
            _allow([access_key_of(LEARN)], ("s3:DeleteObject",), f"{objects}runs/*/objects/*"),
            _allow([access_key_of(API)], ("s3:DeleteObject",), f"{objects}*"),
        ],
    }


async def make_s3_accounts(
    place: S3Place, *, endpoint: str, admin: Keys, accounts: Mapping[str, str]
) -> None:
    """Make the accounts of these services (name -> secret key), or give existing ones this secret, and
    set the policy of the bucket. Raises InvalidConfig when the store refuses, and TransientError when it
    does not answer."""
    await asyncio.to_thread(_make, place, endpoint, admin, accounts)


def _make(place: S3Place, endpoint: str, admin: Keys, accounts: Mapping[str, str]) -> None:
    store = S3Store(place, endpoint=endpoint, keys=admin)
    try:
        for service, secret in accounts.items():
            _make_account(endpoint, admin, access_key_of(service), secret)
        policy = json.dumps(bucket_policy(place, accounts))
        store.client.put_bucket_policy(Bucket=place.bucket, Policy=policy)
    except ClientError as error:
        raise InvalidConfig(
            f"the S3 store at {endpoint} refuses the policy of {place.bucket}: {error}; name the keys "
            "of its administrator"
        ) from error
    except BotoCoreError as error:
        raise TransientError(f"the S3 store at {endpoint} does not answer: {error}") from error
    finally:
        store.close()


def _make_account(endpoint: str, admin: Keys, access: str, secret: str) -> None:
    about = f"<Access>{escape(access)}</Access><Secret>{escape(secret)}</Secret><Role>user</Role>"
    status, said = _ask(endpoint, admin, "create-user", f"<Account>{about}</Account>")
    if status == EXISTS:
        changes = f"<MutableProps><Secret>{escape(secret)}</Secret></MutableProps>"
        status, said = _ask(endpoint, admin, f"update-user?access={access}", changes)
    if status >= 400:
        raise InvalidConfig(
            f"the S3 store at {endpoint} makes no account {access}: {said[:300]}; name the keys of its "
            "administrator, and start Versity's gateway with --iam-dir"
        )


def _ask(endpoint: str, admin: Keys, call: str, body: str) -> tuple[int, str]:
    """Send a signed request to the admin API. Returns the status and the text of the answer."""
    request = AWSRequest("PATCH", f"{endpoint}/{call}", data=body.encode())
    S3SigV4Auth(Credentials(admin.access, admin.secret), "s3", HOME_REGION).add_auth(request)
    answer = URLLib3Session().send(request.prepare())
    return answer.status_code, answer.text


def _allow(users: list[str], actions: tuple[str, ...], resource: str) -> dict[str, Any]:
    return {
        "Effect": "Allow",
        "Principal": {"AWS": users},
        "Action": list(actions),
        "Resource": resource,
    }
