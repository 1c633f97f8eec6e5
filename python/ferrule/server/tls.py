"""TLS of the server: certificate, private key and authorities from files in PEM."""

from __future__ import annotations

import ssl
from pathlib import Path

from ferrule.errors import InvalidParameterError


def tls_context(certfile: str | None, keyfile: str | None, ca_certs: str | None) -> ssl.SSLContext | None:
    """Returns a context for servers with TLS 1.2 or later; None without a certificate.

    `keyfile` has the private key, which may be in `certfile` instead. With `ca_certs` clients must have a certificate
    of one of these authorities.

    Raises InvalidParameterError for a file that is missing, unreadable or wrong.
    """
    if certfile is None:
        for name, given in (("ssl_keyfile", keyfile), ("ssl_ca_certs", ca_certs)):
            if given is not None:
                raise InvalidParameterError(name, given, "left out without ssl_certfile")
        return None
    for name, given in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile), ("ssl_ca_certs", ca_certs)):
        if given is not None:
            _check_readable(name, given)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An encrypted key would make OpenSSL ask for its password on the terminal.
        context.load_cert_chain(certfile, keyfile, password="")
    except (ssl.SSLError, ValueError) as error:
        raise InvalidParameterError(
            "ssl_certfile", certfile, f"a certificate in PEM with the unencrypted private key that fits it ({error})"
        ) from None
    if ca_certs is not None:
        try:
            context.load_verify_locations(ca_certs)
        except ssl.SSLError as error:
            raise InvalidParameterError("ssl_ca_certs", ca_certs, f"certificates in PEM ({error})") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(name: str, given: str) -> None:
    if not Path(given).is_file():
        raise InvalidParameterError(name, given, "a file")
    try:
        Path(given).open("rb").close()
    except OSError as error:
        raise InvalidParameterError(name, given, f"a readable file ({error.strerror})") from None
