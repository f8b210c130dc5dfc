"""From discriminability gains and budgets to the allocation matrix (METHOD sections 2 and 5). No torch."""

from recast_engine.allocation.allocate import allocate
from recast_engine.allocation.result import Allocation

__all__ = ["Allocation", "allocate"]
