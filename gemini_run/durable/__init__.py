"""The durable tier: S3 or a directory, plain DCP files, commit marker written last."""
