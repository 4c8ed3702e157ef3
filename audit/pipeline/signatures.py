"""Sign and check statements with OpenSSH keys (``ssh-keygen -Y``), namespace ``rollout-audit``."""

from __future__ import annotations

import fnmatch
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from audit.config import AuditConfig
from audit.errors import ConfigError

NAMESPACE = "rollout-audit"


@dataclass(frozen=True)
class Signers:
    """A file of allowed signers (see ``ssh-keygen(1)``, ALLOWED SIGNERS)."""

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise ConfigError(
                f"[approvals] allowed_signers {self.path} does not exist; list a principal and its key a line"
            )

    def objection(self, statement: bytes, signature: str, *, by: str, author: str) -> str | None:
        """Return why a signature does not count, None when it does.

        Parameters
        ----------
        statement : bytes
        signature : str
            Armoured, as ``ssh-keygen -Y sign`` writes it.
        by : str
            Principal that is said to have signed.
        author : str
            Who made the run; their key may not sign, under whatever name it is listed.

        Raises
        ------
        ConfigError
            When ``ssh-keygen`` is not installed.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "signature"
            path.write_text(signature, encoding="utf-8")
            allowed = ["-f", str(self.path), "-n", NAMESPACE, "-s", str(path)]
            good = _ssh_keygen(["-Y", "verify", "-I", by, *allowed], statement)
            if good.returncode != 0:
                return f"its signature is not one of {by} in {self.path.name}"
            holders = _ssh_keygen(["-Y", "find-principals", *allowed], b"").stdout.decode().split()
        if any(fnmatch.fnmatchcase(author.casefold(), one.casefold()) for one in _principals(holders)):
            return f"its key is also that of {author}, who made the run"
        return None


def signers_of(config: AuditConfig | None) -> Signers | None:
    """Return whose signatures count, None where the configuration demands none.

    Raises
    ------
    ConfigError
        When the file of allowed signers is missing.
    """
    if config is None or config.approvals.allowed_signers is None:
        return None
    return Signers(Path(config.approvals.allowed_signers))


def _principals(lines: Sequence[str]) -> list[str]:
    return [one for line in lines for one in line.split(",")]


def sign(statement: bytes, key: Path) -> str:
    """Return the signature of a statement.

    Raises
    ------
    ConfigError
        When the key is missing or does not sign, or ``ssh-keygen`` is not installed.
    """
    if not key.is_file():
        raise ConfigError(f"--key {key} does not exist; `ssh-keygen -t ed25519` makes one")
    done = _ssh_keygen(["-Y", "sign", "-f", str(key), "-n", NAMESPACE], statement)
    if done.returncode != 0:
        why = " ".join(done.stderr.decode(errors="replace").split()) or "no reason given"
        raise ConfigError(
            f"--key {key} does not sign ({why}); give a private key, or one that the agent holds"
        )
    return done.stdout.decode()


def _ssh_keygen(arguments: Sequence[str], statement: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["ssh-keygen", *arguments], input=statement, capture_output=True, check=False, timeout=120
        )
    except FileNotFoundError:
        raise ConfigError(
            "ssh-keygen is not installed, so that no signature can be made or checked; install OpenSSH"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError("ssh-keygen did not answer; use a key without a passphrase, or an agent") from None
