"""A paid provider of images as the purchase sees it: one question, one answer, and what can go wrong."""

from __future__ import annotations

from typing import Protocol


class Refused(Exception):
    """The provider's moderation declined the prompt: asking again is no use."""


class Retryable(Exception):
    """This answer is no use, another one may be; the text says why, without any secret.

    Attributes:
        billed: whether the provider may have charged for it.
        limited: the provider asks to slow down, which does not count as a try.
        declined: the model gave no reason; one that keeps answering like this has refused the prompt.
        after: seconds that it asks to wait, None when it does not say.
    """

    def __init__(
        self,
        reason: str,
        *,
        billed: bool = False,
        limited: bool = False,
        declined: bool = False,
        after: float | None = None,
    ) -> None:
        self.billed, self.limited, self.declined, self.after = billed, limited, declined, after
        super().__init__(reason)


class Provider(Protocol):
    """Asks for one image at a time; safe to use from several threads."""

    name: str

    def ask(self, prompt: str, seconds: float) -> bytes:
        """An encoded image of ``prompt``, within about ``seconds``.

        Raises:
            Refused: by moderation.
            Retryable: see there.
            ProposalFailure: asking again cannot help (key, quota, unknown model).
        """

    def close(self) -> None:
        """Close the connections."""
