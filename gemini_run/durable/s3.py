"""The durable tier in an S3 bucket. The only module that knows boto3."""

from __future__ import annotations

import functools
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
)

from gemini_run.durable.tier import PROBE_NAME, DurableTier, ObjectMissing, Source, run_parallel
from gemini_run.errors import ConfigError, DurableError

PART_BYTES = 16 << 20
MAX_PARTS = 9_000  #: S3 allows 10,000 a file
TRANSFER_THREADS = 4
_PASSING_CODES = {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling",
                  "ThrottlingException", "RequestLimitExceeded", "XMinioServerNotInitialized"}  # fmt: skip
_MISSING_CODES = {"NoSuchKey", "404", "NotFound"}
_Result = TypeVar("_Result")


class S3Tier(DurableTier):
    """Objects under ``s3://bucket/prefix/``.

    Endpoint, region and credentials are those of the environment, as for every AWS tool
    (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_PROFILE, AWS_ACCESS_KEY_ID, instance roles, ...).
    """

    def __init__(self, location: str, bucket: str, prefix: str, part_bytes: int = PART_BYTES) -> None:
        """Raises: ConfigError if boto3 cannot make a client from the environment."""
        super().__init__()
        self.location = location
        self.part_bytes = part_bytes
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        options: dict[str, Any] = {
            "connect_timeout": 5,
            "read_timeout": 60,
            "max_pool_connections": 2 * TRANSFER_THREADS,
            "retries": {"mode": "adaptive", "total_max_attempts": 3},
        }
        if endpoint:
            # Other servers know neither virtual hosts nor the checksum trailers that AWS has added.
            options["s3"] = {"addressing_style": "path"}
            if "request_checksum_calculation" in Config.OPTION_DEFAULTS:
                options["request_checksum_calculation"] = "when_required"
                options["response_checksum_validation"] = "when_required"
        try:
            session = boto3.session.Session()
            region = session.region_name or "us-east-1"
            self._client = session.client(
                "s3", region_name=region, endpoint_url=endpoint or None, config=Config(**options)
            )
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(f"--durable {location}: no S3 client from this environment: {error}") from error
        self._endpoint = self._client.meta.endpoint_url

    @classmethod
    def at(cls, location: str) -> S3Tier:
        """Raises: ConfigError where `location` names no bucket."""
        bucket, _, prefix = location.removeprefix("s3://").partition("/")
        if not bucket:
            raise ConfigError(f"--durable {location}: no bucket; give s3://bucket/prefix")
        return cls(location, bucket, prefix.strip("/"))

    # --- the contract -----------------------------------------------------------------------------

    def preflight(self) -> None:
        key = self._key(f"{PROBE_NAME}-{secrets.token_hex(4)}")
        data = b"gemini-run"
        try:
            self._client.put_object(Bucket=self._bucket, Key=key, Body=data)
            back = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
            self._client.delete_object(Bucket=self._bucket, Key=key)
        except (BotoCoreError, ClientError) as error:
            raise self._error("the bucket cannot be used", error) from error
        if back != data:
            raise DurableError(f"durable tier {self.location}: a probe read back differs from what was written")

    def put_file(self, name: str, source: Source, stop: threading.Event | None = None) -> None:
        if source.size <= self.part_bytes:
            body = source.read(0, source.size)
            self._retry(f"cannot write {name}", stop, lambda: self._client.put_object(
                Bucket=self._bucket, Key=self._key(name), Body=body))  # fmt: skip
        else:
            _Multipart(self, name, source, stop).run()

    def get_bytes(self, name: str) -> bytes:
        def get() -> bytes:
            data: bytes = self._client.get_object(Bucket=self._bucket, Key=self._key(name))["Body"].read()
            return data

        return self._retry(f"cannot read {name}", None, get)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        def get(start: int, part: memoryview) -> None:
            span = f"bytes={start}-{start + len(part) - 1}"
            body = self._client.get_object(Bucket=self._bucket, Key=self._key(name), Range=span)["Body"]
            done = 0
            while chunk := body.read(1 << 20):
                if done + len(chunk) > len(part):
                    raise DurableError(f"{self.location}: {name}: the server sent more than {span}")
                part[done : done + len(chunk)] = chunk
                done += len(chunk)
            if done < len(part):
                raise DurableError(f"{self.location}: {name} is truncated (no byte at {start + done})")

        def job(start: int) -> Callable[[], None]:
            part = buffer[start : start + self.part_bytes]
            return lambda: self._retry(f"cannot read {name}", None, lambda: get(offset + start, part))

        run_parallel([job(start) for start in range(0, len(buffer), self.part_bytes)], TRANSFER_THREADS)

    def list(self, prefix: str = "") -> dict[str, int]:
        def pages() -> dict[str, int]:
            found = {}
            pager = self._client.get_paginator("list_objects_v2")
            for page in pager.paginate(Bucket=self._bucket, Prefix=self._key(prefix)):
                for entry in page.get("Contents", []):
                    name = entry["Key"][len(self._prefix) :]
                    if name and not name.endswith("/"):  # folder markers of some servers
                        found[name] = int(entry["Size"])
            return dict(sorted(found.items()))

        return self._retry("cannot list", None, pages)

    def delete(self, names: Iterable[str]) -> None:
        # One request each: an order is promised, and not every server knows the batch request.
        for name in names:
            remove = functools.partial(self._client.delete_object, Bucket=self._bucket, Key=self._key(name))
            self._retry(f"cannot delete {name}", None, remove)

    def clean(self, prefix: str) -> None:
        key = self._key(prefix)

        def uploads() -> list[tuple[str, str]]:
            answer = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=key)
            return [(u["Key"], u["UploadId"]) for u in answer.get("Uploads", [])]

        for upload_key, upload_id in self._retry("cannot list uploads", None, uploads):
            if upload_key.startswith(key):
                self._abort(upload_key, upload_id)

    # --- within -----------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _abort(self, key: str, upload_id: str) -> None:
        try:
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)
        except (BotoCoreError, ClientError):
            pass  # only space: the next cleaning, or the bucket's lifecycle rule, gets it

    def _retry(self, what: str, stop: threading.Event | None, call: Callable[[], _Result]) -> _Result:
        """Call until it succeeds, fails for good, or `patience` is used up. Pauses double, with jitter."""
        deadline = time.monotonic() + self.patience
        pause = 0.2
        while True:
            self._check(stop)
            try:
                return call()
            except (BotoCoreError, ClientError) as error:
                if not _passing(error) or time.monotonic() + pause > deadline:
                    raise self._error(what, error) from error
            (stop or self._cancelled).wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, 10.0)

    def _error(self, what: str, error: Exception) -> DurableError:
        code = _code(error)
        if code in _MISSING_CODES:
            return ObjectMissing(f"{self.location}: {what}: there is no such object")
        if code == "NoSuchBucket":
            cause = f"no such bucket {self._bucket!r} at {self._endpoint}: create it, or name another with --durable"
        elif isinstance(error, (NoCredentialsError, PartialCredentialsError)):
            cause = "no AWS credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role"
        elif code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"):
            cause = f"{self._endpoint} does not accept the AWS credentials ({code}): correct or renew them"
        elif code in ("AccessDenied", "403", "Forbidden"):
            cause = (
                f"access denied by {self._endpoint}: allow s3:PutObject, GetObject, DeleteObject and "
                f"ListBucket on bucket {self._bucket!r}"
            )
        elif code == "InvalidBucketName":
            cause = f"{self._bucket!r} is not a valid bucket name: correct --durable"
        elif isinstance(error, (ConnectionError, HTTPClientError)):
            cause = f"no answer from {self._endpoint}: check the network, AWS_ENDPOINT_URL and the region"
        else:
            cause = " ".join(str(error).split())
        return DurableError(f"durable tier {self.location}: {what}: {cause}")


