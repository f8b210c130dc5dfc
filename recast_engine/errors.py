"""Errors of the engine: small, picklable, and worded for the person who can mend them."""


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose. ``type`` is stable; the text is for people."""

    type = "engine-error"


class ConfigError(EngineError):
    """The request cannot work as configured (unknown model, reward without its metadata, ...)."""

    type = "invalid-config"


class InvalidArgument(ConfigError, ValueError):
    """A public function was called with a malformed argument; the text names it."""


class WeightsUnavailable(EngineError):
    """Weights of a model or reward are not on this machine; the text says how to get them."""

    type = "weights-unavailable"


class NotConverged(EngineError):
    """A solver missed its tolerance; no result is better than a wrong one."""

    type = "not-converged"


class NonFinite(EngineError):
    """A loss or gradient became NaN or infinite; the text names the step."""

    type = "non-finite"


class RewardFailure(EngineError):
    """A reward failed on more images than is tolerable."""

    type = "reward-failure"


class CheckpointError(EngineError):
    """No usable checkpoint where one was needed."""

    type = "checkpoint-error"


class ProposalFailure(EngineError):
    """External proposals could not be had; the text says what to mend, and never holds a key."""

    type = "proposal-failure"


class DiskFull(EngineError):
    """Too little room for the next checkpoint; the text says how much is needed and how much is there."""

    type = "disk-full"


class Collapsed(EngineError):
    """The collapse guard paused a training; the text says what fell and how to go on."""

    type = "collapsed"


class DeviceLost(Exception):
    """Another process of a training on several devices is gone, so this one cannot go on.

    Not an EngineError: like the loss of the engine process itself it is no fault of the request.
    """
