"""External proposals: clean images of another generator, for the estimator (a) of METHOD section 4.

``collection.collect`` buys, draws or finds them; ``keys`` and ``environment`` load no numpy, torch or SDK.
"""
