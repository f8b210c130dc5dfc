"""Errors of the store: small, picklable, and free of HTTP and of SQL."""

from __future__ import annotations


class StoreError(Exception):
    """Base of all errors that the store raises on purpose."""


class NotFound(StoreError):
    """No such row, or a row of another workspace, which is the same thing to the caller."""

    def __init__(self, kind: str, id: str):
        self.kind, self.id = kind, id
        super().__init__(kind, id)

    def __str__(self) -> str:
        return f"no {self.kind} {self.id!r}"


class Conflict(StoreError):
    """The request contradicts what is stored."""


class InvalidTransition(Conflict):
    """The job's state does not allow the change; the text says which state it is in."""


class InvalidCursor(StoreError):
    """A page cursor that no page ever handed out."""


class StaleAttempt(StoreError):
    """The writer's attempt of a job is over: another attempt runs, or the job has ended."""

    def __init__(self, job_id: str, attempt: int):
        self.job_id, self.attempt = job_id, attempt
        super().__init__(job_id, attempt)

    def __str__(self) -> str:
        return f"attempt {self.attempt} of {self.job_id} is over"


class ArtifactMissing(StoreError):
    """A listed artifact has no bytes in the artifact store."""

    def __init__(self, key: str):
        self.key = key
        super().__init__(key)

    def __str__(self) -> str:
        return f"no artifact under {self.key!r}"


class ArtifactDamaged(ArtifactMissing):
    """The bytes under an artifact's key are not those that were stored, which are lost."""

    def __str__(self) -> str:
        return f"what is stored under {self.key!r} does not match its checksum"


class DatabaseTooNew(StoreError):
    """The database was upgraded by a newer version of this project than the one that runs."""

    def __init__(self, revision: str, newest: str):
        self.revision, self.newest = revision, newest
        super().__init__(revision, newest)

    def __str__(self) -> str:
        return (
            f"the database was upgraded by a newer version of ReCAST (it has revision {self.revision}, and "
            f"this version knows those up to {self.newest}): run that version or a later one"
        )


class StorageError(StoreError):
    """Bytes could not be written or read (disk full, no permission, no network)."""
