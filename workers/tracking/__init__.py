"""Metrics of trainings in MLflow, TensorBoard or Weights & Biases, beside the store.

Which ones, and where, the worker's environment says alone: no client can name an address.
"""
