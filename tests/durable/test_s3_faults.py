"""The S3 tier against a server that throttles, goes away, and forgets."""

from __future__ import annotations

import os
import threading

import pytest
from faulty_s3 import FaultyS3

from gemini_run.durable.s3 import S3Tier
from gemini_run.durable.tier import Source
from gemini_run.errors import DurableError

PART = 5 << 20


@pytest.fixture
def server(monkeypatch):
    server = FaultyS3()
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    yield server
    server.stop()


@pytest.fixture
def tier(server):
    tier = S3Tier("s3://bucket/p", "bucket", "p", part_bytes=PART)
    tier._client.create_bucket(Bucket="bucket")
    yield tier
    server.fault = lambda method, path: None
    tier.delete(tier.list())


def test_slow_down_at_first(server, tier):
    server.fault = lambda method, path: "slow" if method == "PUT" and len(server.fired) < 4 else None
    tier.put_bytes("it-1/a", b"content")
    assert server.fired == ["slow"] * 4
    assert tier.get_bytes("it-1/a") == b"content"


def test_parts_that_arrived_are_not_sent_again_after_an_outage(server, tier):
    data = os.urandom(3 * PART + 5)

    def fault(method, path):
        return "stop" if "partNumber=3" in path and not server.fired else None

    def come_back():
        assert server.stopped.wait(30)
        server.start()

    server.fault = fault
    waiter = threading.Thread(target=come_back)
    waiter.start()
    tier.put_file("it-1/big", Source([data]))
    waiter.join()
    assert server.fired == ["stop"]
    assert tier.get_bytes("it-1/big") == data
    created = [path for method, path in server.requests if method == "POST" and "?uploads" in path]
    assert len(created) == 1, "the same upload went on"


def test_a_forgotten_upload_is_begun_again(server, tier):
    data = os.urandom(2 * PART)
    first = []

    def fault(method, path):
        if "partNumber=" in path:
            upload_id = path.split("uploadId=")[1].split("&")[0]
            first.append(upload_id)
            return "gone" if upload_id == first[0] else None
        return None

    server.fault = fault
    tier.put_file("it-1/big", Source([data]))
    assert "gone" in server.fired
    assert tier.get_bytes("it-1/big") == data


def test_patience_ends(server, tier):
    tier.patience = 0.5
    server.fault = lambda method, path: "slow" if method == "PUT" else None
    with pytest.raises(DurableError, match="cannot write it-1/a"):
        tier.put_bytes("it-1/a", b"content")
    assert server.fired
    assert tier.list() == {}


def test_a_failed_multipart_leaves_no_upload(server, tier):
    tier.patience = 0.5
    server.fault = lambda method, path: "slow" if "partNumber=2" in path else None
    with pytest.raises(DurableError, match="cannot write it-1/big"):
        tier.put_file("it-1/big", Source([bytes(2 * PART)]))
    assert server.fired
    assert tier._client.list_multipart_uploads(Bucket="bucket").get("Uploads", []) == []
