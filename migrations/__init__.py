"""The database schema's history, and the call that brings a database up to date."""

from migrations.apply import upgrade

__all__ = ["upgrade"]
