"""Certificates for tests: made when they are needed, valid for a day."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates for 127.0.0.1 and writes them to `folder`. `file` is its own certificate."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._signed(name, self._key, is_authority=True))

    def issue(self, name: str) -> Issued:
        """A certificate for somebody of that name, to show to servers and to clients."""
        key = ec.generate_private_key(ec.SECP256R1())
        issued = Issued(self._folder / f"{self._name}-{name}.pem", self._folder / f"{self._name}-{name}.key")
        issued.certificate.write_bytes(self._signed(name, key, is_authority=False))
        pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        issued.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
        return issued

    def _signed(self, name: str, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> bytes:
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
