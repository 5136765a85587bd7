"""What both ends of a connection share: pickling, sessions, frames."""
