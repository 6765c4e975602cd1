"""The contract of DurableTier, held to both implementations (S3: a real gateway)."""

from __future__ import annotations

import os
import threading

import pytest

from gemini_run.durable.filesystem import FilesystemTier
from gemini_run.durable.s3 import S3Tier
from gemini_run.durable.tier import ObjectMissing, Source, open_tier, run_parallel
from gemini_run.errors import ConfigError, DurableError


def test_preflight_leaves_nothing(tier):
    tier.preflight()
    assert tier.list() == {}


def test_bytes_round_trip_and_replace(tier):
    tier.put_bytes("it-1/.metadata", b"first")
    tier.put_bytes("it-1/.metadata", b"second one")
    tier.put_bytes("it-1/empty", b"")
    assert tier.get_bytes("it-1/.metadata") == b"second one"
    assert tier.get_bytes("it-1/empty") == b""
    assert tier.list() == {"it-1/.metadata": 10, "it-1/empty": 0}


def test_list_takes_a_prefix_of_names(tier):
    for name in ("it-1/a", "it-10/b", "other/it-1", "it-2/c"):
        tier.put_bytes(name, b"x")
    assert list(tier.list("it-1")) == ["it-1/a", "it-10/b"]
    assert list(tier.list("it-1/")) == ["it-1/a"]
    assert tier.list("nothing/") == {}


def test_big_file_of_many_pieces_and_ranges(tier):
    data = os.urandom((11 << 20) + 77)  # three parts of the S3 tier under test
    source = Source([data[:10], memoryview(data)[10 : 6 << 20], b"", data[6 << 20 :]])
    assert source.size == len(data)
    tier.put_file("it-1/big", source)
    assert tier.get_bytes("it-1/big") == data
    assert tier.get_range("it-1/big", 5, 6 << 20) == data[5 : 5 + (6 << 20)]
    buffer = bytearray(100)
    tier.read_into("it-1/big", len(data) - 100, memoryview(buffer))
    assert bytes(buffer) == data[-100:]


def test_reading_past_the_end_is_an_error(tier):
    tier.put_bytes("a", b"12345")
    with pytest.raises(DurableError):
        tier.get_range("a", 3, 10)


def test_missing_objects(tier):
    with pytest.raises(ObjectMissing):
        tier.get_bytes("it-1/none")
    with pytest.raises(ObjectMissing):
        tier.get_range("it-1/none", 0, 1)
    tier.delete(["it-1/none"])


def test_delete_and_clean(tier):
    tier.put_bytes("it-1/a", b"x")
    tier.put_bytes("it-1/b", b"x")
    tier.delete(["it-1/a"])
    tier.clean("it-")
    assert tier.list() == {"it-1/b": 1}


def test_a_stopped_transfer_stores_nothing(tier):
    stop = threading.Event()
    stop.set()
    with pytest.raises(DurableError, match="stopped"):
        tier.put_file("it-1/big", Source([bytes(6 << 20)]), stop)
    assert tier.list() == {}
    tier.cancel()
    with pytest.raises(DurableError, match="stopped"):
        tier.put_bytes("it-1/big", b"1")


def test_a_directory_keeps_old_content_when_a_write_fails(tmp_path):
    tier = FilesystemTier(str(tmp_path))
    tier.put_bytes("it-1/a", b"old")

    class Broken(Source):
        def views(self, offset=0, length=None):
            raise OSError(28, "No space left on device")

    with pytest.raises(DurableError, match="No space left"):
        tier.put_file("it-1/a", Broken([b"new"]))
    assert tier.get_bytes("it-1/a") == b"old"
    assert [p.name for p in (tmp_path / "it-1").iterdir()] == ["a"]


def test_directory_clean_removes_parts_of_dead_writers_only_where_told(tmp_path):
    tier = FilesystemTier(str(tmp_path))
    for folder in ("it-1", "mine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.00.gemini-part").write_bytes(b"half")
    assert tier.list() == {}
    tier.clean("it-")
    assert not (tmp_path / "it-1").exists()
    assert (tmp_path / "mine" / "x.00.gemini-part").exists()


def test_preflight_of_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(DurableError) as caught:
        open_tier(str(tmp_path / "f" / "durable")).preflight()
    assert "cannot be used (Not a directory)" in str(caught.value)
    assert "--durable" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_preflight_of_a_missing_bucket(s3_environment):
    with pytest.raises(DurableError, match=r"no such bucket 'nowhere' at http://127\.0\.0\.1"):
        open_tier("s3://nowhere/x").preflight()


def test_preflight_without_credentials(s3_environment, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(DurableError, match="no AWS credentials: set AWS_ACCESS_KEY_ID"):
        open_tier("s3://durable/x").preflight()


def test_preflight_with_wrong_credentials(s3_environment, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(DurableError, match="does not accept the AWS credentials"):
        open_tier("s3://durable/x").preflight()


def test_stale_multipart_uploads_are_aborted(s3_environment):
    tier = open_tier("s3://durable/stale")
    assert isinstance(tier, S3Tier)
    tier._client.create_multipart_upload(Bucket="durable", Key="stale/it-1/half")
    tier.clean("it-")
    left = tier._client.list_multipart_uploads(Bucket="durable", Prefix="stale/it-1/")
    assert left.get("Uploads", []) == []


@pytest.mark.parametrize("location", ["s3://", "gs://bucket/x", "", "file://"])
def test_locations_that_cannot_be(location):
    with pytest.raises(ConfigError):
        open_tier(location)


def test_source_reads_any_range():
    pieces = [b"ab", b"", b"cdef", b"g"]
    whole = b"".join(pieces)
    source = Source(pieces)
    for start in range(len(whole) + 1):
        for length in range(len(whole) + 2):
            assert source.read(start, length) == whole[start : start + length]


def test_run_parallel_raises_the_first_error():
    done = []

    def fail():
        raise ValueError("third")

    with pytest.raises(ValueError, match="third"):
        run_parallel([lambda: done.append(1), fail], 2)
