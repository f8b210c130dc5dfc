"""A Python client of the REST API.

    from recast.client import Client

    with Client() as client:
        job = client.create_profile(
            {"model": "miniature", "rewards": ["ocr"], "prompt_set": "pset_miniature_train"}
        )
        for event in client.events(job["id"]):
            print(event.type, event.data)

Bodies and answers are the plain JSON objects that the API's reference describes.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from recast import sse
from recast.errors import JobFailed, NotConfigured, ProblemError, Unreachable
from recast.home import Home

JSON = dict[str, Any]
TERMINAL = frozenset({"succeeded", "failed", "cancelled"})
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
SILENCE = httpx.Timeout(45.0, connect=5.0)
"""An events stream sends a comment every 15 s: three missing ones mean a dead connection."""
RETRIES = 5
RETRYABLE = frozenset({502, 503, 504})
COLLECTIONS = {"profile": "profiles", "training": "trainings", "evaluation": "evaluations"}


def find_service(
    url: str | None = None, api_key: str | None = None, home: Path | str | None = None
) -> tuple[str, str]:
    """Address and key: arguments, then RECAST_URL and RECAST_API_KEY, then what `recast up` left in the home.

    A given address never gets the home's key, which belongs to another service.

    Raises:
        NotConfigured: one of the two is nowhere to be found, or the address is none.
    """
    local = Home.find(None if home is None else Path(home))
    given = url or (None if home else os.environ.get("RECAST_URL"))
    key = api_key or (None if home else os.environ.get("RECAST_API_KEY"))
    if given is None:
        record = local.read_record()
        if record is None:
            raise NotConfigured(
                f"no service is known: run `recast up`, or set RECAST_URL (home: {local.root})"
            )
        given, key = record.url, key or local.read_key()
    if not given.startswith(("http://", "https://")):
        raise NotConfigured(f"{given!r} is no address: a service's starts with http:// or https://")
    if not key:
        raise NotConfigured("no API key is known: set RECAST_API_KEY")
    return given.rstrip("/"), key


class Client:
    """Talks to one service with one key; a context manager, safe to use from one thread at a time.

    Every method raises Unreachable when the service does not answer and ProblemError when it refuses.
    GETs are tried again after connection errors; so are POSTs that create, under one ``Idempotency-Key``.
    """

    def __init__(
        self, url: str | None = None, api_key: str | None = None, *, home: Path | str | None = None
    ) -> None:
        self.url, key = find_service(url, api_key, home)
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=TIMEOUT,
            trust_env=not self.url.startswith(("http://127.0.0.1:", "http://localhost:")),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # -- catalogue and prompt sets ------------------------------------------------------------------------

    def models(self) -> list[JSON]:
        """Base models."""
        return self._list("/v1/models")

    def rewards(self, model: str | None = None) -> list[JSON]:
        """Rewards; with ``model``, their availability for it."""
        return self._list("/v1/rewards", model=model)

    def proposal_sources(self) -> list[JSON]:
        """Sources of images for the external-proposal estimator, as the live workers can use them."""
        return self._list("/v1/proposal-sources")

    def prompt_sets(self, *, limit: int = 100) -> list[JSON]:
        """Prompt sets, built-in and uploaded."""
        return self._list("/v1/prompt-sets", limit=limit)

    def create_prompt_set(self, name: str, content: str) -> JSON:
        """Upload prompts, one a line, plain or JSONL."""
        return self._create("/v1/prompt-sets", {"name": name, "content": content})

    # -- jobs ---------------------------------------------------------------------------------------------

    def create_profile(self, body: Mapping[str, Any]) -> JSON:
        """Start measuring a Rényi profile, or find the same one (``reused``); job and curves so far."""
        return self._create("/v1/profiles", body)

    def create_training(self, body: Mapping[str, Any]) -> JSON:
        """Start a training; the job."""
        return self._create("/v1/trainings", body)

    def create_evaluation(self, body: Mapping[str, Any]) -> JSON:
        """Start an evaluation; the job."""
        return self._create("/v1/evaluations", body)

    def estimate(self, kind: str, body: Mapping[str, Any]) -> JSON:
        """What the profile, training or evaluation (``kind``) of this body would cost; starts nothing."""
        return self._post(f"/v1/{COLLECTIONS[kind]}/estimate", body)

    def jobs(self, *, kind: str | None = None, status: str | None = None, limit: int = 20) -> list[JSON]:
        """Jobs, newest first."""
        return self._list("/v1/jobs", kind=kind, status=status, limit=limit)

    def job(self, job_id: str) -> JSON:
        """A job of any kind."""
        return self._get(f"/v1/jobs/{job_id}")

    def result(self, job: Mapping[str, Any]) -> JSON:
        """The full resource behind a job (curves of a profile, stages of a training, ...)."""
        return self._get(f"/v1/{COLLECTIONS[job['kind']]}/{job['id']}")

    def cancel(self, job_id: str) -> JSON:
        """Ask a job to stop."""
        return self._post(f"/v1/jobs/{job_id}/cancel")

    def resume(self, job_id: str) -> JSON:
        """Let a failed or cancelled training go on from its last checkpoint."""
        return self._post(f"/v1/jobs/{job_id}/resume")

    def events(self, job_id: str, *, after: int = 0) -> Iterator[sse.Event]:
        """Events after number ``after`` until the job is over, without loss or repeats.

        A dropped connection is taken up again where it broke.
        """
        failures = 0
        while True:
            before = after
            try:
                for event in self._stream(job_id, after):
                    if event.seq > after:
                        after = event.seq
                        yield event
                failures = 0
                if after == before and self.job(job_id)["status"] in TERMINAL:
                    return
            except (httpx.TransportError, ProblemError) as error:
                failures = 0 if after > before else failures + 1
                if isinstance(error, ProblemError) and error.status not in RETRYABLE:
                    raise
                if failures > RETRIES:
                    raise self._unreachable(error) from None
            if after == before:
                time.sleep(min(0.2 * 2**failures, 5.0))

    def wait(self, job_id: str) -> JSON:
        """Wait for a job to succeed. Raises JobFailed when it does not."""
        for _ in self.events(job_id):
            pass
        return self.succeeded(job_id)

    def succeeded(self, job_id: str) -> JSON:
        """A job that is over and succeeded. Raises JobFailed when it did not."""
        job = self.job(job_id)
        if job["status"] != "succeeded":
            raise JobFailed(job)
        return job

    # -- results ------------------------------------------------------------------------------------------

    def gains(self, profile_id: str, steps: int, shift: float | None = None) -> JSON:
        """A profile's gains resampled on ``steps`` steps."""
        return self._get(f"/v1/profiles/{profile_id}/gains", steps=steps, shift=shift)

    def compare_profiles(self, body: Mapping[str, Any]) -> JSON:
        """Compare two measured profiles: timing, totals, and the allocations they lead to."""
        return self._post("/v1/profiles/compare", body)

    def create_allocation(self, body: Mapping[str, Any]) -> JSON:
        """Compute and store an allocation matrix."""
        return self._create("/v1/allocations", body)

    def preview_allocation(self, body: Mapping[str, Any]) -> JSON:
        """Compute an allocation matrix and store nothing."""
        return self._post("/v1/allocations/preview", body)

    def allocation(self, allocation_id: str) -> JSON:
        """A stored allocation."""
        return self._get(f"/v1/allocations/{allocation_id}")

    def metrics(self, training_id: str, names: Sequence[str] = (), after: int | None = None) -> JSON:
        """Time series of a training."""
        return self._get(f"/v1/trainings/{training_id}/metrics", names=",".join(names) or None, after=after)

    def samples(self, training_id: str) -> list[JSON]:
        """Sample grids of a training."""
        return self._list(f"/v1/trainings/{training_id}/samples")

    def adapters(self, training_id: str) -> list[JSON]:
        """Adapters of a training, newest first."""
        return self._list(f"/v1/trainings/{training_id}/adapters")

    def adapter(self, adapter_id: str) -> JSON:
        """Metadata of an adapter."""
        return self._get(f"/v1/adapters/{adapter_id}")

    def download(self, path: str, target: Path | str, **query: Any) -> Path:
        """Save what ``GET path`` answers as ``target``, which appears only once it is complete."""
        target = Path(target)
        partial = target.with_name(f".{target.name}.partial")
        with self._request("GET", path, query) as response, partial.open("wb") as file:
            for chunk in response.iter_bytes():
                file.write(chunk)
        partial.replace(target)
        return target

    # -- keys ---------------------------------------------------------------------------------------------

    def keys(self) -> list[JSON]:
        """Keys of the workspace."""
        return self._list("/v1/keys", limit=100)

    def create_key(self, name: str, role: str) -> JSON:
        """A new key; its secret is in this answer and nowhere else."""
        return self._create("/v1/keys", {"name": name, "role": role})

    def revoke_key(self, key_id: str) -> None:
        """End a key's validity."""
        with self._request("DELETE", f"/v1/keys/{key_id}"):
            pass

    # -- transport ----------------------------------------------------------------------------------------

    def _get(self, path: str, **query: Any) -> JSON:
        with self._request("GET", path, query) as response:
            answer: JSON = response.json()
            return answer

    def _list(self, path: str, **query: Any) -> list[JSON]:
        data: list[JSON] = self._get(path, **query)["data"]
        return data

    def _create(self, path: str, body: Mapping[str, Any]) -> JSON:
        return self._post(path, body, {"Idempotency-Key": str(uuid.uuid4())})

    def _post(
        self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> JSON:
        with self._request("POST", path, body=body, headers=headers) as response:
            answer: JSON = response.json()
            return answer

    @contextmanager
    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[httpx.Response]:
        """An open successful response; its body is already read unless it is a file."""
        params = {name: value for name, value in (query or {}).items() if value is not None}
        request = self._http.build_request(method, path, params=params, json=body, headers=headers)
        response = self._send(request, repeatable=method == "GET" or "Idempotency-Key" in request.headers)
        try:
            if response.headers.get("content-type", "").split(";")[0].endswith("json"):
                response.read()
            yield response
        except httpx.TransportError as error:
            raise self._unreachable(error) from None
        finally:
            response.close()

    def _send(self, request: httpx.Request, *, repeatable: bool) -> httpx.Response:
        for attempt in range(RETRIES + 1):
            last = attempt == RETRIES or not repeatable
            try:
                response = self._http.send(request, stream=True)
            except httpx.TransportError as error:
                if last:
                    raise self._unreachable(error) from None
            else:
                if response.status_code not in RETRYABLE or last:
                    return _checked(response)
                response.close()
            time.sleep(min(0.2 * 2**attempt, 3.0))
        raise AssertionError("the last attempt returns or raises")

    def _stream(self, job_id: str, after: int) -> Iterator[sse.Event]:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(after)} if after else {})
        path = f"/v1/jobs/{job_id}/events"
        with self._http.stream("GET", path, headers=headers, timeout=SILENCE) as response:
            _checked(response)
            yield from sse.parse(response.iter_lines())

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"the service at {self.url} does not answer ({error or type(error).__name__}): "
            "is it running? `recast status` says, `recast up` starts one here"
        )


def _checked(response: httpx.Response) -> httpx.Response:
    """The response, if it is a success. Raises ProblemError otherwise."""
    if response.is_success:
        return response
    response.read()
    response.close()
    try:
        document = response.json()
    except ValueError:
        document = {"title": response.reason_phrase, "detail": response.text[:300]}
    raise ProblemError(response.status_code, document if isinstance(document, dict) else {})
