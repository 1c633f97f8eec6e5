"""The checksum of packed files."""

TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # noqa: PLW2901
    TABLE.append(byte)


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C (Castagnoli, RFC 3720)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
