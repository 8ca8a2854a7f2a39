"""The cluster's certificate authority: keys, certificates and the TLS settings of head and members.

The head has a certificate for servers, members have one for clients, so that a member cannot pose as the head. Both
are signed by the cluster's own authority, whose key never leaves the head.
"""

from __future__ import annotations

import datetime
import os
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dike.exceptions import BadInputError
from framework.cluster.records import KeyFiles
from framework.embedded.access import PRIVATE_FILE

HEAD = "the head"
"""Name in the certificate of the head's gateway; no member can have a name with a space."""
VALID_FOR = datetime.timedelta(days=10 * 365)
CLOCK_SKEW = datetime.timedelta(days=1)
"""How far the clocks of two machines may differ."""


class Authority:
    """Signs certificates, on the head."""

    def __init__(self, files: KeyFiles) -> None:
        """Reads the authority's key and certificate."""
        key = serialization.load_pem_private_key(files.authority_key.read_bytes(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        self._certificate = x509.load_pem_x509_certificate(files.authority.read_bytes())

    @classmethod
    def create(cls, files: KeyFiles, cluster: str) -> Authority:
        """Makes a new authority and the head's certificate, and writes both."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"dike cluster {cluster}")])
        certificate = (
            _builder(name, name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write_key(files.authority_key, key)
        files.authority.write_bytes(_pem(certificate))
        authority = cls(files)
        files.certificate.write_bytes(authority.sign(make_request(files, HEAD), HEAD, is_head=True))
        return authority

    def sign(self, request: bytes, name: str, *, is_head: bool = False) -> bytes:
        """Returns a certificate for the key of a request, both in PEM; its subject is `name`, whatever is requested.

        Raises:
            BadInputError: it is not a certificate request with a valid signature.
        """
        try:
            read = x509.load_pem_x509_csr(request)
            is_valid = read.is_signature_valid
        except ValueError:
            is_valid = False
        if not is_valid:
            raise BadInputError("The certificate request of the machine that joins is damaged.")
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usages = [ExtendedKeyUsageOID.SERVER_AUTH] if is_head else []
        certificate = (
            _builder(subject, self._certificate.subject, read.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([*usages, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        return _pem(certificate)


def make_request(files: KeyFiles, name: str) -> bytes:
    """Makes this machine's private key and writes it; returns a certificate request for it in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    _write_key(files.key, key)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def server_context(files: KeyFiles) -> ssl.SSLContext:
    """TLS 1.3 for the head. Clients without a certificate are accepted: they may only join."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(files.certificate, files.key)
    context.load_verify_locations(files.authority)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


def client_context(files: KeyFiles) -> ssl.SSLContext:
    """TLS 1.3 for a machine of the cluster; accepts only the head."""
    context = joining_context(files.authority.read_text(encoding="ascii"))
    context.load_cert_chain(files.certificate, files.key)
    return context


def joining_context(authority: str) -> ssl.SSLContext:
    """TLS 1.3 without a certificate of one's own, for a known authority (PEM); accepts only the head."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Only the head has a certificate for servers of this authority, under whatever address it is reached.
    context.check_hostname = False
    context.load_verify_locations(cadata=authority)
    return context


def first_context() -> ssl.SSLContext:
    """TLS 1.3 that trusts any server, only for fetching the authority's certificate, which the token then confirms."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def peer_name(certificate: object) -> str:
    """Name in a verified peer's certificate, as `SSLSocket.getpeercert` returns it; empty without a certificate."""
    subject = certificate.get("subject", ()) if isinstance(certificate, dict) else ()
    return next((value for parts in subject for kind, value in parts if kind == "commonName"), "")


def _builder(subject: x509.Name, issuer: x509.Name, key: object) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).serial_number(x509.random_serial_number())
    )
    return builder.public_key(key).not_valid_before(now - CLOCK_SKEW).not_valid_after(now + VALID_FOR)  # type: ignore[arg-type]


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.unlink(missing_ok=True)  # of an earlier cluster
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE), "wb") as file:
        file.write(text)
