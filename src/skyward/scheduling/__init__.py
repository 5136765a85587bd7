"""The client's side of a running pool: dispatch, lanes, blobs, futures."""
