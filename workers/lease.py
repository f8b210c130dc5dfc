"""Keeping a claim alive while its job runs, and noticing when it is over or should be."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from store.database import transact
from store.errors import StaleAttempt
from store.repositories import attempts
from store.repositories.attempts import Claim
from workers.runtime import Runtime

log = logging.getLogger(__name__)


class Lease:
    """A context that renews the lease of ``claim`` in a thread of its own.

    Attributes:
        stop_requested: set when the job's owner wants it stopped.
        lost: set when the attempt is over, or when the lease could not be renewed in time, so that another
            worker may have the job by now; the holder must stop its engine and write no more.
    """

    def __init__(self, runtime: Runtime, claim: Claim):
        self._runtime, self._claim = runtime, claim
        self.stop_requested = threading.Event()
        self.lost = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{claim.job_id}", daemon=True)

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()

    def _keep(self) -> None:
        settings = self._runtime.settings
        expiry = time.monotonic() + settings.lease_seconds
        while not self._closed.wait(settings.heartbeat_seconds):
            began = time.monotonic()
            try:
                if transact(self._runtime.sessions, self._renew, patience=settings.heartbeat_seconds):
                    self.stop_requested.set()
                expiry = began + settings.lease_seconds
            except StaleAttempt as error:
                log.warning("%s", error)
                self.lost.set()
                return
            except DBAPIError as error:
                log.warning("lease of %s not renewed: %s", self._claim.job_id, error.orig)
                if time.monotonic() > expiry:
                    self.lost.set()
                    return

    def _renew(self, session: Session) -> bool:
        return attempts.heartbeat(session, self._claim, self._runtime.settings.lease_seconds)
