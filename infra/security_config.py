"""Settings of a secured cluster, and what is made of them: files are read when a client is made, not before.

A combination that cannot work, or of which a part would silently have no effect, is refused when the configuration is
read, with the name of the setting that is missing or too much. Errors name files and settings, never their content.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
    field_validator,
    model_validator,
)

from infra.errors import ConfigError
from infra.security import Mechanism, Protocol, Security

REVEAL = {"secrets": True}
"""Context of a dump that holds secrets: for a file that only its owner may read."""

MAX_PASSWORD_BYTES = 4096
"""Largest password file: a wrong path must not load a disk image."""


def _shown(value: SecretStr, info: SerializationInfo) -> str:
    return value.get_secret_value() if info.context == REVEAL else str(value)


Secret = Annotated[SecretStr, PlainSerializer(_shown, return_type=str, when_used="json")]
"""A text that shows as asterisks wherever it is printed or dumped, unless the dump is told to REVEAL."""


class SecurityConfig(BaseModel):
    """How to connect to a secured Kafka cluster (docs/security.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    protocol: Protocol = Field(
        Protocol.PLAINTEXT, description="`plaintext`, `ssl`, `sasl_plaintext` or `sasl_ssl`, as the listener has it."
    )
    ca_file: Path | None = Field(
        None, description="PEM file with the authorities that sign the brokers' certificates; by default the system's."
    )
    cert_file: Path | None = Field(None, description="PEM file with the client's own certificate, for mutual TLS.")
    key_file: Path | None = Field(None, description="PEM file with the key of the client's certificate.")
    key_password: Secret | None = Field(None, description="Password of the key file, if it has one.")
    mechanism: Mechanism | None = Field(None, description="`PLAIN`, `SCRAM-SHA-256` or `SCRAM-SHA-512`.")
    user: str | None = Field(None, description="Who logs in.")
    password: Secret | None = Field(None, description="Password of the user; better given by environment or file.")
    password_file: Path | None = Field(None, description="File that holds the password and nothing else.")

    @field_validator("protocol", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        # Kafka's own files write SASL_SSL.
        return value.lower() if isinstance(value, str) else value

    @field_validator("mechanism", mode="before")
    @classmethod
    def _upper_case(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        self._refuse_what_has_no_effect()
        if self.protocol.with_user:
            self._require_user()
        if (self.cert_file is None) != (self.key_file is None):
            missing, other = ("key_file", "cert_file") if self.key_file is None else ("cert_file", "key_file")
            raise ValueError(f"{missing} is missing: {other} is set (one file may hold both: then name it twice)")
        if self.key_password is not None and self.key_file is None:
            raise ValueError("key_file is missing: key_password is set")
        return self

    def _refuse_what_has_no_effect(self) -> None:
        groups = (
            (self.protocol.encrypted, ("ca_file", "cert_file", "key_file", "key_password"), "ssl or sasl_ssl"),
            (self.protocol.with_user, ("mechanism", "user", "password", "password_file"), "sasl_ssl"),
        )
        for used, names, protocols in groups:
            idle = [name for name in names if getattr(self, name) is not None]
            if idle and not used:
                raise ValueError(
                    f"{', '.join(idle)} would have no effect: protocol is {self.protocol}, and {protocols} is needed"
                )

    def _require_user(self) -> None:
        missing = [name for name in ("mechanism", "user") if not getattr(self, name)]
        if self.password is None and self.password_file is None:
            missing.append("password or password_file")
        if missing:
            raise ValueError(f"protocol is {self.protocol}, so these are needed too: {', '.join(missing)}")
        if self.password is not None and self.password_file is not None:
            raise ValueError("password and password_file are both set: leave one out")
        if self.password is not None and not self.password.get_secret_value():
            raise ValueError("password is empty")

    def open(self) -> Security:
        """Read the files and return what connections are made with. Raises ConfigError naming the setting."""
        return Security(
            protocol=self.protocol,
            tls=self._tls() if self.protocol.encrypted else None,
            mechanism=self.mechanism,
            user=self.user or "",
            password=self._password() if self.protocol.with_user else "",
        )

    def _password(self) -> str:
        if self.password is not None:
            return self.password.get_secret_value()
        path = self.password_file
        assert path is not None, "checked when the settings were read"
        try:
            with path.open("rb") as file:
                data = file.read(MAX_PASSWORD_BYTES + 1)
            # An editor ends the line; a password with a line end at its end is nobody's.
            text = data.decode().rstrip("\r\n")
        except OSError as error:
            raise ConfigError(f"bus.security.password_file: cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise ConfigError(f"bus.security.password_file: {path} is not UTF-8 text") from None
        if not text or len(data) > MAX_PASSWORD_BYTES or "\n" in text:
            raise ConfigError(
                f"bus.security.password_file: {path} must hold one line with the password, at most "
                f"{MAX_PASSWORD_BYTES} bytes; it has {len(data)} or more bytes in {len(data.splitlines())} lines"
            )
        return text

    def _tls(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            _unreadable("ca_file", self.ca_file, "holds no certificate in PEM form", error)
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self.key_file, password=self._key_password)
            except (OSError, ssl.SSLError) as error:
                files = f"{self.cert_file} and {self.key_file}"
                _unreadable("cert_file, key_file", files, "are no certificate with its key in PEM form", error)
        return context

    def _key_password(self) -> str:
        # Without this callback the library would ask at the terminal, where nobody sits.
        if self.key_password is None:
            raise ConfigError(f"bus.security.key_password is missing: {self.key_file} is encrypted")
        return self.key_password.get_secret_value()


def _unreadable(setting: str, files: object, otherwise: str, error: OSError) -> NoReturn:
    """Raise for files that TLS cannot use; an SSLError is an OSError too."""
    if isinstance(error, ssl.SSLError):
        wrong = f"{files} {otherwise} ({error.reason or 'unreadable'}); if the key has a password, is it the right one?"
        raise ConfigError(f"bus.security.{setting}: {wrong}") from error
    raise ConfigError(f"bus.security.{setting}: cannot read {files}: {error.strerror}") from error
