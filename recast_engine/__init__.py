"""ReCAST's science: backbones, rewards, profiling, allocation, training, evaluation.

Knows no database, queue or HTTP; usable alone from a notebook. Importing this package loads no torch.
"""

__version__ = "0.1.0"
