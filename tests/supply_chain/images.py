"""`make digests`: writes the digest of each foreign image beside its tag, as its registry states it now.

A tag can be moved to other content, a digest cannot. The registry's answer is hashed here, so that the
digest is that of the content that was sent.
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
FILES = ("docker-compose.yml", *(f"deploy/Dockerfile.{name}" for name in ("control", "worker")))
OURS = "headrace-"
IMAGE = re.compile(
    r"(?m)^(?P<before>\s*image:\s+|FROM\s+)(?P<image>[a-z0-9][a-z0-9.:/_-]*:[\w.-]+)(?P<digest>@sha256:[0-9a-f]{64})?(?=\s|$)"
)
KINDS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
"""Media types of manifests. The first two list a manifest for each platform."""

HUB = "registry-1.docker.io"
TIMEOUT_S = 30.0


def images_of(text: str) -> tuple[str, ...]:
    """Return the foreign images that a Compose file or Dockerfile names, with their digest if they have
    one."""
    found = (f"{one['image']}{one['digest'] or ''}" for one in IMAGE.finditer(text))
    return tuple(dict.fromkeys(image for image in found if not image.startswith(OURS)))


def pin(text: str, digest_of: Callable[[str], str]) -> str:
    """Return the text with the digest of each foreign image behind its tag."""

    def replace(found: re.Match[str]) -> str:
        if found["image"].startswith(OURS):
            return found[0]
        return f"{found['before']}{found['image']}@{digest_of(found['image'])}"

    return IMAGE.sub(replace, text)


class Registry:
    """Asks registries for digests. `client` sends the requests, `scheme` is https but for tests."""

    def __init__(self, client: httpx.Client, *, scheme: str = "https") -> None:
        self._client = client
        self._scheme = scheme
        self._digests: dict[str, str] = {}

    def digest(self, image: str) -> str:
        """Return the digest that a tag names now. Raises ValueError when the registry does not state
        it, and httpx.HTTPError when it does not answer."""
        if image not in self._digests:
            self._digests[image] = self._ask(image)
        return self._digests[image]

    def _ask(self, image: str) -> str:
        host, name, tag = _place(image)
        url = f"{self._scheme}://{host}/v2/{name}/manifests/{tag}"
        headers = {"Accept": ", ".join(KINDS)}
        answer = self._client.get(url, headers=headers)
        if answer.status_code == 401:
            token = self._token(answer.headers.get("www-authenticate", ""), image)
            answer = self._client.get(url, headers={**headers, "Authorization": f"Bearer {token}"})
        if answer.status_code != 200:
            raise ValueError(f"{host} answered {answer.status_code} for {image}; check the tag")
        digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
        stated = answer.headers.get("docker-content-digest", digest)
        if stated != digest:
            raise ValueError(f"{host} states {stated} for {image} and sent {digest}; try again")
        return digest

    def _token(self, challenge: str, image: str) -> str:
        """Return a token for anonymous reading, from the place that the challenge names."""
        fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        realm = fields.pop("realm", "")
        if not realm.startswith(f"{self._scheme}://"):
            raise ValueError(f"the registry of {image} asks for a login that is not understood")
        answer = self._client.get(realm, params=fields).raise_for_status().json()
        return str(answer.get("token") or answer.get("access_token"))


def _place(image: str) -> tuple[str, str, str]:
    """The registry's host, the repository and the tag of an image."""
    name, _, tag = image.rpartition(":")
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first):
        return first, rest, tag
    return HUB, name if slash else f"library/{name}", tag


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make digests", description=__doc__)
    parser.parse_args(argv)
    with httpx.Client(timeout=TIMEOUT_S, follow_redirects=False) as client:
        registry = Registry(client)
        try:
            texts = {file: pin((ROOT / file).read_text(), registry.digest) for file in FILES}
        except (httpx.HTTPError, ValueError) as error:
            sys.stderr.write(f"no image was changed: {error}\n")
            return 1
    for file, text in texts.items():
        (ROOT / file).write_text(text)
        for image in images_of(text):
            sys.stdout.write(f"{file}: {image}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
