"""Provider of EC2 machines, and volumes in S3."""
