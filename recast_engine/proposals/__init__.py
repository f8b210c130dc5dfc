"""External proposals: clean images of another generator, for the estimator (a) of METHOD section 4.

``keys`` and ``environment`` load no torch and no SDK; ``collect`` buys, draws or finds the images.
"""

from recast_engine.proposals.collection import Proposals, collect
from recast_engine.proposals.keys import image_key

__all__ = ["Proposals", "collect", "image_key"]
