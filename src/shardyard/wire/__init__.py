"""What servers and clients share: bodies, media types, headers and error codes. No I/O."""
