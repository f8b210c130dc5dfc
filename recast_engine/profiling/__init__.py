"""When does a reward's feedback act? Rényi profiles over noise levels (METHOD sections 3 and 4).

Importing this package loads no torch; ``recast_engine.profiling.measure`` does.
"""

from recast_engine.profiling.estimator import Estimate, renyi_self_tilted
from recast_engine.profiling.profile import Curve, Profile

__all__ = ["Curve", "Estimate", "Profile", "renyi_self_tilted"]