class _Multipart:
    """One big file on its way: parts are sent side by side, each as often as it takes.

    Parts that have arrived are kept while the server is away; only if it has forgotten the upload
    (it lost its state, or a lifecycle rule ended it) everything is sent again, once.
    """

    def __init__(self, tier: S3Tier, name: str, source: Source, stop: threading.Event | None) -> None:
        self._tier, self._name, self._source, self._stop = tier, name, source, stop
        self._where = {"Bucket": tier._bucket, "Key": tier._key(name)}
        self._part_bytes = max(tier.part_bytes, -(-source.size // MAX_PARTS))

    def run(self) -> None:
        """Raises: DurableError; nothing of the upload is left behind where the server can be reached."""
        try:
            self._attempt()
        except _UploadForgotten:
            try:
                self._attempt()
            except _UploadForgotten as error:
                raise DurableError(f"durable tier {self._tier.location}: {error}") from error

    def _attempt(self) -> None:
        client = self._tier._client
        upload_id = self._retry(lambda: str(client.create_multipart_upload(**self._where)["UploadId"]))
        etags: dict[int, str] = {}
        try:
            count = -(-self._source.size // self._part_bytes)
            run_parallel([self._part(n, upload_id, etags) for n in range(1, count + 1)], TRANSFER_THREADS)
            parts = [{"PartNumber": n, "ETag": etag} for n, etag in sorted(etags.items())]
            self._retry(lambda: self._complete(upload_id, parts))
        except BaseException:
            self._tier._abort(self._where["Key"], upload_id)
            raise

    def _part(self, number: int, upload_id: str, etags: dict[int, str]) -> Callable[[], None]:
        def send() -> None:
            body = self._source.read((number - 1) * self._part_bytes, self._part_bytes)
            answer = self._retry(lambda: self._tier._client.upload_part(
                **self._where, UploadId=upload_id, PartNumber=number, Body=body))  # fmt: skip
            etags[number] = answer["ETag"]

        return send

    def _complete(self, upload_id: str, parts: list[dict[str, Any]]) -> None:
        try:
            self._tier._client.complete_multipart_upload(
                **self._where, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )
        except ClientError as error:
            # The answer to an earlier try may have been lost: then the object is there and the upload gone.
            if _code(error) != "NoSuchUpload" or self._stored_size() != self._source.size:
                raise

    def _stored_size(self) -> int:
        try:
            return int(self._tier._client.head_object(**self._where)["ContentLength"])
        except ClientError:
            return -1

    def _retry(self, call: Callable[[], _Result]) -> _Result:
        try:
            return self._tier._retry(f"cannot write {self._name}", self._stop, call)
        except DurableError as error:
            if isinstance(error.__cause__, ClientError) and _code(error.__cause__) == "NoSuchUpload":
                raise _UploadForgotten(str(error)) from error
            raise


class _UploadForgotten(Exception):
    """The server does not know the multipart upload any more."""


def _code(error: Exception) -> str:
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def _passing(error: Exception) -> bool:
    """Whether the same request may well succeed a little later."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status in (429, 500, 502, 503, 504) or _code(error) in _PASSING_CODES
    return isinstance(error, (ConnectionError, HTTPClientError, ResponseStreamingError))
